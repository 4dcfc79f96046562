//! Who seals which block of a sequence, and when: bookkeeping alone.
//!
//! A block is sealed once it is full, its tokens are final, and every batch that wrote to it has ended. Usually one
//! batch wrote what was still missing, and seals it when it ends: the block is *promised* to that batch. Where that
//! cannot be said (another writer is in flight, or the tokens became final later), the sequence seals it at its next
//! operation after the writers have ended.
//!
//! ```text
//! blocks   0 .. settled                sealed, or promised to a batch
//!          promised_from .. settled    of these, promised to the batch `promised_to`, sealed by now or not
//!          settled ..                  open: nobody but the sequence can seal them
//!          settled .. due[0].full      of these, to be sealed once the batches up to `due[0].writer` have ended,
//!          due[0].full .. due[1].full  and then these
//! ```
//!
//! What becomes due later joins `due[1]`, so that `due[0]` waits for a fixed batch, however fast the sequence grows
//! under overlapping ones.
//!
//! A promise lies in a batch that perhaps another thread ends at any moment. Hence: a block that is promised and not
//! sealed yet is never written to again, but copied, unless the promise can be taken back from the very batch that
//! wants to write.

use crate::ids::Ticket;

/// See the [module](self).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Seals {
    settled: u32,
    promised_from: u32,
    promised_to: Ticket,
    /// The newest batch that wrote to open blocks, and the newest of the others that did. 0: none.
    writer: Ticket,
    writer_before: Ticket,
    due: [Due; 2],
}

/// Full blocks of final tokens that wait for the batches that wrote them. Empty: `full` is at most what comes before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Due {
    full: u32,
    writer: Ticket,
}

impl Seals {
    /// Blocks from the start that are sealed or promised.
    #[inline]
    pub(super) fn settled(&self) -> u32 {
        self.settled
    }

    /// Up to which block, and after which batch, the sequence may seal next.
    #[inline]
    pub(super) fn due(&self) -> Option<(u32, Ticket)> {
        (self.due[0].full > self.settled).then_some((self.due[0].full, self.due[0].writer))
    }

    /// The newest batch other than this one that wrote to open blocks.
    #[inline]
    pub(super) fn last_writer_but(&self, batch: Ticket) -> Ticket {
        if self.writer == batch { self.writer_before } else { self.writer }
    }

    /// Whether the block is promised to this batch.
    #[inline]
    pub(super) fn is_promised_to(&self, block: u32, batch: Ticket) -> bool {
        (self.promised_from..self.settled).contains(&block) && self.promised_to == batch
    }

    /// A batch writes to open blocks.
    #[inline]
    pub(super) fn wrote(&mut self, batch: Ticket) {
        if batch > self.writer {
            (self.writer, self.writer_before) = (batch, self.writer);
        } else if batch < self.writer && batch > self.writer_before {
            self.writer_before = batch;
        }
    }

    /// The open blocks up to `full` are promised to a batch; it, and no other in flight, wrote to them, and perhaps to
    /// the block that comes after.
    pub(super) fn promise(&mut self, full: u32, batch: Ticket) {
        if self.promised_to != batch {
            self.promised_from = self.settled;
        }
        *self = Self { settled: full, promised_to: batch, writer: batch, writer_before: Ticket(0), ..*self };
    }

    /// A batch writes to open blocks again, some of which may be due.
    pub(super) fn wrote_again(&mut self, batch: Ticket) {
        self.wrote(batch);
        self.due.iter_mut().for_each(|due| due.writer = due.writer.max(batch));
    }

    /// The blocks up to `full` are full of final tokens; those that are still open are due.
    pub(super) fn complete(&mut self, full: u32) {
        if full <= self.settled.max(self.due[0].full).max(self.due[1].full) {
            return;
        }
        let place = usize::from(self.due().is_some());
        self.due[place] = Due { full, writer: self.writer };
    }

    /// The sequence has sealed what was due next.
    pub(super) fn sealed(&mut self) {
        let [next, later] = self.due;
        // What was promised before keeps its place below; nothing of the new part is promised.
        (self.settled, self.promised_from) = (next.full, next.full);
        self.due = [later, Due::default()];
    }

    /// So many blocks of another sequence, all sealed, are the first ones.
    pub(super) fn adopt(&mut self, blocks: u32) {
        (self.settled, self.promised_from) = (blocks, blocks);
    }

    /// Only so many blocks remain, so many of them full.
    pub(super) fn truncate(&mut self, blocks: u32, full: u32) {
        self.settled = self.settled.min(blocks);
        self.promised_from = self.promised_from.min(blocks);
        self.due.iter_mut().for_each(|due| due.full = due.full.min(full));
    }

    /// A block, the last one, is open again.
    pub(super) fn reopen(&mut self, block: u32) {
        self.truncate(block, block);
    }

    /// The blocks of another sequence that shares these: promises are not its to take back.
    pub(super) fn forked(self) -> Self {
        Self { promised_from: self.settled, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn t(ticket: u64) -> Ticket {
        Ticket(ticket)
    }

    #[test]
    fn writers_are_told_apart() {
        let mut seals = Seals::default();
        for (batch, newest, but_two) in [(2, 2, 0), (2, 2, 0), (1, 2, 1), (5, 5, 5), (4, 5, 5), (2, 5, 5)] {
            seals.wrote(t(batch));
            assert_eq!((seals.writer, seals.last_writer_but(t(2))), (t(newest), t(but_two)));
        }
        assert_eq!(seals.last_writer_but(t(5)), t(4));
    }

    #[test]
    fn promises_are_of_the_last_batch_only() {
        let mut seals = Seals::default();
        seals.promise(2, t(1));
        seals.promise(3, t(1));
        assert!((0..3).all(|block| seals.is_promised_to(block, t(1))));
        seals.promise(5, t(2));
        assert_eq!([2, 3, 4, 5].map(|block| seals.is_promised_to(block, t(2))), [false, true, true, false]);
        assert!(!seals.is_promised_to(2, t(1)), "no longer known to be");
        seals.truncate(4, 4);
        assert!(seals.is_promised_to(3, t(2)) && !seals.is_promised_to(4, t(2)));
        assert!(!seals.forked().is_promised_to(3, t(2)));
        seals.complete(6);
        assert_eq!(seals.due(), Some((6, t(2))));
        seals.sealed();
        assert_eq!(seals.due(), None);
        assert!((0..7).all(|block| !seals.is_promised_to(block, t(2))));
        assert_eq!(seals.settled(), 6);
    }
    /// A sequence that fills blocks faster than batches end still has the oldest sealed in time.
    #[test]
    fn what_is_due_first_does_not_wait_for_what_comes_later() {
        let mut seals = Seals::default();
        for step in 1..=5 {
            seals.wrote(t(step));
            seals.complete(step as u32);
        }
        assert_eq!(seals.due(), Some((1, t(1))));
        seals.sealed();
        assert_eq!(seals.due(), Some((5, t(5))));
        seals.truncate(4, 3);
        assert_eq!(seals.due(), Some((3, t(5))));
        seals.wrote_again(t(9));
        assert_eq!(seals.due(), Some((3, t(9))));
        seals.sealed();
        assert_eq!((seals.due(), seals.settled()), (None, 3));
    }
}

//! Who seals which block of a sequence, and when: bookkeeping alone.
//!
//! A block is sealed once it is full, its tokens are final, and every batch that wrote to it has ended. Usually one
//! batch wrote what was still missing, and seals it when it ends: the block is *promised* to that batch. Where that
//! cannot be said (another writer is in flight, or the tokens became final later), the sequence seals it at its next
//! operation after the writers have ended.
//!
//! ```text
//! blocks   0 .. settled     sealed, or promised to a batch
//!          promised_from .. settled    of these, promised to the batch `promised_to`, sealed by now or not
//!          settled ..       open: nobody but the sequence can seal them
//! ```
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
}

impl Seals {
    /// Blocks from the start that are sealed or promised.
    #[inline]
    pub(super) fn settled(&self) -> u32 {
        self.settled
    }

    /// The newest of all batches that wrote to open blocks.
    #[inline]
    pub(super) fn last_writer(&self) -> Ticket {
        self.writer
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

    /// The sequence has sealed the open blocks up to `full`.
    pub(super) fn sealed(&mut self, full: u32) {
        // What was promised before keeps its place below; nothing of the new part is promised.
        (self.settled, self.promised_from) = (full, full);
    }

    /// Only so many blocks remain.
    pub(super) fn truncate(&mut self, blocks: u32) {
        self.settled = self.settled.min(blocks);
        self.promised_from = self.promised_from.min(blocks);
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
            assert_eq!((seals.last_writer(), seals.last_writer_but(t(2))), (t(newest), t(but_two)));
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
        seals.truncate(4);
        assert!(seals.is_promised_to(3, t(2)) && !seals.is_promised_to(4, t(2)));
        assert!(!seals.forked().is_promised_to(3, t(2)));
        seals.sealed(6);
        assert!((0..7).all(|block| !seals.is_promised_to(block, t(2))));
        assert_eq!(seals.settled(), 6);
    }
}

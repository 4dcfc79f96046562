//! When each block of a sequence is sealed, and by which batch: bookkeeping only.
//!
//! A block is sealed once it is full of final tokens and every batch that wrote to it has ended.
//! Usually one batch wrote the last missing tokens: the block is *promised* to it, and it seals the
//! block when it ends. Otherwise (another writer is in flight, or the tokens became final later)
//! the sequence seals it at its next operation after the writers have ended.
//!
//! ```text
//! blocks   0 .. settled                sealed, or promised to a batch
//!          promised_from .. settled    of these, promised to the batch `promised_to`; may be sealed already
//!          settled ..                  open: only the sequence can seal them
//!          settled .. due[0].full      of these, to be sealed once the batches up to `due[0].writer` have ended,
//!          due[0].full .. due[1].full  and then these
//! ```
//!
//! Blocks that become due later join `due[1]`, so that `due[0]` waits for a fixed batch, however
//! fast the sequence grows under overlapping batches.
//!
//! Another thread may end the promised batch at any moment. A promised, unsealed block is therefore
//! copied, not written, unless the writing batch holds the promise and can withdraw it.

use crate::ids::Ticket;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Seals {
    settled: u32,
    promised_from: u32,
    promised_to: Ticket,
    due: [Due; 2],
}

/// Full blocks of final tokens that wait for their writers; empty unless above the preceding range.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Due {
    full: u32,
    writer: Ticket,
}

impl Seals {
    #[inline]
    pub(super) fn settled(&self) -> u32 {
        self.settled
    }

    /// Returns the block up to which the sequence may seal next, and the batch that must end first.
    #[inline]
    pub(super) fn due(&self) -> Option<(u32, Ticket)> {
        (self.due[0].full > self.settled).then_some((self.due[0].full, self.due[0].writer))
    }

    #[inline]
    pub(super) fn is_promised_to(&self, block: u32, batch: Ticket) -> bool {
        (self.promised_from..self.settled).contains(&block) && self.promised_to == batch
    }

    /// Promises the open blocks up to `full` to the only batch in flight that wrote to them.
    pub(super) fn promise(&mut self, full: u32, batch: Ticket) {
        if self.promised_to != batch {
            self.promised_from = self.settled;
        }
        (self.settled, self.promised_to) = (full, batch);
    }

    /// Records that a batch writes to open blocks again, some of which may be due.
    pub(super) fn wrote_again(&mut self, batch: Ticket) {
        self.due.iter_mut().for_each(|due| due.writer = due.writer.max(batch));
    }

    /// Makes the open ones of the first `full` blocks due, after all batches up to `writer`.
    pub(super) fn complete(&mut self, full: u32, writer: Ticket) {
        if full <= self.settled.max(self.due[0].full).max(self.due[1].full) {
            return;
        }
        let place = usize::from(self.due().is_some());
        self.due[place] = Due { full, writer };
    }

    pub(super) fn sealed(&mut self) {
        let [next, later] = self.due;
        // Earlier promises lie below; nothing in the new range is promised.
        (self.settled, self.promised_from) = (next.full, next.full);
        self.due = [later, Due::default()];
    }

    /// Records that the first `blocks` blocks are sealed blocks of another sequence.
    pub(super) fn adopt(&mut self, blocks: u32) {
        (self.settled, self.promised_from) = (blocks, blocks);
    }

    pub(super) fn truncate(&mut self, blocks: u32, full: u32) {
        self.settled = self.settled.min(blocks);
        self.promised_from = self.promised_from.min(blocks);
        self.due.iter_mut().for_each(|due| due.full = due.full.min(full));
    }

    pub(super) fn reopen(&mut self, block: u32) {
        self.truncate(block, block);
    }

    /// Returns the state for a fork, which cannot withdraw this sequence's promises.
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
    fn promises_are_of_the_last_batch_only() {
        let mut seals = Seals::default();
        seals.promise(2, t(1));
        seals.promise(3, t(1));
        assert!((0..3).all(|block| seals.is_promised_to(block, t(1))));
        seals.promise(5, t(2));
        assert_eq!([2, 3, 4, 5].map(|block| seals.is_promised_to(block, t(2))), [false, true, true, false]);
        assert!(!seals.is_promised_to(2, t(1)), "only the last batch's promises are known");
        seals.truncate(4, 4);
        assert!(seals.is_promised_to(3, t(2)) && !seals.is_promised_to(4, t(2)));
        assert!(!seals.forked().is_promised_to(3, t(2)));
        seals.complete(6, t(2));
        assert_eq!(seals.due(), Some((6, t(2))));
        seals.sealed();
        assert_eq!(seals.due(), None);
        assert!((0..7).all(|block| !seals.is_promised_to(block, t(2))));
        assert_eq!(seals.settled(), 6);
    }

    /// The oldest blocks are sealed in time if a sequence fills blocks faster than batches end.
    #[test]
    fn what_is_due_first_does_not_wait_for_what_comes_later() {
        let mut seals = Seals::default();
        for step in 1..=5 {
            seals.complete(step as u32, t(step));
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

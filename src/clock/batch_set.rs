//! Sets of batches, for example of those that wrote to a sequence, which can be asked later whether
//! all of them have ended.
//!
//! A set is exact while at most [`EXACT`] of its batches are in flight at a time. If there are
//! more, the oldest is remembered by its ticket alone, and stands for all batches up to that
//! ticket: the set then says that it has not ended until these have ended too. It is never wrong in
//! the other direction.
//!
//! Bookkeeping only: the [clock](super::Clock::state) reads the slots.

use crate::ids::Ticket;

/// Batches in flight that a set tells apart.
pub const EXACT: usize = 3;

/// Identifies a batch of one clock, also after it has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatchRef {
    /// Its ticket; 0: no batch.
    pub(super) ticket: Ticket,
    pub(super) slot: u32,
}

/// State of a [`BatchSet`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetState {
    /// All its batches have ended, and what they did happens before what the caller does next.
    Ended,
    /// This batch, the newest one found, is in flight.
    InFlight(Ticket),
    /// No batch of the set was found in flight, but one is beginning that may belong to it.
    Beginning,
}

/// A set of batches of one clock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatchSet {
    each: [BatchRef; EXACT],
    /// All batches up to this ticket belong to the set.
    up_to: Ticket,
}

impl BatchSet {
    /// Adds a batch that is in flight, in the place of one that is not, if there is any.
    #[inline]
    pub(super) fn add(&mut self, batch: BatchRef, is_in_flight: impl Fn(BatchRef) -> bool) {
        if self.each[0].ticket == batch.ticket {
            return;
        }
        // Usually the one batch that was added before.
        if !is_in_flight(self.each[0]) {
            self.each[0] = batch;
        } else {
            self.add_beside(batch, is_in_flight);
        }
    }

    #[cold]
    fn add_beside(&mut self, batch: BatchRef, is_in_flight: impl Fn(BatchRef) -> bool) {
        let known = |place: &usize| self.each[*place].ticket == batch.ticket;
        let gone = |place: &usize| !is_in_flight(self.each[*place]);
        let place = (0..EXACT).find(known).or_else(|| (0..EXACT).find(gone));
        let place = place.unwrap_or_else(|| {
            let oldest = (0..EXACT).min_by_key(|&place| self.each[place].ticket).unwrap_or(0);
            self.add_up_to(self.each[oldest].ticket);
            oldest
        });
        self.each[place] = batch;
        // The newest writer is the first to be looked at.
        self.each.swap(0, place);
    }

    /// Adds all batches up to this ticket, which must have begun.
    pub fn add_up_to(&mut self, newest: Ticket) {
        self.up_to = self.up_to.max(newest);
    }

    /// Returns the batches that the set tells apart.
    pub(super) fn each(&self) -> impl Iterator<Item = BatchRef> + '_ {
        self.each.iter().copied()
    }

    /// Returns the ticket up to which all batches belong to the set; 0: none.
    pub fn up_to(&self) -> Ticket {
        self.up_to
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    fn batch(ticket: u64) -> BatchRef {
        BatchRef { ticket: Ticket(ticket), slot: ticket as u32 }
    }

    fn tickets(set: &BatchSet) -> Vec<u64> {
        let mut tickets: Vec<u64> = set.each().map(|batch| batch.ticket.0).filter(|&t| t != 0).collect();
        tickets.sort_unstable();
        tickets
    }

    #[test]
    fn ended_batches_make_room() {
        let mut set = BatchSet::default();
        for ticket in 1..=10 {
            set.add(batch(ticket), |batch| batch.ticket.0 + 1 == ticket && ticket > 1);
        }
        assert_eq!((tickets(&set).last(), set.up_to()), (Some(&10), Ticket(0)));
        let mut alone = BatchSet::default();
        (1..=10).for_each(|ticket| alone.add(batch(ticket), |_| false));
        assert_eq!((tickets(&alone), alone.up_to()), (vec![10], Ticket(0)));
    }

    #[test]
    fn too_many_in_flight_are_remembered_by_ticket() {
        let mut set = BatchSet::default();
        for ticket in [5, 2, 9, 2, 5] {
            set.add(batch(ticket), |batch| batch.ticket.0 != 0);
        }
        assert_eq!((tickets(&set), set.up_to()), (vec![2, 5, 9], Ticket(0)));
        set.add(batch(7), |batch| batch.ticket.0 != 0);
        assert_eq!((tickets(&set), set.up_to()), (vec![5, 7, 9], Ticket(2)));
        set.add(batch(3), |batch| batch.ticket.0 != 0);
        assert_eq!((tickets(&set), set.up_to()), (vec![3, 7, 9], Ticket(5)));
    }
}

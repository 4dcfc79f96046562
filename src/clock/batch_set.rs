//! Sets of batches. The [clock](super::Clock::state) checks their slots.
//!
//! A [`BatchRef`] is one word:
//!
//! | bits | field | meaning |
//! |---|---|---|
//! | 0..20 | slot | the batch's slot; the clock adds no slots beyond this range |
//! | 20..64 | ticket | the batch's ticket, as wide as in the clock's word; 0: no batch |
//!
//! Tickets are unique: references of one clock are equal and ordered as their batches are.

use crate::ids::Ticket;

use super::word::TICKET_BITS;

/// Number of batches in flight that a set distinguishes.
pub const EXACT: usize = 3;

const SLOT_BITS: u32 = 20;
const _: () = assert!(SLOT_BITS + TICKET_BITS == u64::BITS);

/// Identifies a batch of one clock, including one that has ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct BatchRef(u64);

impl BatchRef {
    pub(super) const SLOTS_MAX: usize = 1 << SLOT_BITS;

    #[inline]
    pub(super) fn new(ticket: Ticket, slot: usize) -> Self {
        debug_assert!(slot < Self::SLOTS_MAX && ticket.0 >> TICKET_BITS == 0, "{ticket:?} in slot {slot}");
        Self(ticket.0 << SLOT_BITS | slot as u64)
    }

    #[inline]
    pub(super) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    #[inline]
    pub(super) fn to_bits(self) -> u64 {
        self.0
    }

    /// Returns the ticket; 0: no batch.
    #[inline]
    pub fn ticket(self) -> Ticket {
        Ticket(self.0 >> SLOT_BITS)
    }

    /// Returns the number of the batch's slot, which later batches take.
    #[inline]
    pub fn slot(self) -> usize {
        self.0 as usize & (Self::SLOTS_MAX - 1)
    }
}

/// State of a [`BatchSet`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetState {
    /// All its batches have ended, and their effects happen before the caller's next operations.
    Ended,
    /// The newest batch of the set that was found in flight.
    InFlight(BatchRef),
    /// No batch was found in flight, but one in this slot is beginning. If it belongs to the set,
    /// it has at most this ticket.
    Beginning(BatchRef),
}

impl SetState {
    /// Returns the batch that has not ended, or may be about to begin.
    pub fn awaited(self) -> Option<BatchRef> {
        match self {
            Self::Ended => None,
            Self::InFlight(batch) | Self::Beginning(batch) => Some(batch),
        }
    }
}

/// A set of batches of one clock, exact while at most `EXACT` of them are in flight. Beyond that,
/// the oldest one's ticket represents all batches up to it: the set may end late, never early.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BatchSet {
    each: [BatchRef; EXACT],
    up_to: Ticket,
}

impl BatchSet {
    /// Returns whether this batch was added last.
    #[inline]
    pub fn is_last(&self, batch: BatchRef) -> bool {
        self.each[0] == batch
    }

    /// Adds a batch in flight, replacing one that is not. `gone` remembers the last batch found to
    /// have ended, so that sets to which the same batches are added in turn detect each end once.
    #[inline(always)]
    pub(super) fn add(
        &mut self,
        batch: BatchRef,
        gone: &mut BatchRef,
        is_in_flight: impl Fn(BatchRef) -> bool,
    ) {
        if self.each[0] == *gone {
            self.each[0] = batch;
        } else if !self.is_last(batch) {
            self.add_unusual(batch, gone, is_in_flight);
        }
    }

    #[inline(never)]
    fn add_unusual(&mut self, batch: BatchRef, gone: &mut BatchRef, is_in_flight: impl Fn(BatchRef) -> bool) {
        if !is_in_flight(self.each[0]) {
            *gone = self.each[0];
            self.each[0] = batch;
        } else {
            self.add_beside(batch, is_in_flight);
        }
    }

    #[cold]
    fn add_beside(&mut self, batch: BatchRef, is_in_flight: impl Fn(BatchRef) -> bool) {
        let known = |place: &usize| self.each[*place] == batch;
        // A batch that replaced an ended one may be in the set twice.
        let is_repeated = |place: usize| self.each[..place].contains(&self.each[place]);
        let gone = |&place: &usize| is_repeated(place) || !is_in_flight(self.each[place]);
        let place = (0..EXACT).find(known).or_else(|| (0..EXACT).find(gone));
        let place = place.unwrap_or_else(|| {
            let oldest = (0..EXACT).min_by_key(|&place| self.each[place]).unwrap_or(0);
            self.add_up_to(self.each[oldest].ticket());
            oldest
        });
        self.each[place] = batch;
        // The last one added is checked first.
        self.each.swap(0, place);
    }

    /// Adds all batches up to this ticket, which must have begun.
    pub fn add_up_to(&mut self, newest: Ticket) {
        self.up_to = self.up_to.max(newest);
    }

    pub(super) fn each(&self) -> impl Iterator<Item = BatchRef> + '_ {
        self.each.iter().copied()
    }

    /// Returns the newest of its batches that may be in flight, or a newer one; 0: none.
    pub fn newest(&self) -> Ticket {
        self.each().map(BatchRef::ticket).fold(self.up_to, Ticket::max)
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
        BatchRef::new(Ticket(ticket), ticket as usize)
    }

    fn tickets(set: &BatchSet) -> Vec<u64> {
        let mut tickets: Vec<u64> = set.each().map(|batch| batch.ticket().0).filter(|&t| t != 0).collect();
        tickets.sort_unstable();
        tickets
    }

    #[test]
    fn a_reference_holds_ticket_and_slot() {
        let (newest, last) = (Ticket((1 << TICKET_BITS) - 1), BatchRef::SLOTS_MAX - 1);
        for (ticket, slot) in [(Ticket(0), 0), (Ticket(1), last), (newest, 0), (newest, last)] {
            let batch = BatchRef::new(ticket, slot);
            assert_eq!((batch.ticket(), batch.slot()), (ticket, slot));
        }
        assert!(BatchRef::new(Ticket(1), last) < BatchRef::new(Ticket(2), 0));
        assert_eq!(BatchRef::default().ticket(), Ticket(0));
    }

    #[test]
    fn ended_batches_make_room() {
        let mut set = BatchSet::default();
        for ticket in 1..=10 {
            set.add(batch(ticket), &mut BatchRef::default(), |batch| {
                batch.ticket().0 + 1 == ticket && ticket > 1
            });
        }
        assert_eq!((tickets(&set).last(), set.up_to()), (Some(&10), Ticket(0)));
        let mut alone = BatchSet::default();
        (1..=10).for_each(|ticket| alone.add(batch(ticket), &mut BatchRef::default(), |_| false));
        assert_eq!((tickets(&alone), alone.up_to()), (vec![10], Ticket(0)));
    }

    #[test]
    fn the_end_of_a_batch_is_found_once() {
        let (mut sets, mut gone) = ([BatchSet::default(); 3], BatchRef::default());
        let looks = std::cell::Cell::new(0);
        for ticket in 1..=5 {
            for set in &mut sets {
                set.add(batch(ticket), &mut gone, |_| {
                    looks.set(looks.get() + 1);
                    false
                });
                assert_eq!(tickets(set), [ticket]);
            }
            assert_eq!((looks.get(), gone), (ticket - 1, batch(ticket - 1)));
        }
    }

    #[test]
    fn too_many_in_flight_are_remembered_by_ticket() {
        let mut set = BatchSet::default();
        for ticket in [5, 2, 9, 2, 5] {
            set.add(batch(ticket), &mut BatchRef::default(), |batch| batch.ticket().0 != 0);
        }
        assert_eq!((tickets(&set), set.up_to()), (vec![2, 5, 9], Ticket(0)));
        set.add(batch(7), &mut BatchRef::default(), |batch| batch.ticket().0 != 0);
        assert_eq!((tickets(&set), set.up_to()), (vec![5, 7, 9], Ticket(2)));
        set.add(batch(3), &mut BatchRef::default(), |batch| batch.ticket().0 != 0);
        assert_eq!((tickets(&set), set.up_to()), (vec![3, 7, 9], Ticket(5)));
    }
}

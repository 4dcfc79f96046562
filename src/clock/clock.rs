//! Tickets, and the oldest batch in flight.
//!
//! Each batch in flight has a slot. Its value is the batch's ticket, or, marked as such, a lower bound
//! of it while the batch begins; 0 means that the slot is empty. Slots come in chunks that are added as needed and never removed. A thread
//! looks for an empty slot from a place of its own on, so that threads share no cache line; which
//! slot it takes matters to no invariant.
//!
//! # Protocol
//!
//! ```text
//! begin:    slot: 0 -> newest + 1, marked;  word += BEGIN (this gives the ticket);  fence(SeqCst);  slot := ticket;  read tables
//! end:      slot := 0;  word -= END;  end awaited? look at the tasks that wait (see `ends`)
//!                                     awaited? announce what the batch held back
//! retire:   unlink the frame from the tables;  fence(SeqCst) if readers may hold the old table;  tag := word.newest
//! reclaim:  n := word.newest;  oldest := min(slots), or n + 1;  tag < oldest => reusable
//! ```
//!
//! # Invariants
//!
//! - A scan that read `newest >= t` sees the slot of ticket `t`: the slot was taken before the word
//!   was raised, and the scan's load of the word synchronises with that. So no batch with a ticket
//!   below `oldest` is in flight.
//! - A batch that read a frame from a table before it was unlinked has a ticket of at most the
//!   frame's tag: by happens-before if the table's owner unlinked it, by the two fences if another
//!   thread did.
//! - A slot holds a ticket without the mark exactly while the batch of that ticket is in flight and
//!   has begun: tickets are unique, and bounds are marked.
//!
//! Hence no batch can see a frame whose tag is below `oldest`: such a tag is at most `n`, and the
//! scan sees the slot of every ticket up to `n`. The scan needs no fence for this: a batch that it
//! misses has a ticket above `n`, hence above the tag, and by the second invariant has not read the
//! frame from a table. A thread stopped in `begin` holds reclaim back, as a batch that never ends
//! does, but blocks no allocation while there are other free frames.
//!
//! Model: `loom-tests/tests/retire_reclaim.rs`.

use std::ptr;
use std::task::{Context, Poll};

use crate::ids::{PoolTag, Ticket};
use crate::sync::{
    AtomicPtr, AtomicU64, CachePadded, Ordering::*, fence_after_rmw, next_pool_tag, thread_number,
};

use super::batch_set::{BatchRef, BatchSet, SetState};
use super::ends::{Awaited, EndPlace, Ends};
use super::word::ClockWord;

/// Mark of a lower bound in a slot, above all tickets.
const BEGINNING: u64 = 1 << 63;

/// Number of slots per chunk.
const SLOTS: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

/// Slots of one cache line: threads start to look so far from each other.
const SLOTS_APART: usize = if cfg!(kvpool_loom) { 1 } else { 8 };

struct Chunk {
    slots: [AtomicU64; SLOTS],
    next: AtomicPtr<Chunk>,
}

impl Chunk {
    fn new() -> Self {
        Self { slots: std::array::from_fn(|_| AtomicU64::new(0)), next: AtomicPtr::new(ptr::null_mut()) }
    }
}

/// Source of tickets, which knows the oldest batch in flight.
pub struct Clock {
    word: CachePadded<AtomicU64>,
    slots: CachePadded<Chunk>,
    /// Tasks that wait for the end of batches.
    ends: Ends,
    /// Distinguishes this clock's batches from those of other clocks.
    tag: PoolTag,
}

/// A batch in flight: its ticket and its slot. It must be passed to [`Clock::end`] of the same
/// clock.
#[derive(Debug)]
#[must_use = "a batch that never ends holds back every frame retired after it"]
pub struct InFlight {
    batch: BatchRef,
    clock: PoolTag,
}

impl InFlight {
    /// Returns the batch's position in the order of batches.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        self.batch.ticket()
    }

    /// Returns a reference to the batch, which stays valid after it has ended.
    #[inline]
    pub fn batch(&self) -> BatchRef {
        self.batch
    }
}

impl Default for Clock {
    fn default() -> Self {
        let (word, slots) = (CachePadded::new(AtomicU64::new(0)), CachePadded::new(Chunk::new()));
        Self { word, slots, ends: Ends::default(), tag: next_pool_tag() }
    }
}

impl Clock {
    /// Begins a batch. Tables read after this call are safe to use until [`end`](Self::end). If
    /// this batch's slot held an older bound while it began, blocks held back by other batches may
    /// become reusable only now: `Core::begin_batch` announces this to waiting requests.
    ///
    /// # Panics
    ///
    /// If 65,536 batches are in flight. The clock is unchanged.
    pub fn begin(&self) -> InFlight {
        self.begin_from(thread_number().wrapping_mul(SLOTS_APART))
    }

    /// As [`begin`](Self::begin), in the first empty slot from this one on.
    #[inline]
    pub fn begin_from(&self, first: usize) -> InFlight {
        let slot = self.take_slot(first % SLOTS);
        // Release: the slot is taken before the word says so; pairs with the Acquire in `oldest`.
        // The additions of other batches continue the release sequence.
        let before = ClockWord::from_bits(self.word.fetch_add(ClockWord::BEGIN, AcqRel));
        // Pairs with the fence of a thread that unlinks a frame from a table that this batch is
        // about to read (`retire_tag`): the batch sees the new table, or the frame's tag covers its
        // ticket. Before the store below, so that the addition serves as the fence: until that
        // store is seen, the slot has a lower bound, which only holds back more.
        fence_after_rmw();
        let ticket = Ticket(before.newest().0 + 1);
        if before.in_flight() >= ClockWord::IN_FLIGHT_MAX {
            // No announcement is needed: one of the many other batches will end.
            let _ = self.end(InFlight { batch: BatchRef::new(ticket, slot), clock: self.tag });
            panic!("too many batches in flight: {before:?}");
        }
        // Relaxed: a thread that reads the new bound may conclude that the slot's previous batch has
        // ended, and must then see that it has: the fence above acquires what `take_slot` read, and
        // releases it.
        self.slot(slot).store(ticket.0, Relaxed);
        InFlight { batch: BatchRef::new(ticket, slot), clock: self.tag }
    }

    /// Ends a batch: it no longer reads or writes memory. Returns true if requests wait for blocks:
    /// the caller must announce that blocks which the batch held back may be free.
    ///
    /// # Panics
    ///
    /// If the batch belongs to another clock: ending its number here would end another batch, whose
    /// frames are still being read.
    #[must_use = "waiting requests must be told: call `Core::end_batch`, which also does that"]
    pub fn end(&self, batch: InFlight) -> bool {
        assert!(batch.clock == self.tag, "{batch:?} belongs to another clock than {:?}", self.tag);
        // Release, both: the batch's accesses happen before the reuse of its frames. They pair with
        // the Acquires in `oldest` and `idle_or_tag`.
        self.slot(batch.batch.slot()).store(0, Release);
        // No fence: if a waiting request or task set its bit before this, we see it; if it sets it
        // later, its Acquire sees the end.
        let word = ClockWord::from_bits(self.word.fetch_sub(ClockWord::END, Release));
        if word.is_end_awaited() {
            self.ends.tell(self);
        }
        word.is_awaited()
    }

    /// Polls for the end of these batches, on behalf of the task whose place this is.
    ///
    /// Pending: the task is woken when they have ended. The place must be [left](Self::leave_ends)
    /// if it is not polled to the end.
    pub fn poll_ended(
        &self,
        batches: &BatchSet,
        place: &mut EndPlace,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        self.ends.poll(self, batches, place, context)
    }

    /// Forgets the task whose place this is.
    pub fn leave_ends(&self, place: &mut EndPlace) {
        self.ends.leave(self, place);
    }

    /// Returns the number of tasks that wait for the end of batches.
    pub fn waiting_for_ends(&self) -> usize {
        self.ends.len()
    }

    /// Adds a batch of this clock, which is in flight, to a set, which forgets one that has ended.
    ///
    /// `gone`, at first no batch, remembers one that has ended from call to call.
    #[inline(always)]
    pub fn note(&self, batches: &mut BatchSet, batch: BatchRef, gone: &mut BatchRef) {
        batches.add(batch, gone, |batch| self.is_in_flight(batch));
    }

    /// Returns whether a batch of this clock, which has begun, is in flight.
    #[inline]
    pub fn is_in_flight(&self, batch: BatchRef) -> bool {
        // Acquire: pairs with `end`; what this batch did happens before what the caller does next.
        // A later batch's value in the slot gives the same: see `begin_from`.
        let ticket = batch.ticket();
        ticket != Ticket(0) && self.slot(batch.slot()).load(Acquire) == ticket.0
    }

    /// Returns whether all batches of a set but the one that was added last have ended.
    #[inline]
    pub fn others_ended(&self, batches: &BatchSet) -> bool {
        let mut others = batches.each().skip(1);
        batches.up_to() == Ticket(0) && others.all(|batch| !self.is_in_flight(batch))
    }

    /// Returns whether all batches of a set have ended. That they began happens before the call.
    pub fn state(&self, batches: &BatchSet) -> SetState {
        let each = batches.each().filter(|&batch| self.is_in_flight(batch)).map(BatchRef::ticket);
        if let Some(newest) = each.max() {
            return SetState::InFlight(newest);
        }
        if batches.up_to() == Ticket(0) { SetState::Ended } else { self.state_up_to(batches.up_to()) }
    }

    /// Returns whether all batches up to this ticket have ended. That it has begun happens before the
    /// call, so that the scan sees the slot of every batch up to it.
    #[cold]
    fn state_up_to(&self, newest: Ticket) -> SetState {
        let mut state = SetState::Ended;
        let mut found = Ticket(0);
        self.for_each_slot(|value| {
            if value != 0 && value & !BEGINNING <= newest.0 {
                if value & BEGINNING == 0 {
                    found = found.max(Ticket(value));
                } else {
                    state = SetState::Beginning;
                }
            }
        });
        if found == Ticket(0) { state } else { SetState::InFlight(found) }
    }

    /// Returns the current word.
    #[inline]
    pub fn read(&self) -> ClockWord {
        // Acquire: pairs with `end`.
        ClockWord::from_bits(self.word.load(Acquire))
    }

    /// Sets the awaited bit: a request waits for blocks. Its own search, begun after a heavy fence,
    /// finds blocks made available by threads that do not see the bit yet.
    pub fn set_awaited(&self) {
        // Acquire: pairs with the Release of batches that ended without seeing this. Release: the
        // thread that clears the bit after us, and then looks again, sees our earlier writes.
        self.word.fetch_or(ClockWord::AWAITED, AcqRel);
    }

    /// Clears the awaited bit: no request waits for blocks.
    pub fn clear_awaited(&self) {
        // Acquire: pairs with the Release in `set_awaited`, so that the thread that clears the bit
        // and then looks finds the reason for setting it.
        self.word.fetch_and(!ClockWord::AWAITED, AcqRel);
    }

    /// Marks the device as lost: no more blocks are allocated. Returns true if requests wait for
    /// blocks: the caller must tell them.
    #[must_use = "waiting requests must be told: call `Core::poison`, which also does that"]
    pub fn lose(&self) -> bool {
        // Relaxed: if a waiting request set its bit earlier in the word's order, we see it;
        // otherwise, it reads from then on that the device is lost. The line's lock orders the
        // rest.
        ClockWord::from_bits(self.word.fetch_or(ClockWord::LOST, Relaxed)).is_awaited()
    }

    /// Returns the newest ticket, used as the tag of frames just unlinked.
    #[inline]
    pub fn newest(&self) -> Ticket {
        // Relaxed: only a number. A thread that draws a conclusion compares it with `oldest`, which
        // reads the word again.
        ClockWord::from_bits(self.word.load(Relaxed)).newest()
    }

    /// Returns the tag for frames that their owner has just released. `None` means that no batch is
    /// in flight: the frames are reusable at once.
    #[inline]
    pub fn idle_or_tag(&self) -> Option<Ticket> {
        // Acquire: pairs with `end`. No fence is needed: a batch that saw these frames began before
        // their owner released them, in happens-before order, so that this load sees it.
        let word = self.read();
        (word.in_flight() != 0).then(|| word.newest())
    }

    /// Returns the oldest ticket that may still be in flight: every batch with a smaller one has
    /// ended.
    pub fn oldest(&self) -> Ticket {
        // Acquire: pairs with the Release in `begin`, so that the scan sees the slot of every
        // ticket up to this one, and with `end`.
        let newest = ClockWord::from_bits(self.word.load(Acquire)).newest();
        let mut oldest = newest.0 + 1;
        self.for_each_slot(|value| {
            if value != 0 {
                oldest = oldest.min(value & !BEGINNING);
            }
        });
        Ticket(oldest)
    }

    /// Calls `f` with the value of every slot.
    #[inline]
    fn for_each_slot(&self, mut f: impl FnMut(u64)) {
        let mut chunk: &Chunk = &self.slots;
        loop {
            // Acquire: pairs with `end`.
            chunk.slots.iter().for_each(|slot| f(slot.load(Acquire)));
            match self.next(chunk) {
                Some(next) => chunk = next,
                None => return,
            }
        }
    }

    /// Returns the oldest batch in flight, if there is any.
    pub fn oldest_in_flight(&self) -> Option<Ticket> {
        if self.in_flight() == 0 {
            return None;
        }
        // If no batch was in flight, `oldest` is one above the newest ticket of that moment; a
        // batch that has begun since may have that ticket.
        Some(self.oldest()).filter(|&oldest| oldest <= self.newest())
    }

    /// Returns whether the batch with this ticket, and every one before it, has ended.
    pub fn ended(&self, ticket: Ticket) -> bool {
        ticket < self.oldest()
    }

    /// Returns the number of batches in flight.
    pub fn in_flight(&self) -> u64 {
        ClockWord::from_bits(self.word.load(Relaxed)).in_flight()
    }

    /// Takes an empty slot: in each chunk from place `first` on, and around.
    fn take_slot(&self, first: usize) -> usize {
        let mut chunk: &Chunk = &self.slots;
        let mut base = 0;
        loop {
            for i in (first..SLOTS).chain(0..first) {
                let slot = &chunk.slots[i];
                if slot.load(Relaxed) != 0 {
                    continue;
                }
                // A lower bound of the ticket to come. Relaxed: in the word's modification order,
                // our own addition comes after any value that we read.
                let bound = ClockWord::from_bits(self.word.load(Relaxed)).newest().0 + 1;
                // Relaxed: continues the release sequence of the `end` of the slot's previous batch;
                // the fence in `begin_from` acquires it. If another batch wins the slot, that is
                // progress.
                if slot.compare_exchange(0, bound | BEGINNING, Relaxed, Relaxed).is_ok() {
                    return base + i;
                }
            }
            base += SLOTS;
            chunk = match self.next(chunk) {
                Some(next) => next,
                None if base < BatchRef::SLOTS_MAX => Self::add_chunk(chunk),
                None => {
                    // Far fewer batches are in flight, so that there are empty slots. Only slots
                    // that were emptied behind this search can bring it here.
                    base = 0;
                    &self.slots
                }
            };
        }
    }

    /// Adds a chunk: more batches are in flight than ever before. Reached by
    /// `more_batches_than_a_chunk`.
    #[cold]
    fn add_chunk(last: &Chunk) -> &Chunk {
        let fresh = Box::into_raw(Box::new(Chunk::new()));
        // Release: publishes the empty slots. Acquire: sees the slots of a faster thread's chunk.
        match last.next.compare_exchange(ptr::null_mut(), fresh, AcqRel, Acquire) {
            // SAFETY: just created and published; freed only with the clock.
            Ok(_) => unsafe { &*fresh },
            Err(other) => {
                // SAFETY: created here and never published.
                drop(unsafe { Box::from_raw(fresh) });
                // SAFETY: published chunks live as long as the clock.
                unsafe { &*other }
            }
        }
    }

    fn next<'a>(&'a self, chunk: &'a Chunk) -> Option<&'a Chunk> {
        // SAFETY: published chunks live as long as the clock. Acquire: pairs with `add_chunk`.
        unsafe { chunk.next.load(Acquire).as_ref() }
    }

    fn slot(&self, index: usize) -> &AtomicU64 {
        let mut chunk: &Chunk = &self.slots;
        for _ in 0..index / SLOTS {
            chunk = self.next(chunk).expect("a slot of this clock");
        }
        &chunk.slots[index % SLOTS]
    }
}

impl Awaited for Clock {
    fn state(&self, batches: &BatchSet) -> SetState {
        self.state(batches)
    }

    fn set_end_awaited(&self) {
        // Acquire: pairs with the Release in `end`, if that did not see the bit.
        self.word.fetch_or(ClockWord::END_AWAITED, AcqRel);
    }

    fn clear_end_awaited(&self) {
        // Relaxed, both: the lock orders the bit, and no other access is ordered by it.
        if ClockWord::from_bits(self.word.load(Relaxed)).is_end_awaited() {
            self.word.fetch_and(!ClockWord::END_AWAITED, Relaxed);
        }
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        let mut next = self.slots.next.load(Relaxed);
        while !next.is_null() {
            // SAFETY: `&mut self`: no other thread uses the clock; each chunk came from
            // `Box::into_raw` and is freed once.
            let chunk = unsafe { Box::from_raw(next) };
            next = chunk.next.load(Relaxed);
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_follows_ends_out_of_order() {
        let clock = Clock::default();
        assert_eq!(clock.idle_or_tag(), None);
        let (a, b, c) = (clock.begin(), clock.begin(), clock.begin());
        assert_eq!((a.ticket(), b.ticket(), c.ticket()), (Ticket(1), Ticket(2), Ticket(3)));
        assert_eq!(clock.idle_or_tag(), Some(Ticket(3)));
        assert!(!clock.end(b));
        assert_eq!(clock.oldest(), Ticket(1));
        assert!(!clock.end(a));
        assert_eq!(clock.oldest(), Ticket(3));
        assert!(clock.ended(Ticket(2)) && !clock.ended(Ticket(3)));
        assert!(!clock.end(c));
        assert_eq!(clock.oldest(), Ticket(4));
        assert_eq!(clock.idle_or_tag(), None);
    }

    #[test]
    fn the_end_of_a_batch_reports_waiting_requests() {
        let clock = Clock::default();
        let (a, b) = (clock.begin(), clock.begin());
        clock.set_awaited();
        assert!(clock.end(a));
        assert_eq!((clock.in_flight(), clock.newest()), (1, Ticket(2)));
        clock.clear_awaited();
        assert!(!clock.end(b));
        assert!(clock.read().is_quiet());
    }

    /// Ending another clock's batch would allow the reuse of frames that a batch still reads.
    #[test]
    fn a_batch_of_another_clock_is_refused() {
        let (clock, other) = (Clock::default(), Clock::default());
        let batch = clock.begin();
        let foreign = other.begin();
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| clock.end(foreign)));
        assert!(refused.is_err());
        assert_eq!((clock.in_flight(), clock.oldest()), (1, batch.ticket()));
        assert!(!clock.end(batch));
    }

    #[test]
    fn one_batch_too_many_changes_nothing() {
        let clock = Clock::default();
        clock.word.store(ClockWord::IN_FLIGHT_MAX, Relaxed);
        let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| clock.begin()));
        assert!(refused.is_err());
        assert_eq!(clock.in_flight(), ClockWord::IN_FLIGHT_MAX);
        assert_eq!(clock.oldest(), Ticket(2), "its slot is empty again");
    }

    #[test]
    fn batches_of_all_places_are_seen() {
        let clock = Clock::default();
        let batches: Vec<_> = (0..3 * SLOTS).map(|first| clock.begin_from(first * 7)).collect();
        let mut slots: Vec<usize> = batches.iter().map(|batch| batch.batch.slot()).collect();
        slots.sort_unstable();
        assert!(slots.iter().copied().eq(0..3 * SLOTS), "{slots:?}");
        for (ended, batch) in (1..).zip(batches) {
            assert_eq!(clock.oldest(), Ticket(ended));
            assert!(!clock.end(batch));
        }
        assert_eq!(clock.oldest_in_flight(), None);
    }

    /// A batch is told apart from those in flight around it, and from a later one in its slot.
    #[test]
    fn a_batch_ends_by_itself() {
        let clock = Clock::default();
        let (a, b) = (clock.begin(), clock.begin());
        let (older, newer) = (a.batch(), b.batch());
        assert!(clock.is_in_flight(older) && clock.is_in_flight(newer));
        assert!(!clock.end(b));
        assert!(clock.is_in_flight(older) && !clock.is_in_flight(newer));
        let again = clock.begin_from(newer.slot());
        assert_eq!(again.batch().slot(), newer.slot());
        assert!(!clock.is_in_flight(newer) && clock.is_in_flight(again.batch()));
        assert!(!clock.end(a) && !clock.end(again));
        assert!(!clock.is_in_flight(BatchRef::default()));
    }

    /// Only a batch that ended is replaced, and the batch added last does not count itself.
    #[test]
    fn the_batch_added_last_may_be_the_only_one_in_flight() {
        let clock = Clock::default();
        let (mut set, mut gone) = (BatchSet::default(), BatchRef::default());
        let (a, b) = (clock.begin(), clock.begin());
        clock.note(&mut set, a.batch(), &mut gone);
        assert!(clock.others_ended(&set));
        clock.note(&mut set, b.batch(), &mut gone);
        assert!(!clock.others_ended(&set), "the first is in flight");
        assert_eq!(gone, BatchRef::default());
        let _ = clock.end(a);
        assert!(clock.others_ended(&set));
        set.add_up_to(Ticket(1));
        assert!(!clock.others_ended(&set), "not known without a look at all slots");
        let c = clock.begin();
        let b_was = b.batch();
        let _ = clock.end(b);
        clock.note(&mut set, c.batch(), &mut gone);
        assert_eq!(gone, b_was);
        assert_eq!(clock.state(&set), SetState::InFlight(c.ticket()));
        let _ = clock.end(c);
    }

    /// What a begin has put into its slot so far is no batch of that ticket, and is waited for.
    #[test]
    fn a_batch_that_begins_is_neither_in_flight_nor_ended() {
        let clock = Clock::default();
        let mut all = BatchSet::default();
        all.add_up_to(Ticket(1));
        let slot = clock.take_slot(0);
        assert_eq!(clock.oldest(), Ticket(1));
        assert!(!clock.is_in_flight(BatchRef::new(Ticket(1), slot)));
        assert_eq!(clock.state(&all), SetState::Beginning);
        clock.slot(slot).store(0, Relaxed);
        assert_eq!(clock.state(&all), SetState::Ended);
    }

    #[test]
    fn more_batches_than_a_chunk() {
        let clock = Clock::default();
        let mut batches: Vec<_> = (0..3 * SLOTS + 1).map(|_| clock.begin()).collect();
        assert_eq!(clock.in_flight(), batches.len() as u64);
        while let Some(batch) = batches.pop() {
            assert_eq!(clock.oldest(), Ticket(1));
            assert!(!clock.end(batch));
        }
        assert_eq!(clock.oldest(), Ticket(3 * SLOTS as u64 + 2));
    }
}

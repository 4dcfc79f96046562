//! Tickets, and the oldest batch in flight.
//!
//! Each batch in flight has a [slot](super::slots). It holds the batch's ticket or, while the batch
//! begins, a *provisional* value: a lower bound of the ticket. No invariant depends on which slot
//! it is. The slots in use are below the *high-water mark*.
//!
//! ```text
//! begin:    slot: empty -> newest + 1, provisional;  word += BEGIN (this gives the ticket);
//!           fence(SeqCst);  slot := ticket;  read tables
//! end:      slot := empty;  word -= END;  end awaited? look at the tasks that wait (see `ends`)
//!                                     awaited? announce what the batch held back
//! retire:   unlink the frame from the tables;  fence(SeqCst) if readers may hold the old table;  tag := word.newest
//! reclaim:  word.in flight = 0?                      oldest := word.newest + 1
//!           the oldest batch known is in flight?     oldest := its ticket
//!           else scan:                               n := word.newest;
//!                                                    oldest := min(slots below the high-water mark), or n + 1
//!           tag < oldest => reusable
//! ```
//!
//! # Invariants
//!
//! - A scan that read `newest >= t` sees the slot of ticket `t`: the slot was taken before the word
//!   was raised, and the scan's load of the word synchronises with that. So no batch with a ticket
//!   below `oldest` is in flight.
//! - A batch that read a frame from a table before it was unlinked has a ticket of at most the
//!   frame's tag: by happens-before if the table's owner unlinked it, by the two fences otherwise.
//! - A slot holds a ticket that is not provisional exactly while that batch is in flight.
//!
//! Hence no batch can see a frame whose tag is below `oldest`. The scan needs no fence: a batch
//! that it misses has a ticket above `n`, hence above the tag, and has not read the frame from a
//! table. A thread stopped in `begin` delays reclaim, but blocks no allocation while other frames
//! are free. Model: `loom-tests/tests/retire_reclaim.rs`.

use std::task::{Context, Poll};

use crate::ids::{PoolTag, Ticket};
use crate::sync::{
    AtomicU64, CachePadded, Mutex, Ordering::*, fence_after_rmw, next_pool_tag, thread_number,
};

use super::batch_set::{BatchRef, BatchSet, SetState};
use super::ends::{Awaited, EndPlace, Ends};
use super::slots::{BEGINNING, SLOTS, Slots};
use super::word::ClockWord;

const SLOTS_APART: usize = if cfg!(kvpool_loom) { 1 } else { 8 };

/// Source of tickets, which finds the oldest batch in flight.
pub struct Clock {
    word: CachePadded<AtomicU64>,
    slots: Slots,
    /// All batches before it have ended. A [`BatchRef`].
    oldest: AtomicU64,
    /// Batches in flight from the last scan, newest first; ended ones are popped from the end.
    rest: Mutex<Vec<BatchRef>>,
    ends: Ends,
    tag: PoolTag,
}

/// A batch in flight. It must be passed to [`Clock::end`] of the same clock.
#[derive(Debug)]
#[must_use = "a batch that never ends holds back every frame retired after it"]
pub struct InFlight {
    batch: BatchRef,
    clock: PoolTag,
}

impl InFlight {
    /// Returns the batch's ticket.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        self.batch.ticket()
    }

    /// Returns a reference to the batch, which stays valid after its end.
    #[inline]
    pub fn batch(&self) -> BatchRef {
        self.batch
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self {
            word: CachePadded::new(AtomicU64::new(0)),
            slots: Slots::default(),
            oldest: AtomicU64::new(0),
            rest: Mutex::new(Vec::new()),
            ends: Ends::default(),
            tag: next_pool_tag(),
        }
    }
}

impl Clock {
    /// Begins a batch. Tables read after this call are safe to use until [`end`](Self::end).
    /// Replacing the slot's provisional value may make blocks reusable: `Core::begin_batch`
    /// announces them. Panics if 65,536 batches are in flight.
    pub fn begin(&self) -> InFlight {
        self.begin_from(thread_number().wrapping_mul(SLOTS_APART))
    }

    /// As [`begin`](Self::begin), in the first empty slot starting at `first`.
    #[inline]
    pub fn begin_from(&self, first: usize) -> InFlight {
        // Relaxed: a lower bound of the ticket: our own addition comes later in the word's order.
        let now = ClockWord::from_bits(self.word.load(Relaxed));
        let slot = self.slots.take(first % SLOTS, now);
        // Release: publishes the slot before the ticket; pairs with the Acquire in `oldest`, also
        // through the release sequence of other batches' additions.
        let before = ClockWord::from_bits(self.word.fetch_add(ClockWord::BEGIN, AcqRel));
        // Pairs with the fence of a thread that unlinks a frame from a table that this batch is
        // about to read (`retire_tag`): the batch sees the new table, or the frame's tag covers its
        // ticket. Until the store below is seen, the slot's lower bound only delays more frames.
        fence_after_rmw();
        let ticket = Ticket(before.newest().0 + 1);
        if before.in_flight() >= ClockWord::IN_FLIGHT_MAX {
            // No announcement is needed: one of the many other batches will end.
            let _ = self.end(InFlight { batch: BatchRef::new(ticket, slot), clock: self.tag });
            panic!("too many batches in flight: {before:?}");
        }
        // Relaxed: a thread that reads the ticket may conclude that the slot's previous batch has
        // ended, and must then see its effects: `take` acquired them, the fence above releases
        // them.
        self.slots.slot(slot).store(ticket.0, Relaxed);
        InFlight { batch: BatchRef::new(ticket, slot), clock: self.tag }
    }

    /// Ends a batch: it no longer reads or writes memory. Returns true if requests wait for blocks:
    /// the caller must announce. Panics if the batch belongs to another clock.
    #[must_use = "waiting requests must be told: call `Core::end_batch`, which also does that"]
    pub fn end(&self, batch: InFlight) -> bool {
        assert!(batch.clock == self.tag, "{batch:?} belongs to another clock than {:?}", self.tag);
        self.slots.leave(batch.batch.slot());
        // Release: as in `leave`; pairs with the Acquires in `read`. No fence: a waiting request or
        // task sets its bit before this, and we see it, or later, and its Acquire sees the end.
        let word = ClockWord::from_bits(self.word.fetch_sub(ClockWord::END, Release));
        if word.is_end_awaited() {
            self.ends.notify(self);
        }
        word.is_awaited()
    }

    /// Polls for the end of these batches. A task that stops polling must
    /// [leave](Self::leave_ends).
    pub fn poll_ended(
        &self,
        batches: &BatchSet,
        place: &mut EndPlace,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        self.ends.poll(self, batches, place, context)
    }

    /// Removes the task of this place from the list.
    pub fn leave_ends(&self, place: &mut EndPlace) {
        self.ends.leave(self, place);
    }

    /// Returns the number of tasks that wait for the end of batches.
    pub fn waiting_for_ends(&self) -> usize {
        self.ends.len()
    }

    /// Adds a batch of this clock, which is in flight, to a set.
    #[inline(always)]
    pub fn note(&self, batches: &mut BatchSet, batch: BatchRef, gone: &mut BatchRef) {
        batches.add(batch, gone, |batch| self.is_in_flight(batch));
    }

    /// Returns whether a batch of this clock that has begun is in flight.
    #[inline]
    pub fn is_in_flight(&self, batch: BatchRef) -> bool {
        // Acquire: pairs with `end`. A later batch's value has the same effect: see `begin_from`.
        let ticket = batch.ticket();
        ticket != Ticket(0) && self.slots.slot(batch.slot()).load(Acquire) == ticket.0
    }

    /// Returns whether all batches of a set except the last one added have ended.
    #[inline]
    pub fn others_ended(&self, batches: &BatchSet) -> bool {
        let mut others = batches.each().skip(1).filter(|&batch| !batches.is_last(batch));
        let up_to = batches.up_to();
        others.all(|batch| !self.is_in_flight(batch)) && (up_to == Ticket(0) || self.ended(up_to))
    }

    /// Returns whether all batches of a set have ended. Their beginnings happen before the call.
    pub fn state(&self, batches: &BatchSet) -> SetState {
        if let Some(newest) = batches.each().filter(|&batch| self.is_in_flight(batch)).max() {
            return SetState::InFlight(newest);
        }
        if batches.up_to() == Ticket(0) { SetState::Ended } else { self.state_up_to(batches.up_to()) }
    }

    /// Returns whether all batches up to this ticket, which has begun, have ended.
    #[cold]
    fn state_up_to(&self, newest: Ticket) -> SetState {
        let mut state = SetState::Ended;
        let mut found = BatchRef::default();
        self.slots.for_each(self.slots.mark(), |at, value| {
            if value & !BEGINNING <= newest.0 {
                if value & BEGINNING == 0 {
                    found = found.max(BatchRef::new(Ticket(value), at));
                } else {
                    state = SetState::Beginning(BatchRef::new(newest, at));
                }
            }
        });
        if found == BatchRef::default() { state } else { SetState::InFlight(found) }
    }

    /// Returns the current word.
    #[inline]
    pub fn read(&self) -> ClockWord {
        // Acquire: pairs with `end`.
        ClockWord::from_bits(self.word.load(Acquire))
    }

    /// Sets the awaited bit. The request then issues a heavy fence and searches: it finds blocks
    /// made available by threads that do not see the bit yet.
    pub fn set_awaited(&self) {
        // Acquire: pairs with the Release of batches that ended without seeing this. Release: the
        // thread that clears the bit after us, and then searches again, sees our earlier writes.
        self.word.fetch_or(ClockWord::AWAITED, AcqRel);
    }

    /// Clears the awaited bit: no request waits for blocks.
    pub fn clear_awaited(&self) {
        // Acquire: pairs with `set_awaited`: a search after this sees why the bit was set.
        self.word.fetch_and(!ClockWord::AWAITED, AcqRel);
    }

    /// Marks the device as lost. Returns true if requests wait for blocks: the caller must notify.
    #[must_use = "waiting requests must be told: call `Core::poison`, which also does that"]
    pub fn lose(&self) -> bool {
        // Relaxed: if a waiting request set its bit earlier in the word's order, we see it;
        // otherwise it reads that the device is lost. The queue's lock orders the rest.
        ClockWord::from_bits(self.word.fetch_or(ClockWord::LOST, Relaxed)).is_awaited()
    }

    /// Returns the newest ticket: the tag of frames just unlinked.
    #[inline]
    pub fn newest(&self) -> Ticket {
        // Relaxed: only a number. Conclusions are drawn from `oldest`, which reads the word again.
        ClockWord::from_bits(self.word.load(Relaxed)).newest()
    }

    /// Returns the tag for frames that their owner has just released, if a batch is in flight.
    #[inline]
    pub fn idle_or_tag(&self) -> Option<Ticket> {
        // Acquire: pairs with `end`. No fence is needed: a batch that saw these frames began before
        // their owner released them, in happens-before order, so that this load sees it.
        let word = self.read();
        (word.in_flight() != 0).then(|| word.newest())
    }

    /// Returns the oldest ticket that may still be in flight.
    #[inline]
    pub fn oldest(&self) -> Ticket {
        let word = self.read();
        if word.in_flight() == 0 {
            return Ticket(word.newest().0 + 1);
        }
        // Acquire: the ends of all earlier batches, as seen by the thread that found this one.
        let oldest = BatchRef::from_bits(self.oldest.load(Acquire));
        if self.is_in_flight(oldest) { oldest.ticket() } else { self.find_oldest() }
    }

    #[inline(never)]
    fn find_oldest(&self) -> Ticket {
        // Acquire: pairs with the Release in `begin`: a scan sees the slot of every ticket up to
        // this one, and a high-water mark above it.
        let newest = self.read().newest();
        let mark = self.slots.mark();
        let mut end = newest.0 + 1;
        let Ok(mut rest) = self.rest.try_lock() else {
            // Another thread is scanning, and may be stopped.
            return self.scan_oldest();
        };
        while rest.pop_if(|batch| !self.is_in_flight(*batch)).is_some() {}
        if rest.is_empty() {
            let (mut used, mut vacant) = (0, 0);
            self.slots.for_each(mark, |at, value| {
                (used, vacant) = (at + 1, vacant + usize::from(at == vacant));
                if value & BEGINNING == 0 {
                    rest.push(BatchRef::new(Ticket(value), at));
                } else {
                    end = end.min(value & !BEGINNING);
                }
            });
            self.slots.lower(mark, used, vacant);
            // The scan may have missed batches from `end` on.
            rest.retain(|batch| batch.ticket().0 < end);
            rest.sort_unstable_by(|a, b| b.cmp(a));
        }
        let Some(&oldest) = rest.last() else { return Ticket(end) };
        // Release: pairs with the Acquire in `oldest`.
        self.oldest.store(oldest.to_bits(), Release);
        oldest.ticket()
    }

    /// As [`oldest`](Self::oldest), by a scan of all slots.
    pub fn scan_oldest(&self) -> Ticket {
        // Acquire: as in `find_oldest`.
        let mut oldest = self.read().newest().0 + 1;
        self.slots.for_each(self.slots.mark(), |_, value| oldest = oldest.min(value & !BEGINNING));
        Ticket(oldest)
    }

    /// Returns the oldest batch in flight, if there is any.
    pub fn oldest_in_flight(&self) -> Option<Ticket> {
        if self.in_flight() == 0 {
            return None;
        }
        // If no batch was in flight, `oldest` is one above the newest ticket at that moment; a
        // batch that has begun since may have that ticket.
        Some(self.oldest()).filter(|&oldest| oldest <= self.newest())
    }

    /// Returns whether the batch with this ticket and all earlier ones have ended.
    pub fn ended(&self, ticket: Ticket) -> bool {
        ticket < self.oldest()
    }

    /// Returns the number of batches in flight.
    pub fn in_flight(&self) -> u64 {
        ClockWord::from_bits(self.word.load(Relaxed)).in_flight()
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
        // Relaxed, both: the lock orders the bit, and it orders no other access.
        if ClockWord::from_bits(self.word.load(Relaxed)).is_end_awaited() {
            self.word.fetch_and(!ClockWord::END_AWAITED, Relaxed);
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;

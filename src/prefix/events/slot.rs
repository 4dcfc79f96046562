//! Slots: what publishers see of the subscribers, and the state that all of them share.

use std::ops::RangeBounds;

use super::event::Told;
use super::ring::Ring;
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, AtomicWaker, CachePadded, Mutex, Ordering::*,
};

/// State that the queue and its subscribers share.
pub(super) struct Shared {
    pub(super) capacity: usize,
    /// The slots; a list that only grows. Pools without subscribers have none.
    pub(super) slots: AtomicPtr<Slot>,
    /// Number of slots with a subscription.
    pub(super) active: AtomicUsize,
    /// Number of the newest subscription.
    pub(super) newest: AtomicU64,
    /// Held while a subscription begins.
    pub(super) subscribing: Mutex<()>,
    pub(super) closed: AtomicBool,
    /// The cache's era: the number of clears.
    pub(super) era: CachePadded<AtomicU64>,
}

impl Shared {
    pub(super) fn slots(&self) -> impl Iterator<Item = &Slot> {
        // SAFETY: published slots live as long as the list. Acquire: pairs with the Release in
        // `take_slot`.
        let mut next = unsafe { self.slots.load(Acquire).as_ref() };
        std::iter::from_fn(move || {
            let slot: &Slot = next?;
            // SAFETY: as above; `next` was written before the slot was published.
            next = unsafe { slot.next.as_ref() };
            Some(slot)
        })
    }

    /// Takes a slot without a subscriber, or adds one. The caller holds `subscribing`.
    pub(super) fn take_slot(&self) -> &Slot {
        // Acquire: pairs with the Release of the previous subscriber's drop.
        let left = self.slots().find(|slot| !slot.taken.load(Acquire));
        if let Some(slot) = left {
            // Relaxed: only the holder of `subscribing` reads false and stores true.
            slot.taken.store(true, Relaxed);
            return slot;
        }
        let slot = Box::into_raw(Box::new(Slot::new(self.capacity, self.slots.load(Relaxed))));
        // Release: pairs with the Acquire of `slots`. A plain store: `subscribing` is held.
        self.slots.store(slot, Release);
        // SAFETY: published just now.
        unsafe { &*slot }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut next = self.slots.load(Relaxed).cast_const();
        while !next.is_null() {
            // SAFETY: the list is exclusively ours; each slot was made by `Box::into_raw` and is
            // freed once.
            let slot = unsafe { Box::from_raw(next.cast_mut()) };
            next = slot.next;
        }
    }
}

/// A place for one subscriber at a time; the fields are in the parent module's docs.
pub(super) struct Slot {
    pub(super) ring: Ring<Told>,
    pub(super) number: AtomicU64,
    pub(super) taken: AtomicBool,
    /// Position of the last subscriber.
    pub(super) head: AtomicU64,
    pub(super) waker: AtomicWaker,
    pub(super) next: *const Slot,
}

// SAFETY: `next` is written before the slot is published, and points to a slot of the same list,
// which lives as long.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

impl Slot {
    /// Rounds a capacity to one that a ring can have.
    pub(super) fn capacity(asked: usize) -> usize {
        Ring::<Told>::capacity(asked)
    }

    /// Creates a taken slot in front of `next`.
    pub(super) fn new(capacity: usize, next: *const Slot) -> Self {
        Self {
            ring: Ring::new(capacity),
            number: AtomicU64::new(0),
            taken: AtomicBool::new(true),
            head: AtomicU64::new(0),
            waker: AtomicWaker::new(),
            next,
        }
    }

    /// Returns whether the slot has a subscription, of one of these numbers.
    pub(super) fn follows(&self, numbers: &impl RangeBounds<u64>) -> bool {
        // Relaxed: `newest` and the fences order it.
        let number = self.number.load(Relaxed);
        number != 0 && numbers.contains(&number)
    }

    /// Appends an event and returns true, or counts it as lost and returns false.
    pub(super) fn push(&self, told: Told) -> bool {
        let has_room = self.ring.push(told);
        self.wake();
        has_room
    }

    pub(super) fn wake(&self) {
        let _ = self.waker.take().map(crate::sync::wake);
    }
}

impl Shared {
    /// Ends the subscription of a slot: publishers push no further events.
    pub(super) fn unfollow(&self, slot: &Slot) {
        slot.number.store(0, Relaxed);
        self.active.fetch_sub(1, Relaxed);
    }

    /// Gives up a slot whose subscription did not begin.
    pub(super) fn leave(&self, slot: &Slot) {
        self.unfollow(slot);
        // Release: pairs with the Acquire of `take_slot`.
        slot.taken.store(false, Release);
    }
}

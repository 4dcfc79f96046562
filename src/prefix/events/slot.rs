//! The state that the queue and its subscribers share; the [module](super) documents its words.

use std::ptr;

use super::ring::Ring;
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, AtomicWaker, CachePadded, Mutex, Ordering::*, StatisticU64,
};

pub(super) struct Shared {
    pub(super) capacity: usize,
    /// Null before the first subscription.
    ring: AtomicPtr<Ring>,
    slots: AtomicPtr<Slot>,
    pub(super) active: AtomicUsize,
    pub(super) newest: AtomicU64,
    /// Held while a subscription begins.
    pub(super) subscribing: Mutex<()>,
    pub(super) closed: AtomicBool,
    pub(super) era: CachePadded<AtomicU64>,
    pub(super) sleeps: CachePadded<AtomicU64>,
    woken: AtomicU64,
    pub(super) lost: StatisticU64,
}

impl Shared {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity: Ring::capacity(capacity),
            ring: AtomicPtr::new(ptr::null_mut()),
            slots: AtomicPtr::new(ptr::null_mut()),
            active: AtomicUsize::new(0),
            newest: AtomicU64::new(0),
            subscribing: Mutex::new(()),
            closed: AtomicBool::new(false),
            era: CachePadded::new(AtomicU64::new(0)),
            sleeps: CachePadded::new(AtomicU64::new(0)),
            woken: AtomicU64::new(0),
            lost: StatisticU64::new(0),
        }
    }

    pub(super) fn ring(&self) -> Option<&Ring> {
        // SAFETY: the ring lives as long as this. Acquire: pairs with the Release of `make_ring`.
        unsafe { self.ring.load(Acquire).as_ref() }
    }

    /// Returns the ring, created if there is none. The caller holds `subscribing`.
    pub(super) fn make_ring(&self) -> &Ring {
        if self.ring().is_none() {
            // Release: pairs with the Acquire of `ring`.
            self.ring.store(Box::into_raw(Box::new(Ring::new(self.capacity))), Release);
        }
        self.ring().expect("made just now")
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = &Slot> {
        // SAFETY: slots live as long as the list. Acquire: pairs with the Release in `take_slot`.
        let mut next = unsafe { self.slots.load(Acquire).as_ref() };
        std::iter::from_fn(move || {
            let slot: &Slot = next?;
            // SAFETY: as above; `next` was written before the slot was published.
            next = unsafe { slot.next.as_ref() };
            Some(slot)
        })
    }

    /// Takes a vacated slot, or adds one. The caller holds `subscribing`.
    pub(super) fn take_slot(&self) -> &Slot {
        // Acquire: pairs with the Release of the previous subscriber's drop.
        let left = self.slots().find(|slot| !slot.taken.load(Acquire));
        if let Some(slot) = left {
            // Relaxed: only the holder of `subscribing` reads false and stores true.
            slot.taken.store(true, Relaxed);
            return slot;
        }
        let (taken, waker) = (AtomicBool::new(true), AtomicWaker::new());
        let slot = Box::into_raw(Box::new(Slot { taken, waker, next: self.slots.load(Relaxed) }));
        // Release: pairs with the Acquire of `slots`. A plain store: `subscribing` is held.
        self.slots.store(slot, Release);
        // SAFETY: published just now.
        unsafe { &*slot }
    }

    pub(super) fn leave(&self, slot: &Slot) {
        self.active.fetch_sub(1, Relaxed);
        // Release: pairs with the Acquire of `take_slot`.
        slot.taken.store(false, Release);
    }

    pub(super) fn wake(&self) {
        // Release: pairs with the Acquire of `poll_recv`, whose second read sees what was published
        // before. Acquire: pairs with the Release there; the waker is seen.
        let sleeps = self.sleeps.fetch_add(0, AcqRel);
        // Relaxed: an older number costs a wake.
        if self.woken.load(Relaxed) < sleeps {
            self.slots().filter_map(|slot| slot.waker.take()).for_each(crate::sync::wake);
            // After the wakes: a thread that is stopped in between leaves them to the next one.
            self.woken.fetch_max(sleeps, Release);
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let mut next = self.slots.load(Relaxed).cast_const();
        while !next.is_null() {
            // SAFETY: the list is exclusively ours; `Box::into_raw` made each slot, freed once.
            let slot = unsafe { Box::from_raw(next.cast_mut()) };
            next = slot.next;
        }
        let ring = self.ring.load(Relaxed);
        if !ring.is_null() {
            // SAFETY: as above.
            drop(unsafe { Box::from_raw(ring) });
        }
    }
}

pub(super) struct Slot {
    taken: AtomicBool,
    pub(super) waker: AtomicWaker,
    next: *const Slot,
}

// SAFETY: `next` is written before publication, and its slot of the same list lives as long.
unsafe impl Sync for Slot {}
// SAFETY: as above.
unsafe impl Send for Slot {}

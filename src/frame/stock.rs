//! A stock: a bounded lock-free store of things that threads put in and take out, last in, first out.
//!
//! # Protocol
//!
//! Two stacks of slot numbers, of the full slots and of the empty ones. Whoever took a number off a stack has the slot
//! alone:
//!
//! ```text
//! push:  slot := pop(empty), or refused;  slot.item := item;  push(full, slot)
//! pop:   slot := pop(full), or none;      item := slot.item;  push(empty, slot)
//! ```
//!
//! A thread that is stopped in between keeps one slot, and stops nobody: this is why it is no ring buffer, where those
//! who come next wait for the one before them.
//!
//! | bits of a stack's word | field | meaning |
//! |---|---|---|
//! | 0..32 | top | the slot on top, plus one; 0: the stack is empty |
//! | 32..64 | pops | so that a top that went and came back is not taken for the same |
//!
//! Model: `loom-tests/tests/magazines.rs`.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering::*, UnsafeCell};

const ONE_POP: u64 = 1 << 32;
const TOP: u64 = ONE_POP - 1;

/// See the [module](self).
pub struct Stock<T> {
    slots: Box<[Slot<T>]>,
    full: CachePadded<AtomicU64>,
    empty: CachePadded<AtomicU64>,
}

struct Slot<T> {
    /// The slot below in its stack, plus one.
    below: AtomicU32,
    item: UnsafeCell<T>,
}

// SAFETY: an item is touched only by whoever took its slot's number off a stack, and each hand-over is a
// Release/Acquire pair.
unsafe impl<T: Send> Sync for Stock<T> {}
// SAFETY: the stock owns its items.
unsafe impl<T: Send> Send for Stock<T> {}

impl<T: Clone + Default> Stock<T> {
    /// An empty stock of room for `room` items.
    pub fn new(room: usize) -> Self {
        let slot = |below| Slot { below: AtomicU32::new(below), item: UnsafeCell::new(T::default()) };
        // Every slot lies on the one of the next lower number, the last one on top.
        let slots: Box<[Slot<T>]> = (0..room as u32).map(slot).collect();
        Self {
            full: CachePadded::new(AtomicU64::new(0)),
            empty: CachePadded::new(AtomicU64::new(slots.len() as u64)),
            slots,
        }
    }

    /// Takes an item in, or hands it back when there is no room.
    ///
    /// # Errors
    /// The item.
    pub fn push(&self, item: T) -> Result<(), T> {
        let Some(slot) = self.take(&self.empty) else { return Err(item) };
        // SAFETY: the slot is ours until it is put on a stack.
        self.slots[slot].item.with_mut(|place| unsafe { *place = item });
        self.put(&self.full, slot);
        Ok(())
    }

    /// An item, if there is one.
    pub fn pop(&self) -> Option<T> {
        let slot = self.take(&self.full)?;
        // SAFETY: the slot is ours until it is put on a stack.
        let item = self.slots[slot].item.with_mut(|place| unsafe { (*place).clone() });
        self.put(&self.empty, slot);
        Some(item)
    }

    /// Whether a push would find room at this moment.
    #[inline]
    pub fn has_room(&self) -> bool {
        // Acquire: pairs with the Release in `put`: whoever sees the room sees what made it.
        self.empty.load(Acquire) & TOP != 0
    }

    /// Takes a slot's number off a stack.
    fn take(&self, stack: &AtomicU64) -> Option<usize> {
        // Acquire, both: pairs with the Release in `put`. A stack is changed by read-modify-writes only, so that every
        // number on it was put there in a release sequence that this reads from.
        let mut word = stack.load(Acquire);
        loop {
            let slot = ((word & TOP) as usize).checked_sub(1)?;
            // Relaxed: if somebody takes the slot and writes this meanwhile, the count of pops has changed.
            let below = self.slots[slot].below.load(Relaxed);
            let next = if cfg!(kvpool_mutant = "depot_no_count") {
                word & !TOP | u64::from(below)
            } else {
                (word & !TOP).wrapping_add(ONE_POP) | u64::from(below)
            };
            match stack.compare_exchange_weak(word, next, Acquire, Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => word = now,
            }
        }
    }

    /// Puts a slot's number on a stack.
    fn put(&self, stack: &AtomicU64, slot: usize) {
        let mut word = stack.load(Relaxed);
        loop {
            self.slots[slot].below.store((word & TOP) as u32, Relaxed);
            // Release: pairs with the Acquire in `take`: what we did with the slot happens before what they do.
            let order = if cfg!(kvpool_mutant = "depot_relaxed") { Relaxed } else { Release };
            match stack.compare_exchange_weak(word, word & !TOP | (slot as u64 + 1), order, Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

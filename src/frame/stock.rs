//! A stock: a bounded lock-free LIFO store, shared by threads.
//!
//! Two stacks of slot numbers: full and empty slots. The thread that pops a number owns the slot:
//!
//! ```text
//! push:  slot := pop(empty), or full;     slot.item := item;  push(full, slot)
//! pop:   slot := pop(full), or none;      item := slot.item;  push(empty, slot)
//! ```
//!
//! A thread stopped in between keeps one slot and blocks no other thread.
//!
//! | bits of a stack's word | field | meaning |
//! |---|---|---|
//! | 0..32 | top | the slot on top, plus one; 0: the stack is empty |
//! | 32..64 | pops | number of pops, so that a compare-exchange detects a top that was removed and pushed again |
//!
//! Model: `loom-tests/tests/magazines.rs`.

use crate::sync::{AtomicU32, AtomicU64, CachePadded, Ordering::*, UnsafeCell};

const ONE_POP: u64 = 1 << 32;
const TOP: u64 = ONE_POP - 1;

/// Bounded lock-free store of items.
pub struct Stock<T> {
    slots: Box<[Slot<T>]>,
    full: CachePadded<AtomicU64>,
    empty: CachePadded<AtomicU64>,
}

struct Slot<T> {
    /// Slot below in its stack, plus one.
    below: AtomicU32,
    item: UnsafeCell<T>,
}

// SAFETY: only the thread that popped a slot's number accesses its item, and each transfer of a
// slot is a Release/Acquire pair.
unsafe impl<T: Send> Sync for Stock<T> {}
// SAFETY: the stock owns its items.
unsafe impl<T: Send> Send for Stock<T> {}

impl<T: Clone + Default> Stock<T> {
    /// Creates an empty stock for up to `room` items.
    pub fn new(room: usize) -> Self {
        let slot = |below| Slot { below: AtomicU32::new(below), item: UnsafeCell::new(T::default()) };
        let slots: Box<[Slot<T>]> = (0..room as u32).map(slot).collect();
        Self {
            full: CachePadded::new(AtomicU64::new(0)),
            empty: CachePadded::new(AtomicU64::new(slots.len() as u64)),
            slots,
        }
    }

    /// Adds an item, or returns it if there is no room.
    pub fn push(&self, item: T) -> Result<(), T> {
        let Some(slot) = self.take(&self.empty) else { return Err(item) };
        // SAFETY: this thread owns the slot until it puts it on a stack.
        self.slots[slot].item.with_mut(|place| unsafe { *place = item });
        self.put(&self.full, slot);
        Ok(())
    }

    /// Takes an item, if there is one.
    pub fn pop(&self) -> Option<T> {
        let slot = self.take(&self.full)?;
        // SAFETY: this thread owns the slot until it puts it on a stack.
        let item = self.slots[slot].item.with_mut(|place| unsafe { (*place).clone() });
        self.put(&self.empty, slot);
        Some(item)
    }

    /// Returns whether a push would currently succeed.
    #[inline]
    pub fn has_room(&self) -> bool {
        // Acquire: pairs with the Release in `put`: a thread that sees the room sees what freed it.
        self.empty.load(Acquire) & TOP != 0
    }

    fn take(&self, stack: &AtomicU64) -> Option<usize> {
        // Acquire, both: pairs with the Release in `put`. Only read-modify-writes change a stack,
        // so that every number on it was pushed in a release sequence that this reads from.
        let mut word = stack.load(Acquire);
        loop {
            let slot = ((word & TOP) as usize).checked_sub(1)?;
            // Relaxed: if another thread pops the slot and writes this, the pop count differs.
            let below = self.slots[slot].below.load(Relaxed);
            let next = (word & !TOP).wrapping_add(ONE_POP) | u64::from(below);
            match stack.compare_exchange_weak(word, next, Acquire, Acquire) {
                Ok(_) => return Some(slot),
                Err(now) => word = now,
            }
        }
    }

    fn put(&self, stack: &AtomicU64, slot: usize) {
        let mut word = stack.load(Relaxed);
        loop {
            self.slots[slot].below.store((word & TOP) as u32, Relaxed);
            // Release: pairs with `take`: our accesses to the slot precede the next owner's.
            match stack.compare_exchange_weak(word, word & !TOP | (slot as u64 + 1), Release, Relaxed) {
                Ok(_) => return,
                Err(now) => word = now,
            }
        }
    }
}

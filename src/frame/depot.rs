//! The depot: a bounded lock-free stock of magazines, through which a thread that mostly frees feeds one that
//! mostly allocates without either touching the bitmaps.
//!
//! Frames in the depot are free, and hidden from coalescing; the depot is therefore small (two magazines a thread),
//! and is emptied before an allocation is refused.
//!
//! # Protocol
//!
//! Two stacks of slot numbers, of the full slots and of the empty ones. Whoever took a number off a stack has the slot
//! alone:
//!
//! ```text
//! push:  slot := pop(empty), or refused;  slot.magazine := magazine;  push(full, slot)
//! pop:   slot := pop(full), or none;      magazine := slot.magazine;  push(empty, slot)
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

use crate::sync::{AtomicU32, AtomicU64, AtomicUsize, CachePadded, Ordering::*, UnsafeCell};

use super::{Frames, Magazine};

const ONE_POP: u64 = 1 << 32;
const TOP: u64 = ONE_POP - 1;

/// See the [module](self).
pub struct Depot {
    slots: Box<[Slot]>,
    full: CachePadded<AtomicU64>,
    empty: CachePadded<AtomicU64>,
    /// Frames in the stock. Counted up before a push and down after a pop, so that it never reads too low.
    frames: CachePadded<AtomicUsize>,
}

struct Slot {
    /// The slot below in its stack, plus one.
    below: AtomicU32,
    magazine: UnsafeCell<Magazine>,
}

// SAFETY: a magazine is touched only by whoever took its slot's number off a stack, and each hand-over is a
// Release/Acquire pair.
unsafe impl Sync for Depot {}
// SAFETY: the depot owns its magazines, which are plain numbers.
unsafe impl Send for Depot {}

impl Depot {
    /// A depot for up to `magazines` magazines.
    pub fn new(magazines: usize) -> Self {
        let slot =
            |below| Slot { below: AtomicU32::new(below), magazine: UnsafeCell::new(Magazine::default()) };
        // Every slot lies on the one of the next lower number, the last one on top.
        let slots: Box<[Slot]> = (0..magazines.max(1) as u32).map(slot).collect();
        Self {
            full: CachePadded::new(AtomicU64::new(0)),
            empty: CachePadded::new(AtomicU64::new(slots.len() as u64)),
            slots,
            frames: CachePadded::new(AtomicUsize::new(0)),
        }
    }

    /// Takes a magazine in, or hands it back when the depot is full.
    #[expect(clippy::result_large_err, reason = "a magazine is handed back by value: nothing is allocated")]
    pub fn push(&self, magazine: Magazine) -> Result<(), Magazine> {
        let Some(slot) = self.take(&self.empty) else { return Err(magazine) };
        // Relaxed: a statistic; the stack orders the frames themselves.
        self.frames.fetch_add(magazine.len(), Relaxed);
        // SAFETY: the slot is ours until it is put on a stack.
        self.slots[slot].magazine.with_mut(|place| unsafe { *place = magazine });
        self.put(&self.full, slot);
        Ok(())
    }

    /// A magazine, if there is one.
    pub fn pop(&self) -> Option<Magazine> {
        let slot = self.take(&self.full)?;
        // SAFETY: the slot is ours until it is put on a stack.
        let magazine = self.slots[slot].magazine.with_mut(|place| unsafe { (*place).clone() });
        self.put(&self.empty, slot);
        self.frames.fetch_sub(magazine.len(), Relaxed);
        Some(magazine)
    }

    /// Gives every frame back to the global structure.
    pub fn flush(&self, frames: &Frames) {
        while let Some(mut magazine) = self.pop() {
            magazine.flush(frames);
        }
    }

    /// Free frames in the depot; exact when nobody is pushing or popping.
    pub fn frames(&self) -> usize {
        self.frames.load(Relaxed)
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

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;
    use crate::ids::FrameId;

    #[test]
    fn takes_as_many_as_it_has_room_for_last_in_first_out() {
        let depot = Depot::new(3);
        let magazine = |frame| {
            let mut magazine = Magazine::default();
            magazine.push(FrameId(frame));
            magazine
        };
        for round in 0..3 {
            for frame in 0..3 {
                assert!(depot.push(magazine(3 * round + frame)).is_ok());
            }
            assert_eq!(depot.push(magazine(99)).unwrap_err().pop(), Some(FrameId(99)));
            assert_eq!(depot.frames(), 3);
            for frame in (0..3).rev() {
                assert_eq!(depot.pop().unwrap().pop(), Some(FrameId(3 * round + frame)));
            }
            assert!(depot.pop().is_none());
        }
    }

    #[test]
    fn magazines_have_one_owner_among_threads() {
        const ROUNDS: u32 = if cfg!(miri) { 50 } else { 50_000 };
        let depot = Depot::new(2);
        let total: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..3)
                .map(|thread| {
                    let depot = &depot;
                    scope.spawn(move || {
                        let mut mine: Vec<Magazine> = Vec::new();
                        let mut magazine = Magazine::default();
                        (0..=thread).for_each(|i| magazine.push(FrameId(100 * thread + i)));
                        mine.push(magazine);
                        for round in 0..ROUNDS {
                            if (round + thread) % 3 == 0 {
                                mine.extend(depot.pop());
                            } else if let Some(magazine) = mine.pop()
                                && let Err(magazine) = depot.push(magazine)
                            {
                                mine.push(magazine);
                            }
                        }
                        mine.iter().map(Magazine::len).sum::<usize>()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        let left: usize = std::iter::from_fn(|| depot.pop()).map(|magazine| magazine.len()).sum();
        assert_eq!((total + left, depot.frames()), (1 + 2 + 3, 0));
    }
}

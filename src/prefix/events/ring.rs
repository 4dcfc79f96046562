//! A bounded queue of many writers and one reader, in which nobody waits for anybody: a writer that finds no room gives its
//! value up, and that is counted.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | `tail` | positions that were taken by writers; the next one |
//! | `lost` | values that were given up, ever |
//! | a slot's `stamp` | `p`: free for position `p`. `p + 1`: holds the value of position `p`. `p + capacity`: it was read, and the slot is free for the next lap |
//! | a slot's `entry` | the value, and `lost` as its writer saw it before it took the position |
//!
//! # Protocol
//!
//! ```text
//! push:  lost => before;  tail => p;  stamp(p) == p?   take p: tail p -> p + 1;  entry := (before, value);  stamp := p + 1
//!                                     stamp(p) < p?    no room: lost += 1
//!                                     stamp(p) > p?    somebody else took p: again
//! pop:   stamp(h) == h + 1?  entry.before > reported?  report the difference first
//!                            take the entry;  stamp := h + capacity;  h += 1
//!        else:  lost => l;  tail == h and l > reported?  report the difference
//! ```
//!
//! # What holds
//!
//! - *A writer never waits.* It goes round only if another writer has taken a position meanwhile. A reader that is stopped
//!   between a value and its stamp looks like a full queue. (That is why this is not crossbeam's `ArrayQueue`, whose `push`
//!   spins until such a reader goes on.)
//! - *A loss is reported in its place or later, never earlier.* Earlier would tell the reader to forget what it knew before it
//!   hears of what the lost value was about. Whoever loses a value has seen the queue full, up to some tail. What a writer saw
//!   in `lost` before it took its position was lost before that position; what the reader saw in `lost` was lost before
//!   the tail that it reads then, and it has read everything up to that.
//! - *A writer that is stopped between its position and its stamp* holds up the reader, and nobody else.
//!
//! Model: `loom-tests/tests/kv_events.rs`. The checker does not tell whether `lost` is read before the position is taken or
//! after, nor the order of `tail` from a relaxed one: it plays no load against another thread's later change if that thread
//! itself loaded the same word in between, which every writer does.

use crate::sync::{AtomicU64, CachePadded, Ordering::*, UnsafeCell};

pub(super) struct Ring<T> {
    slots: Box<[Slot<T>]>,
    tail: CachePadded<AtomicU64>,
    lost: CachePadded<AtomicU64>,
}

struct Slot<T> {
    stamp: AtomicU64,
    entry: UnsafeCell<Option<Entry<T>>>,
}

struct Entry<T> {
    lost_before: u64,
    value: T,
}

// SAFETY: an entry is touched by the writer that took its position, until it sets the stamp, and then by the one reader,
// until it sets the stamp: `T` goes from one to the other, and never is with both.
unsafe impl<T: Send> Sync for Ring<T> {}

/// Where the one reader is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Reader {
    /// The position that it reads next.
    pub(super) head: u64,
    /// Losses that it has reported.
    pub(super) reported: u64,
}

/// What a reader finds.
pub(super) enum Popped<T> {
    Value(T),
    Lost(u64),
}

impl<T> Ring<T> {
    /// So much, rounded up to a power of two, at least two: with one, `p + 1` and `p + capacity` are the same.
    pub(super) fn capacity(asked: usize) -> usize {
        asked.max(2).next_power_of_two()
    }

    /// Room for [so many](Self::capacity) values.
    pub(super) fn new(capacity: usize) -> Self {
        let slot = |position| Slot { stamp: AtomicU64::new(position), entry: UnsafeCell::new(None) };
        let capacity = Self::capacity(capacity) as u64;
        Self {
            slots: (0..capacity).map(slot).collect(),
            tail: CachePadded::new(AtomicU64::new(0)),
            lost: CachePadded::new(AtomicU64::new(0)),
        }
    }

    /// Values that were given up, ever.
    pub(super) fn lost(&self) -> u64 {
        // Acquire: pairs with the Release of `push`, so that the tail that is read next is no older than the loss.
        self.lost.load(Acquire)
    }

    /// The position that is taken next.
    pub(super) fn tail(&self) -> u64 {
        // Acquire: pairs with the Release of `push`: what the writers of the positions before it did is seen.
        self.tail.load(Acquire)
    }

    fn slot(&self, position: u64) -> &Slot<T> {
        &self.slots[position as usize & (self.slots.len() - 1)]
    }

    /// Puts a value at the end, or gives it up if there is no room; says whether it did.
    pub(super) fn push(&self, value: T) -> bool {
        let mut position = self.tail.load(Relaxed);
        let mut lost_before = self.lost();
        loop {
            let slot = self.slot(position);
            // Acquire: pairs with the reader's Release, after which the entry is nobody's.
            let stamp = slot.stamp.load(Acquire);
            if stamp < position {
                // Test: `a_full_queue_counts_what_it_loses`. Release: pairs with the Acquire of `lost`.
                self.lost.fetch_add(1, Release);
                return false;
            }
            if stamp > position {
                // Reached by the models with two writers.
                position = self.tail.load(Relaxed);
                lost_before = self.lost();
                continue;
            }
            // Release: pairs with the Acquire of `tail`. The entry is handed over by the stamp.
            match self.tail.compare_exchange_weak(position, position + 1, Release, Relaxed) {
                Err(now) => {
                    position = now;
                    lost_before = self.lost();
                }
                Ok(_) => {
                    // SAFETY: the position is ours, and the reader waits for the stamp.
                    slot.entry.with_mut(|entry| unsafe { *entry = Some(Entry { lost_before, value }) });
                    // Release: pairs with the Acquire of `pop`.
                    let order = if cfg!(kvpool_mutant = "events_relaxed_stamp") { Relaxed } else { Release };
                    slot.stamp.store(position + 1, order);
                    return true;
                }
            }
        }
    }

    /// The next value, or how many were lost before it. None if there is nothing, or its writer is not done.
    ///
    /// # Safety
    /// There is one reader at a time, and it goes on where the one before it was.
    pub(super) unsafe fn pop(&self, reader: &mut Reader) -> Option<Popped<T>> {
        let slot = self.slot(reader.head);
        // Acquire: pairs with the Release of `push`.
        if slot.stamp.load(Acquire) != reader.head + 1 {
            // In this order: what was lost was lost before this tail.
            let lost = self.lost();
            let is_empty = self.tail() == reader.head || cfg!(kvpool_mutant = "events_early_report");
            return if is_empty { reader.report(lost) } else { None };
        }
        // SAFETY: by the stamp the writer is done, and no other writer comes before we set it.
        slot.entry
            .with_mut(|entry| unsafe {
                let lost_before =
                    (*entry).as_ref().expect("the stamp says that there is a value").lost_before;
                if let Some(lost) = reader.report(lost_before) {
                    return Some(lost);
                }
                (*entry).take().map(|entry| Popped::Value(entry.value))
            })
            .inspect(|popped| {
                if let Popped::Value(_) = popped {
                    // Release: pairs with the Acquire of `push`.
                    slot.stamp.store(reader.head + self.slots.len() as u64, Release);
                    reader.head += 1;
                }
            })
    }
}

impl Reader {
    fn report<T>(&mut self, lost: u64) -> Option<Popped<T>> {
        let more = lost.checked_sub(self.reported).filter(|&more| more > 0)?;
        self.reported = lost;
        Some(Popped::Lost(more))
    }
}

//! A bounded nonblocking queue with many writers and one reader. A writer that finds no room drops
//! its value and counts it.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | `tail` | number of positions taken by writers; the next position |
//! | `lost` | number of values dropped |
//! | a slot's `stamp` | `p`: free for position `p`. `p + 1`: holds the value of position `p`. `p + capacity`: read, and free for the next lap |
//! | a slot's `entry` | the value, and `lost` as its writer read it before taking the position |
//!
//! # Protocol
//!
//! ```text
//! push:  lost => before;  tail => p;  stamp(p) == p?   take p: tail p -> p + 1;  entry := (before, value);  stamp := p + 1
//!                                     stamp(p) < p?    no room: lost += 1
//!                                     stamp(p) > p?    another writer took p: again
//! pop:   stamp(h) == h + 1?  entry.before > reported?  report the difference first
//!                            take the entry;  stamp := h + capacity;  h += 1
//!        else:  lost => l;  tail == h and l > reported?  report the difference
//! ```
//!
//! # Guarantees
//!
//! - *A writer never waits.* It retries only if another writer has taken a position meanwhile. A
//!   reader stopped between a value and its stamp makes the queue look full. (This rules out
//!   crossbeam's `ArrayQueue`, whose `push` spins until such a reader goes on.)
//! - *A loss is reported in its place or later, never earlier.* An earlier report would make the
//!   reader discard its state before it receives the events that precede the loss. A writer that
//!   drops a value has seen the queue full, up to some tail. The losses that a writer reads in
//!   `lost` before it takes its position precede that position; the losses that the reader reads in
//!   `lost` precede the tail that it reads next, and it has read everything up to that tail.
//! - *A writer stopped between its position and its stamp* delays the reader, and no other writer.
//!
//! Model: `loom-tests/tests/kv_events.rs`. The checker does not tell whether `lost` is read before
//! or after the position is taken, nor an Acquire of `tail` from a relaxed load: it explores no
//! load that misses another thread's later change if the loading thread has itself loaded the same
//! word in between, which every writer does.

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

// SAFETY: an entry is accessed by the writer that took its position, until it sets the stamp, and
// then by the one reader, until it sets the stamp: `T` moves from one to the other, and both never
// hold it.
unsafe impl<T: Send> Sync for Ring<T> {}

/// Position of the single reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Reader {
    /// The position that it reads next.
    pub(super) head: u64,
    /// Losses that it has reported.
    pub(super) reported: u64,
}

/// Result of a read.
pub(super) enum Popped<T> {
    Value(T),
    Lost(u64),
}

impl<T> Ring<T> {
    /// Rounds a capacity up to a power of two, at least two.
    ///
    /// With one slot, `p + 1` and `p + capacity` would be equal.
    pub(super) fn capacity(asked: usize) -> usize {
        asked.max(2).next_power_of_two()
    }

    /// Creates a ring with the [rounded](Self::capacity) capacity.
    pub(super) fn new(capacity: usize) -> Self {
        let slot = |position| Slot { stamp: AtomicU64::new(position), entry: UnsafeCell::new(None) };
        let capacity = Self::capacity(capacity) as u64;
        Self {
            slots: (0..capacity).map(slot).collect(),
            tail: CachePadded::new(AtomicU64::new(0)),
            lost: CachePadded::new(AtomicU64::new(0)),
        }
    }

    /// Returns the number of values dropped.
    pub(super) fn lost(&self) -> u64 {
        // Acquire: pairs with the Release of `push`, so that the tail that is read next is no older
        // than the loss.
        self.lost.load(Acquire)
    }

    /// Returns the position that is taken next.
    pub(super) fn tail(&self) -> u64 {
        // Acquire: pairs with the Release of `push`: the actions of the writers of earlier
        // positions are visible.
        self.tail.load(Acquire)
    }

    fn slot(&self, position: u64) -> &Slot<T> {
        &self.slots[position as usize & (self.slots.len() - 1)]
    }

    /// Appends a value and returns true, or drops it and returns false if there is no room.
    pub(super) fn push(&self, value: T) -> bool {
        let mut position = self.tail.load(Relaxed);
        let mut lost_before = self.lost();
        loop {
            let slot = self.slot(position);
            // Acquire: pairs with the reader's Release, after which no thread accesses the entry.
            let stamp = slot.stamp.load(Acquire);
            if stamp < position {
                // Test: `a_full_queue_counts_what_it_loses`. Release: pairs with the Acquire of
                // `lost`.
                self.lost.fetch_add(1, Release);
                return false;
            }
            if stamp > position {
                // Reached by the models with two writers.
                position = self.tail.load(Relaxed);
                lost_before = self.lost();
                continue;
            }
            // Release: pairs with the Acquire of `tail`. The stamp hands over the entry.
            match self.tail.compare_exchange_weak(position, position + 1, Release, Relaxed) {
                Err(now) => {
                    position = now;
                    lost_before = self.lost();
                }
                Ok(_) => {
                    // SAFETY: the position is ours, and the reader waits for the stamp.
                    slot.entry.with_mut(|entry| unsafe { *entry = Some(Entry { lost_before, value }) });
                    // Release: pairs with the Acquire of `pop`.
                    slot.stamp.store(position + 1, Release);
                    return true;
                }
            }
        }
    }

    /// Returns the next value, or the number of values lost before it.
    ///
    /// `None` if the ring is empty or the writer of the next position has not finished.
    ///
    /// # Safety
    /// There is one reader at a time, and it continues where the previous one stopped.
    pub(super) unsafe fn pop(&self, reader: &mut Reader) -> Option<Popped<T>> {
        let slot = self.slot(reader.head);
        // Acquire: pairs with the Release of `push`.
        if slot.stamp.load(Acquire) != reader.head + 1 {
            // In this order: the losses precede this tail.
            let lost = self.lost();
            let is_empty = self.tail() == reader.head;
            return if is_empty { reader.report(lost) } else { None };
        }
        // SAFETY: by the stamp, the writer has finished, and no other writer begins before we set
        // it.
        slot.entry
            .with_mut(|entry| unsafe {
                let lost_before = (*entry).as_ref().expect("a stamped slot holds a value").lost_before;
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

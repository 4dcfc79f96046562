//! A bounded ring with many writers and any number of readers. A writer takes the next position,
//! and overwrites the entry that is `capacity` positions older, whether it was read or not. Readers
//! change nothing in it.
//!
//! # Words
//!
//! | word | meaning |
//! |---|---|
//! | `tail` | number of positions taken by writers; the next position |
//! | `entries[i]` | null, or an entry of a position `p` with `p % capacity == i` |
//!
//! Invariant: the position in `entries[i]` only grows, and is below `tail`.
//!
//! # Protocol
//!
//! ```text
//! push:  tail => p;  tail := p + 1;  entries(p) of a lower position, or null?   exchange it for p's, again if it has changed
//!                                    entries(p) > p?   overtaken by a lap: drop the entry
//! read:  entries(h) == h?  clone it;  h += 1
//!        entries(h) > h?   tail => t;  the entries from h to t - capacity / 2 are lost;  h := t - capacity / 2
//!        else              nothing yet: p == h is not taken, or its writer is on its way
//! ```
//!
//! # Guarantees
//!
//! - *A writer never waits.* It repeats its exchange only if another writer has overtaken it, or
//!   came from an earlier lap.
//! - *A reader skips no entry without a loss.* An overtaken writer may drop its entry: a reader
//!   that has yet to read it finds the later entry, and has lost this one. A reader that has lost
//!   an entry goes on in the middle of the ring. In the oldest entry it would lose the next one at
//!   once, and a subscriber lists all cached blocks after each loss.
//! - *A writer stopped between its position and its entry* delays readers for a lap at most, and no
//!   other writer.
//! - *A reader that loses position `p` has seen a tail above `p + capacity / 2`*, and whatever the
//!   writers of all positions below that tail did before. So a thread that changes `tail` by zero,
//!   and finds it lower, knows that a reader that loses `p` later sees what this thread did before:
//!   all changes of `tail` are exchanges, and a later one continues the release of this one.
//!
//! Replaced entries go to the epoch collector. A reader or writer that is stopped inside of a call
//! delays the reclaiming of all entries replaced meanwhile, as in the other users of the collector.
//!
//! Model: `loom-tests/tests/kv_events.rs`.

use std::cmp::Ordering::{Equal, Greater, Less};

use super::event::Told;
use crate::sync::epoch::{self, Atomic, Owned, Shared};
use crate::sync::{AtomicU64, CachePadded, Frozen, Ordering::*};

pub(super) struct Ring {
    entries: Box<[Atomic<Entry>]>,
    tail: CachePadded<AtomicU64>,
}

struct Entry {
    position: u64,
    told: Frozen<Told>,
}

impl Ring {
    /// Rounds a capacity up to a power of two, at least two: a reader that lost an entry keeps
    /// half.
    pub(super) fn capacity(asked: usize) -> usize {
        asked.max(2).next_power_of_two()
    }

    /// Creates a ring with a [rounded](Self::capacity) capacity.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            entries: (0..capacity).map(|_| Atomic::null()).collect(),
            tail: CachePadded::new(AtomicU64::new(0)),
        }
    }

    /// Returns the position that is taken next.
    pub(super) fn tail(&self) -> u64 {
        // Acquire: pairs with the Release of `push`: the actions of the writers of earlier
        // positions are visible.
        self.tail.load(Acquire)
    }

    fn entry(&self, position: u64) -> &Atomic<Entry> {
        &self.entries[position as usize & (self.entries.len() - 1)]
    }

    /// Returns the number of positions before the tail that a reader keeps that lost others.
    fn kept(&self) -> u64 {
        self.entries.len() as u64 / 2
    }

    pub(super) fn push(&self, told: Told) -> u64 {
        let guard = epoch::pin();
        let mut fresh = Owned::new(Entry { position: 0, told: Frozen::new(told) });
        // Release: pairs with the Acquire of `tail`.
        let position = self.tail.fetch_add(1, Release);
        fresh.position = position;
        let entry = self.entry(position);
        // Acquire: pairs with the Release below. loom plays no reader's load against a change by a
        // thread that has itself loaded the same word since.
        let is_model = cfg!(kvpool_loom);
        let mut old = if is_model { Shared::null() } else { entry.load(Acquire, &guard) };
        // SAFETY: a replaced entry is destroyed through the epoch collector, and we are pinned.
        // Reached by the models with more events than room.
        while unsafe { old.as_ref() }.is_none_or(|old| old.position < position) {
            // Release: pairs with the Acquire of `read`.
            match entry.compare_exchange(old, fresh, Release, Acquire, &guard) {
                Ok(_) if old.is_null() => break,
                Ok(_) => {
                    // SAFETY: unlinked by us, and entries are not followed without a pin.
                    unsafe { guard.defer_destroy(old) };
                    break;
                }
                Err(changed) => (old, fresh) = (changed.current, changed.new),
            }
        }
        position
    }

    /// Returns whether a reader that does not see what this thread has done so far may lose a
    /// position.
    pub(super) fn may_be_lost(&self, position: u64) -> bool {
        // Test: `followed_while_a_stored_block_is_lost`, a model. A change, and Release: see the
        // module's docs.
        self.tail.fetch_add(0, Release) - position > self.kept()
    }

    /// Calls `f` with the value of a position. `None`: it is not there yet. `Err`: it is lost, with
    /// all positions before this one.
    pub(super) fn read<R>(&self, position: u64, f: impl FnOnce(&Told) -> R) -> Option<Result<R, u64>> {
        let guard = epoch::pin();
        // SAFETY: as in `push`. Acquire: pairs with the Release there.
        let entry = unsafe { self.entry(position).load(Acquire, &guard).as_ref() }?;
        match entry.position.cmp(&position) {
            Less => None,
            Equal => Some(Ok(f(&entry.told))),
            Greater => Some(Err(self.tail() - self.kept())),
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        for entry in &mut self.entries {
            let entry = std::mem::replace(entry, Atomic::null());
            // SAFETY: no other reference to the ring exists; replaced entries went to the
            // collector.
            drop(unsafe { entry.try_into_owned() });
        }
    }
}

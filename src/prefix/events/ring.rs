//! A bounded ring with many writers and any number of readers. A writer takes the next position,
//! and overwrites the entry `capacity` positions older, read or not. Readers change nothing in it.
//!
//! | word | meaning |
//! |---|---|
//! | `tail` | number of positions taken by writers; the next position |
//! | `entries[i]` | null, or an entry of a position `p` with `p % capacity == i` |
//!
//! Invariant: the position in `entries[i]` only grows, and is below `tail`.
//!
//! ```text
//! push:  tail => p;  tail := p + 1;  entries(p) of a lower position, or null?   exchange it for p's, again if it has changed
//!                                    entries(p) > p?   overtaken by a lap: drop the entry
//! read:  entries(h) == h?  clone it;  h += 1
//!        entries(h) > h?   tail => t;  the entries from h to t - capacity / 2 are lost;  h := t - capacity / 2
//!        else              nothing yet: p == h is not taken, or its writer is on its way
//! ```
//!
//! - *A writer never waits.* It repeats its exchange only if another writer has overtaken it, or
//!   came from an earlier lap.
//! - *A reader skips no entry without a loss.* An overtaken writer may drop its entry: a reader
//!   that has yet to read it finds the later entry, and so has lost it. After a loss, a reader
//!   continues in the middle of the ring: at the oldest entry it would lose the next one at once.
//! - *A writer stopped between its position and its entry* delays readers for a lap at most.
//! - *A reader that loses position `p` has seen a tail above `p + capacity / 2`*, and what the
//!   writers of all positions below did before. So a thread that adds zero to `tail` and finds it
//!   lower knows that a reader that loses `p` later sees what this thread did before: all changes
//!   of `tail` are exchanges, and a later one continues the release of this one.
//!
//! Replaced entries go to the epoch collector. A reader or writer that stops inside a call delays
//! the reclaiming of all entries replaced meanwhile. Model: `loom-tests/tests/kv_events.rs`.

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
    /// Rounds a capacity up to a power of two, at least two: after a loss, a reader keeps half.
    pub(super) fn capacity(asked: usize) -> usize {
        asked.max(2).next_power_of_two()
    }

    pub(super) fn new(capacity: usize) -> Self {
        Self {
            entries: (0..capacity).map(|_| Atomic::null()).collect(),
            tail: CachePadded::new(AtomicU64::new(0)),
        }
    }

    pub(super) fn tail(&self) -> u64 {
        // Acquire: pairs with the Release of `push`, for the actions of earlier writers.
        self.tail.load(Acquire)
    }

    fn entry(&self, position: u64) -> &Atomic<Entry> {
        &self.entries[position as usize & (self.entries.len() - 1)]
    }

    /// Positions before the tail that remain to a reader after a loss.
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
        // Acquire: pairs with the Release below. Not in a model: loom plays no reader's load
        // against a change by a thread that has itself loaded the same word since.
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

    /// Returns whether a reader that does not see this thread's actions so far may lose a position.
    pub(super) fn may_be_lost(&self, position: u64) -> bool {
        // A Release change: see the module docs. Model: `followed_while_a_stored_block_is_lost`.
        self.tail.fetch_add(0, Release) - position > self.kept()
    }

    /// `None`: the position is not there yet. `Err`: lost, with all before the returned one.
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
            // SAFETY: no other reference exists; replaced entries went to the collector.
            drop(unsafe { entry.try_into_owned() });
        }
    }
}

//! The slots of a store in memory: which key is where, who reads it, and which is evicted next.
//!
//! ```text
//!         take (empty)                     finish
//! free  ----------------->  writing  ------------------->  held  --+
//!  ^                          |  ^                          |      | another put of the key,
//!  |  clear                   |  +---- take (evicts) -------+      | or the value is damaged
//!  +---------- leaving <------+ abandon                            |
//!                 ^                                                |
//!                 +------------------------------------------------+
//! ```
//!
//! | state | in the index | its record in the file | who may write it |
//! |---|---|---|---|
//! | free | no | zeros | no thread |
//! | writing | no | zeros, until the value is written | the put that took it |
//! | held | yes | its own | no thread |
//! | leaving | no | its own | the last reader, or who made it leave if there is none: writes zeros |
//!
//! No file is written under the lock of a table: a slot stays leaving while its record gets zeros.
//! An eviction whose record could not get zeros is undone (writing to held).
//!
//! # Invariants
//!
//! ```text
//! free + writing + held + leaving == slots
//! a slot with readers is held or leaving: no thread writes it
//! a key is in at most one held slot
//! ```
//!
//! Eviction is CLOCK with a small counter: a hit adds to it, and the hand, which goes around over
//! the slots in the order in which they are filled, takes from it and evicts at zero.

use std::collections::HashMap;

use twox_hash::XxHash3_64;

use super::super::key::TierKey;
use super::record::Record;

/// Most hits that count.
const VISITS_MAX: u8 = 3;

/// Slots that the hand passes for one eviction; then it takes the least visited of them.
const PASSED_MAX: usize = 4096;

/// Slots of any state that the hand looks at for one eviction.
const SCANNED_MAX: usize = 1 << 16;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    Writing,
    Held,
    Leaving,
}

#[derive(Clone)]
struct Slot {
    /// `None` while the slot is free or written.
    record: Option<Record>,
    readers: u32,
    visits: u8,
    state: State,
    /// Whether it is written for the first time, as far as is known: that takes space on the disk.
    is_fresh: bool,
}

const EMPTY: Slot = Slot { record: None, readers: 0, visits: 0, state: State::Free, is_fresh: false };

/// A slot that a put took.
#[derive(Debug)]
pub(super) struct Taken {
    pub(super) slot: u32,
    pub(super) generation: u64,
    /// What was evicted for it, and is still in the file.
    pub(super) evicted: Option<Record>,
    /// Whether it is written for the first time.
    pub(super) is_fresh: bool,
}

pub(super) struct SlotTable {
    slots: Vec<Slot>,
    /// By the hash of a key. A key with the hash of another one replaces it.
    index: HashMap<u64, u32>,
    /// Free slots that were written before, and have their space on the disk.
    free: Vec<u32>,
    /// Free slots below `filled` whose first write failed.
    unwritten: Vec<u32>,
    /// Slots from here on were never taken: a file is filled from its start.
    filled: u32,
    hand: u32,
    generation: u64,
}

/// Returns the hash by which a key is found.
pub(super) fn hash_of(key: &TierKey) -> u64 {
    XxHash3_64::oneshot_with_seed(XxHash3_64::oneshot(&key.fingerprint.to_bytes()), &key.hash.to_bytes())
}

impl SlotTable {
    /// Creates a table with the records of the slots that have one. Adds to `stale` the slots whose
    /// record is older than another one of its key.
    pub(super) fn new(
        slots: u32,
        records: impl IntoIterator<Item = (u32, Record)>,
        stale: &mut Vec<u32>,
    ) -> Self {
        let mut table = Self {
            slots: vec![EMPTY; slots as usize],
            index: HashMap::with_capacity(slots as usize),
            free: Vec::new(),
            unwritten: Vec::new(),
            filled: 0,
            hand: 0,
            generation: 0,
        };
        for (slot, record) in records {
            stale.extend(table.restore(slot, record));
        }
        // The lowest is last.
        let is_free = |slot: &u32| table.slots[*slot as usize].state == State::Free;
        table.free = (0..table.filled).rev().filter(is_free).collect();
        table
    }

    /// Returns a slot whose record is stale.
    fn restore(&mut self, slot: u32, record: Record) -> Option<u32> {
        self.filled = self.filled.max(slot + 1);
        if record.generation > self.generation {
            // Slots are mostly filled in order: the oldest is behind the newest.
            (self.generation, self.hand) = (record.generation, slot + 1);
        }
        let other = self.index.insert(hash_of(&record.key), slot);
        if let Some(other) = other {
            let at = &mut self.slots[other as usize];
            if at.record.is_some_and(|of| of.generation > record.generation) {
                self.index.insert(hash_of(&record.key), other);
                return Some(slot);
            }
            *at = EMPTY;
        }
        self.slots[slot as usize] = Slot { record: Some(record), state: State::Held, ..EMPTY };
        other
    }

    pub(super) fn held(&self) -> usize {
        self.index.len()
    }

    pub(super) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn has_free(&self) -> bool {
        self.has_written_free() || !self.unwritten.is_empty() || (self.filled as usize) < self.slots()
    }

    /// Returns whether there is a free slot with space on the disk.
    pub(super) fn has_written_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Returns whether every slot is free: no thread reads or writes one.
    pub(super) fn is_idle(&self) -> bool {
        self.free.len() + self.unwritten.len() == self.filled as usize
    }

    /// Returns the slot that holds a key.
    pub(super) fn find(&self, key: &TierKey) -> Option<u32> {
        let slot = *self.index.get(&hash_of(key))?;
        self.slots[slot as usize].record.filter(|record| record.key == *key).map(|_| slot)
    }

    /// Counts a hit, and keeps the slot of a key from being written until [`unpin`](Self::unpin).
    pub(super) fn pin(&mut self, key: &TierKey) -> Option<(u32, Record)> {
        let slot = self.find(key)?;
        let at = &mut self.slots[slot as usize];
        (at.readers, at.visits) = (at.readers + 1, (at.visits + 1).min(VISITS_MAX));
        Some((slot, at.record?))
    }

    /// Ends a pin. Returns whether the caller has to [`clear`](Self::clear) the slot.
    #[must_use]
    pub(super) fn unpin(&mut self, slot: u32) -> bool {
        let at = &mut self.slots[slot as usize];
        at.readers -= 1;
        at.readers == 0 && at.state == State::Leaving
    }

    /// Takes a slot to be written: a free one, if possible one that was written before, or else
    /// that of an evicted key. `None` if every slot is written or read.
    pub(super) fn take(&mut self) -> Option<Taken> {
        if let Some(slot) = self.free.pop() {
            return Some(self.taken(slot, false));
        }
        if let Some(slot) = self.unwritten.pop() {
            return Some(self.taken(slot, true));
        }
        if (self.filled as usize) < self.slots.len() {
            self.filled += 1;
            return Some(self.taken(self.filled - 1, true));
        }
        let slot = self.victim()?;
        Some(self.taken(slot, false))
    }

    /// Takes a slot that has its space on the disk: a free one, that of the former value of the
    /// key, or that of an evicted key.
    pub(super) fn take_written(&mut self, key: &TierKey) -> Option<Taken> {
        let is_idle = |slot: &u32| self.slots[*slot as usize].readers == 0;
        let own = self.find(key).filter(is_idle);
        let slot = self.free.pop().or(own).or_else(|| self.victim())?;
        Some(self.taken(slot, false))
    }

    fn taken(&mut self, slot: u32, is_fresh: bool) -> Taken {
        let evicted = self.slots[slot as usize].record;
        self.unlink(slot);
        self.generation += 1;
        self.slots[slot as usize] = Slot { state: State::Writing, is_fresh, ..EMPTY };
        Taken { slot, generation: self.generation, evicted, is_fresh }
    }

    /// Moves the hand to a slot that has no reader and that was not hit lately.
    fn victim(&mut self) -> Option<u32> {
        if self.index.is_empty() {
            return None;
        }
        let (mut least, mut passed) = (None, 0);
        // Enough for every counter to get to zero.
        let enough = (usize::from(VISITS_MAX) + 1) * self.filled as usize;
        for _ in 0..enough.min(SCANNED_MAX) {
            let slot = if self.hand < self.filled { self.hand } else { 0 };
            self.hand = slot + 1;
            let at = &mut self.slots[slot as usize];
            if at.state != State::Held || at.readers > 0 {
                continue;
            }
            if at.visits == 0 {
                return Some(slot);
            }
            at.visits -= 1;
            if least.is_none_or(|(visits, _)| at.visits < visits) {
                least = Some((at.visits, slot));
            }
            passed += 1;
            if passed == PASSED_MAX {
                break;
            }
        }
        least.map(|(_, slot)| slot)
    }

    /// The value is written: its key is found from now on. Returns the slot of the key's former
    /// value, if the caller has to [`clear`](Self::clear) it.
    #[must_use]
    pub(super) fn finish(&mut self, slot: u32, record: Record) -> Option<u32> {
        let former = self.index.insert(hash_of(&record.key), slot);
        let visits = former.map_or(0, |former| self.slots[former as usize].visits);
        self.slots[slot as usize] = Slot { record: Some(record), state: State::Held, visits, ..EMPTY };
        former.filter(|former| self.leave(*former))
    }

    /// The write of a slot failed. The caller has to [`clear`](Self::clear) it.
    pub(super) fn abandon(&mut self, slot: u32) {
        self.slots[slot as usize].state = State::Leaving;
    }

    /// The write of a slot did not begin: what was evicted for it is still there. Returns whether
    /// the caller has to [`clear`](Self::clear) it, because its key has got another value
    /// meanwhile.
    #[must_use]
    pub(super) fn reinstate(&mut self, slot: u32, record: Record) -> bool {
        if self.index.contains_key(&hash_of(&record.key)) {
            self.abandon(slot);
            return true;
        }
        self.index.insert(hash_of(&record.key), slot);
        self.slots[slot as usize] = Slot { record: Some(record), state: State::Held, ..EMPTY };
        false
    }

    /// The value of a pinned slot is wrong: its key is not found any more. Returns whether it was
    /// found until now.
    pub(super) fn condemn(&mut self, slot: u32) -> bool {
        let is_held = self.slots[slot as usize].state == State::Held;
        if is_held {
            self.unlink(slot);
            let clears = self.leave(slot);
            debug_assert!(!clears, "the caller has a pin");
        }
        is_held
    }

    /// The record of a leaving slot was overwritten: the slot is free.
    pub(super) fn clear(&mut self, slot: u32) {
        let at = &mut self.slots[slot as usize];
        assert!(at.state == State::Leaving && at.readers == 0, "slot {slot} is {:?}", at.state);
        let of = if at.is_fresh { &mut self.unwritten } else { &mut self.free };
        of.push(slot);
        *at = EMPTY;
    }

    fn leave(&mut self, slot: u32) -> bool {
        let at = &mut self.slots[slot as usize];
        at.state = State::Leaving;
        at.readers == 0
    }

    fn unlink(&mut self, slot: u32) {
        if let Some(record) = self.slots[slot as usize].record {
            self.index.remove(&hash_of(&record.key));
        }
    }
}

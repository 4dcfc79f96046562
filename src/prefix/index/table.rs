//! One table of the index, and the operations in the two buckets of a key.

use std::ops::ControlFlow;

use smallvec::SmallVec;

use crate::ids::{BlockId, FRAMES_MAX};
use crate::sync::{AtomicPtr, AtomicU64, Ordering::*, fence};

use super::bucket::{Bucket, Slots, WAYS, each};
use super::entry::{Entry, Key};

const ENTRIES_PER_BLOCK: usize = 2;

/// A key goes to its first bucket while that holds fewer entries than this.
const AT_HOME_MAX: usize = WAYS * 3 / 4;

// The bits of a key's second word that choose the bucket are replaced in entries by the block id.
const _: () = assert!(FRAMES_MAX * ENTRIES_PER_BLOCK / WAYS <= FRAMES_MAX);

/// Outcome of an insertion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Inserted {
    /// The entry was inserted.
    New,
    /// The entry was already there.
    Present,
    /// There was no room: lookups will not find the block.
    Full,
}

pub(super) struct Table {
    buckets: Box<[Bucket]>,
    mask: usize,
    /// The larger table that succeeds this one.
    pub(super) next: AtomicPtr<Table>,
}

impl Table {
    pub(super) fn new(blocks: usize) -> Self {
        let buckets = Self::buckets_for(blocks);
        Self {
            buckets: (0..buckets).map(|_| Bucket::new()).collect(),
            mask: buckets - 1,
            next: AtomicPtr::new(std::ptr::null_mut()),
        }
    }

    fn buckets_for(blocks: usize) -> usize {
        (blocks.min(FRAMES_MAX) * ENTRIES_PER_BLOCK).div_ceil(WAYS).next_power_of_two()
    }

    pub(super) fn is_for(&self, blocks: usize) -> bool {
        self.buckets.len() >= Self::buckets_for(blocks)
    }

    #[inline]
    fn pair(&self, key: Key) -> [&Bucket; 2] {
        // SAFETY: the mask is one less than the number of buckets, which is a power of two.
        key.buckets(self.mask).map(|at| unsafe { self.buckets.get_unchecked(at) })
    }

    #[inline]
    pub(super) fn find<R>(&self, key: Key, mut look: impl FnMut(BlockId) -> ControlFlow<R>) -> Option<R> {
        let like = key.entry(BlockId(0));
        for bucket in self.pair(key) {
            for at in each(bucket.like(like)) {
                // Read again: the slot may have changed.
                let entry = bucket.entry(at);
                if like.is_like(entry)
                    && let ControlFlow::Break(found) = look(entry.id())
                {
                    return Some(found);
                }
            }
        }
        None
    }

    #[inline]
    pub(super) fn prefetch(&self, key: Key) {
        self.pair(key)[0].fetch();
    }

    /// Stores an entry in an empty slot, unless it is present; also returns whether another entry
    /// has its fingerprint. Reads the second bucket only if the first has no room to spare.
    fn add(&self, entry: Entry, key: Key) -> (Inserted, bool) {
        let [first, second] = self.pair(key);
        loop {
            let in_first = first.room(entry);
            let (bucket, room) = if in_first.is_there || more_than::<{ WAYS - AT_HOME_MAX }>(in_first.empty) {
                (first, in_first)
            } else {
                in_first.or_emptier(first, second, second.room(entry))
            };
            if room.is_there {
                return (Inserted::Present, room.has_alike);
            }
            let Some(at) = each(room.empty).next() else { return (Inserted::Full, room.has_alike) };
            // Release: pairs with the Acquire in `Bucket::entry`. Insertions have fenced; a thread
            // that restores an entry, or walks, has read the word after its fence.
            if bucket.exchange(at, Entry::EMPTY, entry, Release) {
                return (Inserted::New, room.has_alike);
            }
            // Another thread has filled it: progress. Reached by the model `insert_beside_insert`.
        }
    }

    pub(super) fn add_counted(&self, entry: Entry, key: Key, forgotten: &AtomicU64) -> Inserted {
        let (inserted, _) = self.add(entry, key);
        if inserted == Inserted::Full {
            // Relaxed: a statistic.
            forgotten.fetch_add(1, Relaxed);
        }
        inserted
    }

    /// Adds an entry, in place of an outdated one if there is no room.
    pub(super) fn insert<K: IntoIterator<Item = Key>>(
        &self,
        key: Key,
        id: BlockId,
        registered: &impl Fn(BlockId) -> K,
        forgotten: &AtomicU64,
    ) -> (Inserted, bool) {
        let entry = key.entry(id);
        match self.add(entry, key) {
            (Inserted::Full, has_alike) => (self.insert_full(key, entry, registered, forgotten), has_alike),
            added => added,
        }
    }

    #[cold]
    fn insert_full<K: IntoIterator<Item = Key>>(
        &self,
        key: Key,
        entry: Entry,
        registered: &impl Fn(BlockId) -> K,
        forgotten: &AtomicU64,
    ) -> Inserted {
        if self.replace(key, entry, registered, forgotten) {
            Inserted::New
        } else {
            // Another thread may have removed an entry meanwhile.
            self.add_counted(entry, key, forgotten)
        }
    }

    fn replace<K: IntoIterator<Item = Key>>(
        &self,
        key: Key,
        entry: Entry,
        registered: &impl Fn(BlockId) -> K,
        forgotten: &AtomicU64,
    ) -> bool {
        for number in key.buckets(self.mask) {
            let bucket = &self.buckets[number];
            for at in 0..WAYS {
                let old = bucket.entry(at);
                if old == Entry::EMPTY || self.right_key(old, number, registered).is_some() {
                    continue;
                }
                // Release: pairs with the Acquire in `Bucket::entry`.
                if bucket.exchange(at, old, entry, Release) {
                    second_look();
                    self.restore(old, number, registered, forgotten);
                    return true;
                }
            }
        }
        false
    }

    /// Returns the key of the block of an entry found in bucket `number`, if the entry is correct.
    fn right_key<K: IntoIterator<Item = Key>>(
        &self,
        entry: Entry,
        number: usize,
        registered: &impl Fn(BlockId) -> K,
    ) -> Option<Key> {
        let is_right = |key: &Key| key.entry(entry.id()) == entry && key.buckets(self.mask).contains(&number);
        registered(entry.id()).into_iter().find(is_right)
    }

    pub(super) fn remove_all<K: IntoIterator<Item = Key>>(
        &self,
        blocks: impl Iterator<Item = (Key, BlockId)>,
        registered: &impl Fn(BlockId) -> K,
        forgotten: &AtomicU64,
    ) {
        let mut removed = SmallVec::<[(Entry, usize); 16]>::new();
        for (key, id) in blocks {
            let entry = key.entry(id);
            for number in key.buckets(self.mask) {
                let bucket = &self.buckets[number];
                let slots = bucket.equal(entry);
                for at in each(slots) {
                    // Relaxed: nothing is published, and the fence below orders what follows.
                    if bucket.exchange(at, entry, Entry::EMPTY, Relaxed) {
                        removed.push((entry, number));
                    }
                }
                // Mostly the only entry: the other bucket is not read.
                if slots != 0 {
                    break;
                }
            }
        }
        if !removed.is_empty() {
            second_look();
            removed.iter().for_each(|&(entry, number)| self.restore(entry, number, registered, forgotten));
        }
    }

    /// Restores a removed entry if it was correct after all. Comes after a [`second_look`].
    fn restore<K: IntoIterator<Item = Key>>(
        &self,
        entry: Entry,
        number: usize,
        registered: &impl Fn(BlockId) -> K,
        forgotten: &AtomicU64,
    ) {
        if let Some(key) = self.right_key(entry, number, registered) {
            // Reached by the models of re-registration.
            let _counted = self.add_counted(entry, key, forgotten);
        }
    }

    #[cfg(all(test, not(kvpool_loom)))]
    pub(super) fn is_in_first(&self, key: Key, id: BlockId) -> bool {
        self.pair(key)[0].equal(key.entry(id)) != 0
    }

    pub(super) fn slots(&self) -> usize {
        self.buckets.len() * WAYS
    }

    #[cfg(feature = "internals")]
    pub(super) fn entries(&self) -> usize {
        let taken = |bucket: &Bucket| WAYS - bucket.room(Entry::EMPTY).empty.count_ones() as usize;
        self.buckets.iter().map(taken).sum()
    }

    #[cfg(feature = "internals")]
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.buckets)
    }
}

#[inline]
fn more_than<const N: usize>(slots: Slots) -> bool {
    (0..N).fold(slots, |slots, _| slots & slots.wrapping_sub(1)) != 0
}

#[inline]
fn second_look() {
    // Pairs with the fence in `Index::announce`: that thread sees the entry gone, or we its word.
    fence(SeqCst);
}

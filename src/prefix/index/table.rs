//! A table of the index: buckets of one cache line, and what is done in two of them.

use std::ops::ControlFlow;

use crate::ids::{BlockId, FRAMES_MAX};
use crate::sync::{AtomicPtr, AtomicU64, Ordering::*, fence};

use super::entry::Entry;
use super::{Inserted, Key};

/// Entries in a bucket: a cache line of them. A model's buckets are small enough to be full.
const WAYS: usize = if cfg!(kvpool_loom) { 2 } else { 8 };

/// Entries that there is room for, for each block of the pool.
const ENTRIES_PER_BLOCK: usize = 2;

/// As long as a key's first bucket holds fewer entries than this, it goes there.
const AT_HOME_MAX: u32 = WAYS as u32 * 3 / 4;

// The bits of a key that choose the bucket are those of its second word that make room for a block's id.
const _: () = assert!(FRAMES_MAX * ENTRIES_PER_BLOCK / WAYS <= FRAMES_MAX);

#[repr(align(64))]
struct Bucket([AtomicU64; WAYS]);

/// A bit for each slot of a bucket.
type Slots = u32;

impl Bucket {
    fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(Entry::EMPTY)))
    }

    /// The slots whose words are `so`. Without a branch: where in its bucket an entry lies cannot be foreseen.
    #[inline]
    fn slots(&self, so: impl Fn(u64) -> bool) -> Slots {
        // Relaxed: who goes by what is found reads it again.
        let bits = self.0.iter().map(|slot| Slots::from(so(slot.load(Relaxed))));
        bits.enumerate().fold(0, |slots, (at, bit)| slots | bit << at)
    }

    /// The slots that are empty, or `None` if one holds this entry.
    #[inline]
    fn empty(&self, entry: Entry) -> Option<Slots> {
        (self.slots(|word| word == entry.0) == 0).then(|| self.slots(|word| word == Entry::EMPTY))
    }
}

/// Asks for a cache line, where the processor can be asked.
#[inline]
fn fetch(bucket: &Bucket) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every processor of this architecture has it, and it reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(bucket).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = bucket;
}

/// See the [module](self).
pub(super) struct Table {
    buckets: Box<[Bucket]>,
    /// One less than the number of buckets.
    mask: usize,
    /// The larger one that is to follow.
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

    /// Whether it is large enough for a pool of so many blocks.
    pub(super) fn is_for(&self, blocks: usize) -> bool {
        self.buckets.len() >= Self::buckets_for(blocks)
    }

    #[inline]
    fn pair(&self, key: Key) -> [&Bucket; 2] {
        // SAFETY: the mask is one less than the number of buckets, which is a power of two.
        key.buckets(self.mask).map(|at| unsafe { self.buckets.get_unchecked(at) })
    }

    /// Gives `look` the blocks whose entries have this key's fingerprint, until it breaks.
    #[inline]
    pub(super) fn find<R>(&self, key: Key, mut look: impl FnMut(BlockId) -> ControlFlow<R>) -> Option<R> {
        let like = key.entry(BlockId(0));
        for bucket in self.pair(key) {
            let mut slots = bucket.slots(|word| like.is_like(word));
            while slots != 0 {
                let at = slots.trailing_zeros() as usize % WAYS;
                slots &= slots - 1;
                // Again, since the slot may have changed. Acquire: pairs with the Release by which the entry was
                // made; `look` sees the block's word as it was then, or newer.
                let word = bucket.0[at].load(Acquire);
                if like.is_like(word)
                    && let ControlFlow::Break(found) = look(Entry(word).id())
                {
                    return Some(found);
                }
            }
        }
        None
    }

    /// Fetches the bucket that [`find`](Self::find) reads first, and often alone.
    #[inline]
    pub(super) fn prefetch(&self, key: Key) {
        fetch(self.pair(key)[0]);
    }

    /// Fetches both, for who will write.
    #[inline]
    pub(super) fn prefetch_both(&self, key: Key) {
        self.pair(key).into_iter().for_each(fetch);
    }

    /// Puts an entry into an empty slot, if there is one and the entry is not there.
    fn add(&self, entry: Entry, key: Key) -> Inserted {
        let [first, second] = self.pair(key);
        loop {
            let (Some(in_first), Some(in_second)) = (first.empty(entry), second.empty(entry)) else {
                return Inserted::Present;
            };
            let at_home = in_first.count_ones() > WAYS as u32 - AT_HOME_MAX;
            let (bucket, slots) = if at_home || in_first.count_ones() >= in_second.count_ones() {
                (first, in_first)
            } else {
                (second, in_second)
            };
            if slots == 0 {
                return Inserted::Full;
            }
            let slot = &bucket.0[slots.trailing_zeros() as usize];
            // Release: pairs with the Acquire in `find`. To an insertion's own fence it adds nothing; who puts back, or
            // walks, has read the word after its fence.
            let order = if cfg!(kvpool_mutant = "index_relaxed") { Relaxed } else { Release };
            if slot.compare_exchange(Entry::EMPTY, entry.0, order, Relaxed).is_ok() {
                return Inserted::New;
            }
            // Another thread has filled it: it has made progress. Reached by the model `insert_beside_insert`.
        }
    }

    /// The same, and what finds no room is counted.
    pub(super) fn add_counted(&self, entry: Entry, key: Key, forgotten: &AtomicU64) -> Inserted {
        let inserted = self.add(entry, key);
        if inserted == Inserted::Full {
            // Relaxed: for statistics.
            forgotten.fetch_add(1, Relaxed);
        }
        inserted
    }

    /// Adds an entry; if there is no room, in the place of one that is out of date.
    pub(super) fn insert(
        &self,
        key: Key,
        id: BlockId,
        registered: &impl Fn(BlockId) -> Option<Key>,
        forgotten: &AtomicU64,
    ) -> Inserted {
        let entry = key.entry(id);
        let inserted = self.add(entry, key);
        if inserted != Inserted::Full || self.replace(key, entry, registered, forgotten) {
            return if inserted == Inserted::Full { Inserted::New } else { inserted };
        }
        // Something may have been removed meanwhile.
        self.add_counted(entry, key, forgotten)
    }

    /// Puts an entry in the place of one that is out of date.
    #[cold]
    fn replace(
        &self,
        key: Key,
        entry: Entry,
        registered: &impl Fn(BlockId) -> Option<Key>,
        forgotten: &AtomicU64,
    ) -> bool {
        for at in key.buckets(self.mask) {
            for slot in &self.buckets[at].0 {
                // Acquire: as in `find`, so that a block that has just been registered is not taken for an old one.
                let Some(old) = Entry::new(slot.load(Acquire)) else { continue };
                let is_right = self.right_key(old, at, registered).is_some();
                if is_right && !cfg!(kvpool_mutant = "index_replace_live") {
                    continue;
                }
                // Release: pairs with the Acquire in `find`.
                if slot.compare_exchange(old.0, entry.0, Release, Relaxed).is_ok() {
                    self.restore(old, at, registered, forgotten);
                    return true;
                }
            }
        }
        false
    }

    /// The key under which the block of an entry that was found in bucket `at` is registered, if the entry is right.
    fn right_key(
        &self,
        entry: Entry,
        at: usize,
        registered: &impl Fn(BlockId) -> Option<Key>,
    ) -> Option<Key> {
        let key = registered(entry.id())?;
        (key.entry(entry.id()) == entry && key.buckets(self.mask).contains(&at)).then_some(key)
    }

    /// Takes away each entry of a block that lies where `key` may lie.
    pub(super) fn remove(
        &self,
        key: Key,
        id: BlockId,
        registered: &impl Fn(BlockId) -> Option<Key>,
        forgotten: &AtomicU64,
    ) {
        let entry = key.entry(id);
        for at in key.buckets(self.mask) {
            let bucket = &self.buckets[at];
            let mut slots = bucket.slots(|word| word == entry.0);
            while slots != 0 {
                let slot = &bucket.0[slots.trailing_zeros() as usize];
                slots &= slots - 1;
                // Relaxed: nothing is published, and the fence in `restore` orders what follows.
                if slot.compare_exchange(entry.0, Entry::EMPTY, Relaxed, Relaxed).is_ok() {
                    self.restore(entry, at, registered, forgotten);
                }
            }
        }
    }

    /// The second look, after an entry has been taken away from bucket `at`: if it was right after all, it is put back.
    fn restore(
        &self,
        entry: Entry,
        at: usize,
        registered: &impl Fn(BlockId) -> Option<Key>,
        forgotten: &AtomicU64,
    ) {
        if cfg!(kvpool_mutant = "index_no_second_look") {
            return;
        }
        if !cfg!(kvpool_mutant = "index_restore_no_fence") {
            // Pairs with the one in `Index::announce`: who registers the block sees that the entry is gone, or we see
            // the word.
            fence(SeqCst);
        }
        if let Some(key) = self.right_key(entry, at, registered) {
            // Reached by the models of re-registration.
            let _counted = self.add_counted(entry, key, forgotten);
        }
    }

    /// Whether the entry lies where a look-up looks first.
    #[cfg(all(test, not(kvpool_loom)))]
    pub(super) fn is_in_first(&self, key: Key, id: BlockId) -> bool {
        self.pair(key)[0].empty(key.entry(id)).is_none()
    }

    pub(super) fn slots(&self) -> usize {
        self.buckets.len() * WAYS
    }

    pub(super) fn entries(&self) -> usize {
        let taken = |bucket: &Bucket| bucket.slots(|word| word != Entry::EMPTY).count_ones() as usize;
        self.buckets.iter().map(taken).sum()
    }

    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.buckets)
    }
}

//! Maps a hash to the blocks that may hold it: a concurrent table of *hints*.
//!
//! A block's word and row are authoritative: whether it is *registered*, and under which keys
//! (several in a [frame pool](super::names)). Readers check the word of each block that they find,
//! so an outdated entry only costs a check. The index must only **not drop an entry without
//! counting it** ([`Index::forgotten`]).
//!
//! ```text
//! key.0 ── low bits ──► bucket   [entry entry  0   entry  0     0   entry  0  ]   64 bytes: one cache line
//! key.1 ── low bits ──► bucket   [entry  0   entry  0     0   entry  0     0  ]
//!    └──── high bits ─► fingerprint in the entry (`entry`)
//! ```
//!
//! An entry may be in any slot of its key's two buckets: in the first while that has room to spare,
//! so that most lookups read one line; then in the emptier one, so that both are full only when the
//! whole table is overfull.
//!
//! | from | to | by |
//! |---|---|---|
//! | empty | entry | [`insert`](Index::insert), [`grow`](Index::grow), and threads that restore an entry |
//! | entry | empty | [`remove`](Index::remove) |
//! | entry of a block that is not registered under its key | another entry | `insert`, when both buckets are full |
//!
//! Each transition is one compare-exchange; a thread stopped between two of its steps blocks no
//! other. An entry may return to its former slot (the same block with the same tokens again), so a
//! compare-exchange can remove another entry than the one examined; a second look handles this.
//!
//! # Invariants
//!
//! A registered block whose `insert` has returned has its entry in each table from `current` on, or
//! is counted as forgotten, or another thread is between removing the entry and its second look.
//! Hence, when no thread is inside a call: `registered blocks <= correct entries + forgotten`.
//!
//! A block may have two equal entries (an insertion concurrent with growth), a key may have two
//! blocks, and an entry may outlive its block's registration. All of this is harmless; `remove`
//! removes the copies in one bucket, and searches the second if the first has none.
//!
//! # Protocols
//!
//! 1. *An inserter* has registered the block in its word; it fences, then reads the slots and the
//!    tables. *A remover* removes an entry, fences, and re-reads the word; if the block is
//!    registered under that key, it restores the entry. So either the inserter finds the entry gone
//!    and makes a new one, or the remover sees the word.
//! 2. *A grower* publishes the larger table as the `next` of the current one, fences, walks all
//!    words, inserts the registered blocks into the new table, and makes it current. *An inserter*
//!    inserts into every table from the current one on. So either the inserter sees the new table,
//!    or the walk sees the word; the inserter's one fence serves both protocols. *A lookup* reads
//!    only the current table, which is complete.
//! 3. *A grower that finds another grower's table* also fills it and makes it current: a stopped
//!    grower blocks no other thread, not even another grower.
//! 4. Tables are freed with the index. Each is at least twice as large as the one before, so all
//!    old ones together are no larger than the last, and readers need no epoch.
//!
//! The fences are needed because a compare-exchange of one word does not order reads of another.

mod bucket;
mod entry;
mod table;

#[cfg(all(test, not(kvpool_loom)))]
mod tests;

use std::ops::ControlFlow;
use std::ptr;

use crate::ids::BlockId;
use crate::sync::{AtomicPtr, AtomicU64, Ordering::*, fence};

pub use entry::Key;
pub use table::Inserted;
use table::Table;

/// Concurrent table from a hash to the blocks that may be registered under it. No operation blocks.
///
/// Entries are hints: callers check the word of each block that [`find`](Self::find) reports. Each
/// entry that is dropped for lack of room is [counted](Self::forgotten).
pub struct Index {
    /// First table of the chain; read only when all tables are freed or measured.
    oldest: AtomicPtr<Table>,
    current: AtomicPtr<Table>,
    forgotten: AtomicU64,
}

impl Index {
    /// Creates an index for a pool of `blocks` blocks: two entries per block, 16 to 32 bytes.
    pub fn new(blocks: usize) -> Self {
        let table = Box::into_raw(Box::new(Table::new(blocks)));
        Self { oldest: AtomicPtr::new(table), current: AtomicPtr::new(table), forgotten: AtomicU64::new(0) }
    }

    #[inline]
    fn current(&self) -> &Table {
        // SAFETY: never null, and tables live as long as the index. Acquire: pairs with the Release
        // in `grow`; the walk's insertions are visible.
        unsafe { &*self.current.load(Acquire) }
    }

    fn next<'a>(&'a self, table: &'a Table) -> Option<&'a Table> {
        // SAFETY: tables live as long as the index. Acquire: pairs with the Release in `grow`.
        unsafe { table.next.load(Acquire).as_ref() }
    }

    fn tables(&self) -> impl Iterator<Item = &Table> {
        std::iter::successors(Some(self.current()), |table| self.next(table))
    }

    /// Calls `look` with each block that may be registered under `key`, until it breaks.
    ///
    /// Reports every block that was inserted and stays registered, perhaps twice, unless its entry
    /// was forgotten or another thread is restoring it. `look` must check the block's word, and
    /// sees it as it was at the insertion, or newer.
    #[inline]
    pub fn find<R>(&self, key: Key, look: impl FnMut(BlockId) -> ControlFlow<R>) -> Option<R> {
        self.current().find(key, look)
    }

    /// Prefetches the line that [`find`](Self::find) reads first. Call it a few keys ahead.
    #[inline]
    pub fn prefetch(&self, key: Key) {
        self.current().prefetch(key);
    }

    /// Inserts a block that the caller has registered under `key`. `registered` returns the keys of
    /// a block that might be replaced, re-reading its word at each call.
    #[cfg(feature = "internals")]
    pub fn insert<K: IntoIterator<Item = Key>>(
        &self,
        key: Key,
        id: BlockId,
        registered: impl Fn(BlockId) -> K,
    ) -> Inserted {
        self.announce();
        self.insert_announced(key, id, &registered).0
    }

    /// Like [`insert`](Self::insert), for several registered blocks, with one fence. Calls `alike`
    /// with the position of each block whose key another block in the same bucket has, unless
    /// threads insert both at the same moment into different slots.
    pub fn insert_all<K: IntoIterator<Item = Key>>(
        &self,
        blocks: impl IntoIterator<Item = (Key, BlockId), IntoIter: Clone>,
        registered: impl Fn(BlockId) -> K,
        mut alike: impl FnMut(usize),
    ) {
        self.announce();
        let blocks = blocks.into_iter();
        blocks.clone().for_each(|(key, _)| self.current().prefetch(key));
        for (place, (key, id)) in blocks.enumerate() {
            let (_counted, has_alike) = self.insert_announced(key, id, &registered);
            if has_alike {
                alike(place);
            }
        }
    }

    #[inline]
    fn announce(&self) {
        // Pairs with the fences in `grow` (the walk sees the word, or we see the new table) and in
        // `second_look` (the remover of our entry sees the word, or we see it gone).
        fence(SeqCst);
    }

    fn insert_announced<K: IntoIterator<Item = Key>>(
        &self,
        key: Key,
        id: BlockId,
        registered: &impl Fn(BlockId) -> K,
    ) -> (Inserted, bool) {
        let table = self.current();
        let inserted = table.insert(key, id, registered, &self.forgotten);
        let mut tables = table;
        while let Some(next) = self.next(tables) {
            // The result for the table that becomes current counts.
            let _counted = next.insert(key, id, registered, &self.forgotten);
            tables = next;
        }
        inserted
    }

    /// Removes the entry of a block that is no longer registered under `key`; if the block is
    /// registered again, restores it. `registered` as in [`insert`](Self::insert).
    #[cfg(feature = "internals")]
    pub fn remove<K: IntoIterator<Item = Key>>(
        &self,
        key: Key,
        id: BlockId,
        registered: impl Fn(BlockId) -> K,
    ) {
        self.remove_all(std::iter::once((key, id)), registered);
    }

    /// Like [`remove`](Self::remove), for several blocks, with one fence.
    pub fn remove_all<K: IntoIterator<Item = Key>>(
        &self,
        blocks: impl Iterator<Item = (Key, BlockId)> + Clone,
        registered: impl Fn(BlockId) -> K,
    ) {
        for table in self.tables() {
            table.remove_all(blocks.clone(), &registered, &self.forgotten);
        }
    }

    /// Makes room for a larger pool, concurrently with all other operations. `walk` passes every
    /// registered block and its key, reading each word anew; it may run several times at once.
    pub fn grow(&self, blocks: usize, mut walk: impl FnMut(&mut dyn FnMut(Key, BlockId))) {
        loop {
            let current = self.current();
            if current.is_for(blocks) {
                return;
            }
            let next = self.next(current).unwrap_or_else(|| self.publish(current, Table::new(blocks)));
            // Pairs with the fence in `announce`: an inserter that the walk misses sees `next`.
            fence(SeqCst);
            walk(&mut |key, id| {
                let _counted = next.add_counted(key.entry(id), key, &self.forgotten);
            });
            self.switch(current, next);
        }
    }

    fn publish<'a>(&'a self, current: &'a Table, table: Table) -> &'a Table {
        let table = Box::into_raw(Box::new(table));
        // Release: readers see the table empty.
        match current.next.compare_exchange(ptr::null_mut(), table, Release, Acquire) {
            // SAFETY: from now on it lives as long as the index.
            Ok(_) => unsafe { &*table },
            Err(faster) => {
                // SAFETY: owned by us; no other thread has seen it.
                drop(unsafe { Box::from_raw(table) });
                // SAFETY: not null, as null was expected; lives like the index. Acquire: as above.
                unsafe { &*faster }
            }
        }
    }

    fn switch(&self, current: &Table, next: &Table) {
        // Release: readers of the table see the insertions of the walk.
        let (from, to) = (ptr::from_ref(current).cast_mut(), ptr::from_ref(next).cast_mut());
        let _ = self.current.compare_exchange(from, to, Release, Relaxed);
    }

    /// Returns the number of entries that fit.
    pub fn capacity(&self) -> usize {
        self.current().slots()
    }

    /// Returns the number of entries, correct and outdated. Walks the table.
    #[cfg(feature = "internals")]
    pub fn entries(&self) -> usize {
        self.current().entries()
    }

    /// Returns how many entries of registered blocks were dropped for lack of room.
    pub fn forgotten(&self) -> u64 {
        self.forgotten.load(Relaxed)
    }

    /// Returns the bytes used, including outgrown tables.
    #[cfg(feature = "internals")]
    pub fn bytes(&self) -> usize {
        // SAFETY: tables live as long as the index. Acquire: pairs with the Release in `publish`.
        let oldest = unsafe { self.oldest.load(Acquire).as_ref() };
        std::iter::successors(oldest, |table| self.next(table)).map(Table::bytes).sum()
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        let mut table = self.oldest.load(Relaxed);
        while !table.is_null() {
            // SAFETY: made by `Box::into_raw`, linked once, and freed once.
            table = unsafe { Box::from_raw(table) }.next.load(Relaxed);
        }
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        (f.debug_struct("Index").field("capacity", &self.capacity()))
            .field("forgotten", &self.forgotten())
            .finish_non_exhaustive()
    }
}

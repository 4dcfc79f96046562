//! From a hash to the block that may hold it: a table of *hints* that many threads read and change at once.
//!
//! What is true stands in the block's word and row: whether it is *registered*, and under which key. The index only says
//! where to look. Whoever finds a block checks its word, so that an entry that is out of date costs a look and nothing
//! else. That leaves the index one duty: **not to forget without saying so** ([`Index::forgotten`]).
//!
//! ```text
//! key.0 ── low bits ──► bucket   [entry entry  0   entry  0     0   entry  0  ]   64 bytes: one cache line
//! key.1 ── low bits ──► bucket   [entry  0   entry  0     0   entry  0     0  ]
//!    └──── high bits ─► fingerprint in the entry (`entry`)
//! ```
//!
//! A key may lie in either of two buckets, anywhere in it. It is put into the first one while that has room to spare,
//! so that most look-ups read one line; then into the emptier one, so that both are full only when the whole is overfull.
//!
//! # Transitions of a slot
//!
//! | from | to | by |
//! |---|---|---|
//! | empty | entry | [`insert`](Index::insert), [`grow`](Index::grow), and who puts back |
//! | entry | empty | [`remove`](Index::remove) |
//! | entry of a block that is not registered so | another entry | `insert`, where both buckets are full |
//!
//! Each is one compare-exchange, and a thread that is stopped between any two of its steps stops nobody. An entry may
//! come back to a slot that it was taken from (the same block, with the same tokens, once more), so that a
//! compare-exchange can take away an entry that is *not* the one that was judged. That is what the second look is for.
//!
//! # Invariants
//!
//! A block that is registered, and whose `insert` has returned, has its entry in each table from `current` on, or
//! is counted as forgotten, or another thread is between taking the entry away and its second look. Hence, when no
//! thread is inside a call:
//! `registered blocks <= entries that are right + forgotten`.
//!
//! One block may have two equal entries (an insertion beside one by growth), a key two blocks, and an entry may outlive
//! its block's registration. All of it is harmless; `remove` takes every copy that it meets.
//!
//! # Protocols
//!
//! 1. *Who inserts* has registered the block in its word; fences; reads the slots and the tables. *Who takes an entry
//!    away* does it; fences; reads the word again. If it is registered so, the entry is put back. So either the
//!    inserter finds the entry gone, and makes a new one, or the other sees the word.
//! 2. *Who grows* publishes the larger table as the `next` of the current one; fences; walks all words, and inserts what is
//!    registered into the new table; then makes it current. *Who inserts* does so in every table from the current one
//!    on. So either the inserter sees the new table, or the walk sees the word: the fence before its first look
//!    serves for both, and needs no second look at the tables. *Who looks up* reads the current table only,
//!    which lacks nothing.
//! 3. *Who finds another grower's table* fills it as well, and makes it current: a grower that is stopped stops nobody, not
//!    even another grower.
//! 4. Tables stay until the index goes. Each is at least twice as large as the one before, so that all the old ones
//!    together are no larger than the last, and nobody needs an epoch to read one.
//!
//! Everything rests on fences, because a compare-exchange of one word does not order reads of another before it.

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
use table::Table;

/// What became of an insertion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Inserted {
    /// The entry is new.
    New,
    /// The entry was there.
    Present,
    /// There is no room: the block will not be found.
    Full,
}

/// See the [module](self).
pub struct Index {
    /// The first link of the chain; only for the end.
    oldest: AtomicPtr<Table>,
    current: AtomicPtr<Table>,
    forgotten: AtomicU64,
}

impl Index {
    /// An index with room for the blocks of a pool: two entries a block, 16 to 32 bytes.
    pub fn new(blocks: usize) -> Self {
        let table = Box::into_raw(Box::new(Table::new(blocks)));
        Self { oldest: AtomicPtr::new(table), current: AtomicPtr::new(table), forgotten: AtomicU64::new(0) }
    }

    /// The table that lacks nothing.
    #[inline]
    fn current(&self) -> &Table {
        // SAFETY: never null, and tables live as long as the index. Acquire: pairs with the Release in `grow`; the
        // table is as the walk left it.
        unsafe { &*self.current.load(Acquire) }
    }

    /// The table that is to follow, if somebody has begun to grow.
    fn next<'a>(&'a self, table: &'a Table) -> Option<&'a Table> {
        // SAFETY: tables live as long as the index. Acquire: pairs with the Release in `grow`.
        unsafe { table.next.load(Acquire).as_ref() }
    }

    /// The current table, and those that are to follow.
    fn tables(&self) -> impl Iterator<Item = &Table> {
        std::iter::successors(Some(self.current()), |table| self.next(table))
    }

    /// Calls `look` with each block that may be registered under `key`, until it breaks, and gives what it broke with.
    /// A block that has been inserted, and stays registered, is among them, unless it was forgotten or another
    /// thread is just putting it back. A block may come twice.
    ///
    /// `look` checks the block's word. It sees the word at least as it was when the block was inserted.
    #[inline]
    pub fn find<R>(&self, key: Key, look: impl FnMut(BlockId) -> ControlFlow<R>) -> Option<R> {
        self.current().find(key, look)
    }

    /// Fetches what [`find`](Self::find) will read first, if the processor has a way to ask for it. For a chain of keys: a
    /// few ahead of the look-up.
    #[inline]
    pub fn prefetch(&self, key: Key) {
        self.current().prefetch(key);
    }

    /// Makes a block findable that the caller has registered under `key`.
    ///
    /// `registered` says under which key, if any, a block is registered; it must read the block's word anew at each
    /// call. It is asked about blocks in whose place the new one might go.
    pub fn insert(&self, key: Key, id: BlockId, registered: impl Fn(BlockId) -> Option<Key>) -> Inserted {
        self.announce();
        self.insert_announced(key, id, &registered)
    }

    /// [`insert`](Self::insert) for several blocks, all of which the caller has registered before. One fence for all, and
    /// their lines are fetched at once.
    pub fn insert_all(
        &self,
        blocks: impl IntoIterator<Item = (Key, BlockId), IntoIter: Clone>,
        registered: impl Fn(BlockId) -> Option<Key>,
    ) {
        self.announce();
        let blocks = blocks.into_iter();
        blocks.clone().for_each(|(key, _)| self.current().prefetch_both(key));
        for (key, id) in blocks {
            let _counted = self.insert_announced(key, id, &registered);
        }
    }

    /// Between a block's registration and its insertion.
    #[inline]
    fn announce(&self) {
        if !cfg!(kvpool_mutant = "index_insert_no_fence") {
            // Pairs with the fence in `grow` (the walk sees the word, or we see the new table) and with the one in
            // `Table::restore` (who took our entry away sees the word, or we see it gone).
            fence(SeqCst);
        }
    }

    fn insert_announced(
        &self,
        key: Key,
        id: BlockId,
        registered: &impl Fn(BlockId) -> Option<Key>,
    ) -> Inserted {
        let table = self.current();
        let inserted = table.insert(key, id, registered, &self.forgotten);
        let mut tables = table;
        while let Some(next) = self.next(tables).filter(|_| !cfg!(kvpool_mutant = "index_one_table")) {
            // What counts is the table that will be current.
            let _counted = next.insert(key, id, registered, &self.forgotten);
            tables = next;
        }
        inserted
    }

    /// Takes away the entry of a block that is no longer registered under `key`, if it is there. To remove what is
    /// registered, or has become so again meanwhile, does no harm: it is put back.
    ///
    /// `registered` as in [`insert`](Self::insert).
    pub fn remove(&self, key: Key, id: BlockId, registered: impl Fn(BlockId) -> Option<Key>) {
        for table in self.tables() {
            table.remove(key, id, &registered, &self.forgotten);
        }
    }

    /// Makes room for the blocks of a larger pool. Everything else goes on meanwhile.
    ///
    /// `walk` calls what it is given with every block that is registered, and the key; it reads each word anew. It may be
    /// called more than once, and by two threads that grow at once.
    pub fn grow(&self, blocks: usize, mut walk: impl FnMut(&mut dyn FnMut(Key, BlockId))) {
        loop {
            let current = self.current();
            if current.is_for(blocks) {
                return;
            }
            let next = self.next(current).unwrap_or_else(|| self.publish(current, Table::new(blocks)));
            if !cfg!(kvpool_mutant = "index_grow_no_fence") {
                // Pairs with the one in `announce`: whom the walk does not see registered sees the new table.
                fence(SeqCst);
            }
            if cfg!(kvpool_mutant = "index_early_switch") {
                self.switch(current, next);
            }
            walk(&mut |key, id| {
                let _counted = next.add_counted(key.entry(id), key, &self.forgotten);
            });
            self.switch(current, next);
        }
    }

    /// Makes a table the one that follows; or gives the one that another thread was faster with.
    fn publish<'a>(&'a self, current: &'a Table, table: Table) -> &'a Table {
        let table = Box::into_raw(Box::new(table));
        // Release: the table is empty for whoever sees it.
        match current.next.compare_exchange(ptr::null_mut(), table, Release, Acquire) {
            // SAFETY: it lives as long as the index now.
            Ok(_) => unsafe { &*table },
            Err(faster) => {
                // SAFETY: ours, and nobody has seen it.
                drop(unsafe { Box::from_raw(table) });
                // SAFETY: not null, since null was expected; it lives as long as the index. Acquire: above.
                unsafe { &*faster }
            }
        }
    }

    /// From here on look-ups read the larger table. In vain if another thread has done it.
    fn switch(&self, current: &Table, next: &Table) {
        // Release: what the walk has inserted is there for who reads the table.
        let (from, to) = (ptr::from_ref(current).cast_mut(), ptr::from_ref(next).cast_mut());
        let _ = self.current.compare_exchange(from, to, Release, Relaxed);
    }

    /// How many entries there is room for.
    pub fn capacity(&self) -> usize {
        self.current().slots()
    }

    /// Entries that are there, right and out of date. Walks the table.
    pub fn entries(&self) -> usize {
        self.current().entries()
    }

    /// How many times a registered block was left out, or given up, for want of room.
    pub fn forgotten(&self) -> u64 {
        self.forgotten.load(Relaxed)
    }

    /// Bytes that the index takes, with tables that it has outgrown.
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

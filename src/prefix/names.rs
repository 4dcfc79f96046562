//! Further hashes of blocks, for engines that know one block by several hashes.
//!
//! The [row](super::row) has a block's first hash. Engines may add others: of fewer tokens than the
//! block holds, or of another group of layers. They are in an immutable list beside the row, which
//! is replaced as a whole and read under `epoch::pin`. Most blocks have none: a null pointer.
//!
//! ```text
//! known by = (the row's hash, unless the list says that it was taken away) + the list's hashes
//! ```
//!
//! | step | thread | by |
//! |---|---|---|
//! | add, remove | an engine's call, under the [lock](Names::lock) | compare-exchange |
//! | take | the thread that evicted the block, or uncached it | swap with null |
//!
//! An engine references the blocks to which it adds hashes, so that no thread evicts them
//! meanwhile. If it breaks this rule, a taker between the engine's read of the list and its
//! exchange makes the exchange fail, and a later taker takes the new list. After an earlier taker,
//! the engine finds the block uncached after its exchange, and takes the list back; no thread can
//! have cached the block since, as that needs the lock. So the list of an uncached block is empty
//! or held by one of these two threads, and no hash passes to the next contents.
//!
//! A lookup reads the list before and after the exchange that takes its reference: see
//! [`PrefixCache`](super::PrefixCache). For the index, the exchange of a list is a registration,
//! like that of a word: the inserter fences between it and the insertion, and the thread that
//! removed an entry reads word and list after its fence. Only adds and removals take the lock.
//! Model: `loom-tests/tests/frame_pool.rs`.

use crate::block::{GrowTable, TablePart};
use crate::ids::BlockId;
use crate::sync::epoch::{self, Atomic, Owned};
use crate::sync::{Frozen, Mutex, MutexGuard, Ordering::*};

use super::hash::BlockHash;

/// Hashes of a block beside its row; immutable once published.
#[derive(Clone, Default)]
struct NameList {
    /// The row's hash was removed.
    is_first_gone: bool,
    further: Vec<BlockHash>,
}

struct NamePart(Box<[Atomic<Frozen<NameList>>]>);

impl TablePart for NamePart {
    fn new(_base: usize, len: usize) -> Self {
        Self((0..len).map(|_| Atomic::null()).collect())
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Drop for NamePart {
    fn drop(&mut self) {
        for list in &mut self.0 {
            let list = std::mem::replace(list, Atomic::null());
            // SAFETY: no other reference to the table exists; replaced lists went to the collector.
            drop(unsafe { list.try_into_owned() });
        }
    }
}

pub(super) struct Names {
    lists: GrowTable<NamePart>,
    lock: Mutex<()>,
}

impl Names {
    pub(super) fn new(rows: usize) -> Self {
        Self { lists: GrowTable::new(rows), lock: Mutex::new(()) }
    }

    pub(super) fn grow(&self, rows: usize) {
        self.lists.grow(rows);
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[inline]
    fn read<R>(&self, id: BlockId, f: impl FnOnce(Option<&NameList>) -> R) -> R {
        let (part, at) = self.lists.locate(id.index());
        // SAFETY: compared with null only. Relaxed: a hint, as the word decides.
        if unsafe { part.0[at].load(Relaxed, epoch::unprotected()) }.is_null() {
            return f(None);
        }
        let guard = epoch::pin();
        // SAFETY: a replaced list is destroyed through the epoch collector, and we are pinned.
        // Acquire: pairs with the Release of the thread that published it.
        f(unsafe { part.0[at].load(Acquire, &guard).as_ref() }.map(|list| &**list))
    }

    /// `is_first`: the hash is the row's.
    #[inline]
    pub(super) fn has(&self, id: BlockId, is_first: bool, hash: BlockHash) -> bool {
        self.read(id, |list| match list {
            None => is_first,
            Some(list) => is_first && !list.is_first_gone || list.further.contains(&hash),
        })
    }

    pub(super) fn all(&self, id: BlockId, first: BlockHash) -> Vec<BlockHash> {
        self.read(id, |list| match list {
            None => vec![first],
            Some(list) => (!list.is_first_gone)
                .then_some(first)
                .into_iter()
                .chain(list.further.iter().copied())
                .collect(),
        })
    }

    /// Returns whether a block is known by its row's hash, and its further hashes.
    pub(super) fn parts(&self, id: BlockId) -> (bool, Vec<BlockHash>) {
        self.read(id, |list| {
            list.map_or((true, Vec::new()), |list| (!list.is_first_gone, list.further.clone()))
        })
    }

    /// Adds a hash, or the row's (`is_first`), under the lock. Returns false if the list was taken.
    pub(super) fn add(&self, id: BlockId, is_first: bool, hash: BlockHash) -> bool {
        self.change(id, |list| if is_first { list.is_first_gone = false } else { list.further.push(hash) })
    }

    /// Removes a hash; otherwise like [`add`](Self::add).
    pub(super) fn remove(&self, id: BlockId, is_first: bool, hash: BlockHash) -> bool {
        self.change(id, |list| {
            list.is_first_gone |= is_first;
            list.further.retain(|&other| other != hash);
        })
    }

    fn change(&self, id: BlockId, change: impl FnOnce(&mut NameList)) -> bool {
        let (part, at) = self.lists.locate(id.index());
        let guard = epoch::pin();
        let old = part.0[at].load(Acquire, &guard);
        // SAFETY: as in `read`. Acquire: as there.
        let mut list = unsafe { old.as_ref() }.map_or_else(NameList::default, |list| NameList::clone(list));
        change(&mut list);
        // Release: publishes the list. Acquire: continues the order of exchanges.
        let fresh = Owned::new(Frozen::new(list));
        let changed = part.0[at].compare_exchange(old, fresh, AcqRel, Relaxed, &guard);
        if changed.is_ok() && !old.is_null() {
            // SAFETY: unlinked by us, and replaced lists are not followed without a pin.
            unsafe { guard.defer_destroy(old) };
        }
        changed.is_ok()
    }

    /// Removes the list of a block that the caller evicted or uncached; returns its parts.
    pub(super) fn take(&self, id: BlockId) -> (bool, Vec<BlockHash>) {
        let (part, at) = self.lists.locate(id.index());
        // SAFETY: as in `read`.
        if unsafe { part.0[at].load(Relaxed, epoch::unprotected()) }.is_null() {
            return (true, Vec::new());
        }
        let guard = epoch::pin();
        // Acquire: as in `read`. Release: continues the order of exchanges.
        let old = part.0[at].swap(epoch::Shared::null(), AcqRel, &guard);
        // SAFETY: as in `read`.
        let Some(list) = (unsafe { old.as_ref() }) else { return (true, Vec::new()) };
        let taken = (!list.is_first_gone, list.further.clone());
        // SAFETY: as in `change`.
        unsafe { guard.defer_destroy(old) };
        taken
    }
}

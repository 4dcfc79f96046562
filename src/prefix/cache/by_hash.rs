//! Uncaching of blocks by their hashes, whatever their chain.
//!
//! A block is uncached under a reference, which a hit takes from the exact word under which its row
//! was read. If another thread hits, evicts or refills the block in between, the word has changed
//! and the thread retries: contents of another hash are never uncached.
//!
//! A block written before such a call, even in part, may be registered after it. So the cache keeps
//! the hashes with the call's number, and each sequence, batch and import records the number of the
//! last call before its blocks were written.
//!
//! ```text
//! uncache    remember the hashes;  fence;  uncache those that are cached;  remember them again
//! register   word: cached;  fence;  remembered since the blocks were written?  uncache it;  index
//! ```
//!
//! By the fences, the call sees the block cached, or the registration sees the call before a lookup
//! finds the block. The second number reveals hits of sequences opened during the call.
//!
//! The blocks behind an uncached one were computed from it. A sequence compares the hashes of its
//! whole chain before it notes a block, but has no part in the end of a batch to which it promised
//! one before the call. Such a batch, which does not know the chain, registers no block that it was
//! promised before the [newest call](Since::Checked). A sequence without uncached blocks registers
//! what is missing when it is closed.
//!
//! Models: `loom-tests/tests/evictable.rs`, `uncached.rs`.

use std::collections::{HashMap, HashSet};
use std::sync::PoisonError;

use crate::block::Core;
use crate::ids::BlockId;
use crate::sync::{AtomicU64, CachePadded, Mutex, Ordering::*, fence};

use super::{BlockHash, PrefixCache};

/// Number of remembered hashes. If there are more, those of earlier calls are dropped, and every
/// block written before counts as uncached.
const REMEMBERED_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 1 << 16 };

/// Numbers of blocks that were uncached by their hashes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct UncachedBlocks {
    /// Blocks that had no owners, and became free.
    pub evicted_blocks: usize,
    /// Blocks that their owners keep.
    pub kept_blocks: usize,
}

/// The newest call to uncache hashes that those who wrote blocks knew of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Since {
    /// When the blocks were written: later calls for their own hashes apply to them.
    Written(u64),
    /// When no block of their chains was uncached: later calls may apply to what they were computed
    /// from, so none of the blocks may be found. Their sequence can tell, and register them again.
    Checked(u64),
}

type Cached = (BlockId, BlockHash, u64);

#[derive(Default)]
pub(crate) struct UncachedHashes {
    newest: CachePadded<AtomicU64>,
    /// The newest call of each hash, and the newest call whose hashes were dropped.
    calls: Mutex<(HashMap<BlockHash, u64>, u64)>,
}

impl UncachedHashes {
    #[inline]
    pub(crate) fn newest(&self) -> u64 {
        // Relaxed: the hashes are read under the lock.
        self.newest.load(Relaxed)
    }

    fn remember(&self, hashes: &HashSet<BlockHash>) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let call = self.newest() + 1;
        let new = hashes.iter().filter(|&hash| !calls.0.contains_key(hash)).count();
        if calls.0.len() + new > REMEMBERED_MAX {
            *calls = (HashMap::new(), call - 1);
        }
        calls.0.extend(hashes.iter().map(|&hash| (hash, call)));
        self.newest.store(call, Relaxed);
    }

    /// Returns whether one of these hashes was uncached after the call `since`.
    #[cold]
    pub(crate) fn any_since(&self, since: u64, hashes: &[BlockHash]) -> bool {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = |hash| calls.0.get(hash).copied().unwrap_or(calls.1);
        hashes.iter().any(|hash| newest(hash) > since)
    }
}

impl PrefixCache {
    #[inline]
    pub(crate) fn uncached(&self) -> &UncachedHashes {
        &self.uncached
    }

    /// Returns what stands for an uncache call in the hashes of states: caches number their calls
    /// by themselves, so that of others, and of earlier processes, only checkpoints before the
    /// first call are found.
    pub(crate) fn salt_of(&self, call: u64) -> u64 {
        if call == 0 { 0 } else { self.number.wrapping_add(call) }
    }

    /// Returns whether a block is cached for the hash. Changes no recency.
    pub(crate) fn has(&self, core: &Core, hash: BlockHash) -> bool {
        self.has_in(core, hash, self.era())
    }

    pub(crate) fn has_in(&self, core: &Core, hash: BlockHash, era: u64) -> bool {
        self.count_prefix(core, &[hash], era).0 > 0
    }

    pub(crate) fn is_found(&self, core: &Core, id: BlockId) -> bool {
        core.word(id).is_cached() && self.row(id).is_of(self.era())
    }

    /// Uncaches all blocks of these hashes, including written ones that are registered later.
    pub(crate) fn uncache_hashes(&self, core: &Core, hashes: &[BlockHash]) -> UncachedBlocks {
        let (hashes, era) = (HashSet::from_iter(hashes.iter().copied()), self.era());
        self.uncached.remember(&hashes);
        // Pairs with the fences before `uncache_late`, after the exchange of a word or note.
        fence(SeqCst);
        let (ids, mut counts) = ((0..core.rows() as u32).map(BlockId), [0; 2]);
        for (id, hash) in ids.map(|id| (id, self.row(id).hash())).filter(|(_, hash)| hashes.contains(hash)) {
            let uncached = self.uncache_of(core, id, hash, era);
            uncached.into_iter().for_each(|is_evicted| counts[usize::from(is_evicted)] += 1);
        }
        self.uncached.remember(&hashes);
        UncachedBlocks { evicted_blocks: counts[1], kept_blocks: counts[0] }
    }

    /// Uncaches a block of this hash; returns whether it had no owner, `None` if not cached.
    fn uncache_of(&self, core: &Core, id: BlockId, hash: BlockHash, era: u64) -> Option<bool> {
        loop {
            let word = core.word(id);
            if !word.is_cached() || !self.holds(id, hash, era) {
                return None;
            }
            let hit = self.hit(core, (id, self.row(id), core.cell(id)), word, &hash, era);
            // A block with the maximum of references is kept by its owners without ours.
            if hit.is_some() || word.hit().is_none() {
                let is_uncached = core.uncache(id);
                if is_uncached {
                    self.forget_uncached(core, &[id]);
                    self.tallies.uncached.fetch_add(1, Relaxed);
                }
                hit.into_iter().for_each(|was_evictable| core.give_back_hit(id, was_evictable));
                return is_uncached.then_some(hit == Some(true));
            }
        }
    }

    /// Uncaches newly cached blocks to which a later call may apply. Follows a fence.
    #[inline]
    pub(super) fn uncache_late(&self, core: &Core, since: Since, blocks: impl Iterator<Item = Cached>) {
        let (Since::Written(call) | Since::Checked(call)) = since;
        if self.uncached.newest() != call {
            let applies = |hash| match since {
                Since::Written(call) => self.uncached.any_since(call, &[hash]),
                Since::Checked(_) => true,
            };
            for (id, hash, era) in blocks.filter(|&(_, hash, _)| applies(hash)) {
                self.uncache_of(core, id, hash, era);
            }
        }
    }
}

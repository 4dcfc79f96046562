//! Blocks by their hashes, apart from any chain: whether they are cached, and how they are dropped.
//!
//! A block is dropped by an eviction out of order, of the very word under which its row was read. If
//! another thread hits, evicts or refills it in between, the word has changed, and nothing happens:
//! contents of another hash are never dropped.
//!
//! Model: `loom-tests/tests/evictable.rs`.

use std::ops::ControlFlow;

use crate::block::{Core, Evictable};

use super::{BlockHash, PrefixCache, key_of};

/// Numbers of blocks that were evicted by their hashes, and of those that stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct DroppedBlocks {
    /// Blocks that were evicted.
    pub evicted_blocks: usize,
    /// Blocks that stay cached: they have owners, are being moved, or changed at that moment.
    pub kept_blocks: usize,
}

impl PrefixCache {
    /// Returns whether a block is cached for the hash. Takes nothing, and changes no recency.
    pub(crate) fn has(&self, core: &Core, hash: BlockHash) -> bool {
        self.count_prefix(core, &[hash], self.era()).0 > 0
    }

    /// Evicts the blocks that are cached for these hashes, except for those in use.
    pub(crate) fn evict_hashes(&self, core: &Core, hashes: &[BlockHash]) -> DroppedBlocks {
        let (era, mut found) = (self.era(), Vec::new());
        for &hash in hashes {
            self.index.find(key_of(hash), |id| {
                let word = core.word(id);
                if word.is_cached() && self.holds(id, hash, era) {
                    found.push(Evictable { id, word });
                }
                ControlFlow::<()>::Continue(())
            });
        }
        found.sort_unstable_by_key(|block| block.id);
        found.dedup_by_key(|block| block.id);
        let evicted_blocks = core.evict_unchanged(&found);
        DroppedBlocks { evicted_blocks, kept_blocks: found.len() - evicted_blocks }
    }
}

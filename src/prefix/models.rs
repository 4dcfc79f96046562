//! Access for the models, which play the part of sequences.

use crate::block::Blocks;
use crate::ids::{BlockHandle, BlockId};

use super::{BlockHash, ColdBlock, PrefixCache};

/// Notes the future contents of a block of a list.
pub fn note(cache: &PrefixCache, id: BlockId, hash: BlockHash) {
    cache.note(id, hash, cache.era(), 0, 0);
}

/// Notes the checksum of a noted block.
pub fn note_sum(cache: &PrefixCache, id: BlockId, sum: u64) {
    cache.note_sum(id, sum);
}

/// Returns the checksum of a block on which the caller has a reference.
pub fn sum(cache: &PrefixCache, id: BlockId) -> Option<u64> {
    cache.sum(id)
}

/// Registers a noted block.
pub fn register(cache: &PrefixCache, blocks: &Blocks, handle: BlockHandle) {
    cache.register(blocks, [(handle, None)]);
}

/// Takes a reference, for a list, on a block that holds `hash`.
pub fn take(cache: &PrefixCache, blocks: &Blocks, hash: BlockHash) -> Option<BlockId> {
    cache.take(blocks, hash, cache.era())
}

/// ColdBlock blocks held for copying.
pub struct ColdBlocks(Vec<ColdBlock>);

/// Takes up to `wanted` of the coldest blocks.
pub fn take_coldest(cache: &PrefixCache, blocks: &Blocks, wanted: usize) -> ColdBlocks {
    ColdBlocks(cache.take_coldest(blocks, wanted))
}

impl ColdBlocks {
    /// Returns their ids.
    pub fn blocks(&self) -> Vec<BlockId> {
        self.0.iter().map(|cold| cold.id).collect()
    }

    /// Keeps them cached.
    pub fn put_back(self, cache: &PrefixCache, blocks: &Blocks) {
        cache.put_back(blocks, &self.0);
    }

    /// Gives them up after copying; returns the number evicted at once.
    pub fn give_up(self, cache: &PrefixCache, blocks: &Blocks) -> usize {
        cache.give_up(blocks, &self.0).0
    }
}

/// Evicts the block that holds `hash`, if it has no owner; returns whether it did.
pub fn evict_hash(cache: &PrefixCache, blocks: &Blocks, hash: BlockHash) -> bool {
    cache.evict_hashes(blocks, &[hash]).evicted_blocks > 0
}

/// Begins a new era.
pub fn clear(cache: &PrefixCache, blocks: &Blocks) {
    cache.clear(blocks);
}

/// Returns the cached blocks.
pub fn cached_blocks(cache: &PrefixCache, blocks: &Blocks) -> Vec<(BlockId, BlockHash)> {
    cache.cached_blocks(blocks)
}

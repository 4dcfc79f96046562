//! Doors for the models, which play what sequences do with the cache.

use crate::block::Blocks;
use crate::ids::{BlockHandle, BlockId};

use super::{BlockHash, Cold, PrefixCache};

/// Notes what a block of a list will hold.
pub fn note(cache: &PrefixCache, id: BlockId, hash: BlockHash) {
    cache.note(id, hash, cache.era(), 0);
}

/// Registers a block that was noted.
pub fn register(cache: &PrefixCache, blocks: &Blocks, handle: BlockHandle) {
    cache.register(blocks, [(handle, None)]);
}

/// A reference, for a list, on a block that holds `hash`.
pub fn take(cache: &PrefixCache, blocks: &Blocks, hash: BlockHash) -> Option<BlockId> {
    cache.take(blocks, hash, cache.era())
}

/// Evictable blocks that are held to be copied elsewhere.
pub struct Taken(Vec<Cold>);

/// Takes up to so many of the coldest.
pub fn take_coldest(cache: &PrefixCache, blocks: &Blocks, wanted: usize) -> Taken {
    Taken(cache.take_coldest(blocks, wanted))
}

impl Taken {
    /// Which they are.
    pub fn blocks(&self) -> Vec<BlockId> {
        self.0.iter().map(|cold| cold.id).collect()
    }

    /// They stay.
    pub fn put_back(self, cache: &PrefixCache, blocks: &Blocks) {
        cache.put_back(blocks, &self.0);
    }

    /// They are elsewhere, and may go here. How many were evicted at once.
    pub fn give_up(self, cache: &PrefixCache, blocks: &Blocks) -> usize {
        cache.give_up(blocks, &self.0).0
    }
}

/// Begins another era.
pub fn clear(cache: &PrefixCache, blocks: &Blocks) {
    cache.clear(blocks);
}

/// Blocks that are cached.
pub fn cached_blocks(cache: &PrefixCache, blocks: &Blocks) -> Vec<(BlockId, BlockHash)> {
    cache.cached_blocks(blocks)
}

//! Doors for the models, which play what sequences do with the cache.

use crate::block::Blocks;
use crate::ids::{BlockHandle, BlockId};

use super::{BlockHash, Cache};

/// Notes what a block of a list will hold.
pub fn note(cache: &Cache, id: BlockId, hash: BlockHash) {
    cache.note(id, hash, cache.era(), 0);
}

/// Registers a block that was noted.
pub fn register(cache: &Cache, blocks: &Blocks, handle: BlockHandle) {
    cache.register(blocks, [(handle, None)]);
}

/// A reference, for a list, on a block that holds `hash`.
pub fn take(cache: &Cache, blocks: &Blocks, hash: BlockHash) -> Option<BlockId> {
    cache.take(blocks, hash, cache.era())
}

/// Begins another era.
pub fn clear(cache: &Cache, blocks: &Blocks) {
    cache.clear(blocks);
}

/// Blocks that are cached.
pub fn cached_blocks(cache: &Cache, blocks: &Blocks) -> Vec<(BlockId, BlockHash)> {
    cache.cached_blocks(blocks)
}

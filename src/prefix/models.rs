//! Access for the models, which play the part of sequences.

use std::sync::Arc;

use crate::block::{Blocks, GrowTable, Tenants};
use crate::ids::{BlockHandle, BlockId};

use super::policy::{CachePriority, Millis, Place, Policy};
use super::queues::{Queues, row};
use super::row::RowPart;
use super::{BlockHash, ColdBlock, PrefixCache, Retention, Since, UncachedBlocks};

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

/// Registers a noted block, which is written now.
pub fn register(cache: &PrefixCache, blocks: &Blocks, handle: BlockHandle) {
    register_since(cache, blocks, newest_uncached(cache), handle);
}

/// Registers a noted block that was written when this call was the newest to uncache hashes.
pub fn register_since(cache: &PrefixCache, blocks: &Blocks, since: u64, handle: BlockHandle) {
    cache.register(blocks, Since::Written(since), [(handle, None)]);
}

/// Registers a noted chain, of which no block was uncached when this call was the newest.
pub fn register_chain(cache: &PrefixCache, blocks: &Blocks, since: u64, chain: &[BlockHandle]) {
    cache.register(blocks, Since::Checked(since), chain.iter().map(|&handle| (handle, None)));
}

/// Takes the note of a block of a list back.
pub fn unnote(cache: &PrefixCache, blocks: &Blocks, id: BlockId) {
    cache.unnote(blocks, id);
}

/// Returns the number of the newest call that uncached hashes.
pub fn newest_uncached(cache: &PrefixCache) -> u64 {
    cache.uncached().newest()
}

/// Takes a reference, for a list, on a block that holds `hash`.
pub fn take(cache: &PrefixCache, blocks: &Blocks, hash: BlockHash) -> Option<BlockId> {
    cache.take(blocks, hash, cache.era())
}

/// Cold blocks held for copying.
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

/// Adds queues of tenants to a new cache.
pub fn with_tenants(cache: PrefixCache, blocks: usize, tenants: crate::sync::Arc<Tenants>) -> PrefixCache {
    cache.with_tenants(blocks, blocks, tenants)
}

/// Makes the evictable blocks that hold `hash` evict-first.
pub fn demote(cache: &PrefixCache, blocks: &Blocks, hash: BlockHash) {
    cache.demote(blocks, &[hash], cache.era(), |_, _| false);
}

/// Retains the evictable blocks that hold these hashes until a time of the cache's clock.
pub fn retain(cache: &PrefixCache, blocks: &Blocks, hashes: &[BlockHash], until: Millis) {
    let retention = Retention { until, priority: CachePriority::Normal, is_pinned: false };
    cache.retain(blocks, hashes, cache.era(), retention, |_, _, _| true);
}

/// Uncaches the blocks that hold `hash`; returns how many.
pub fn uncache(cache: &PrefixCache, blocks: &Blocks, hash: BlockHash) -> UncachedBlocks {
    cache.uncache_hashes(blocks, &[hash])
}

/// Begins a new era.
pub fn clear(cache: &PrefixCache) {
    cache.clear();
}

/// Returns the cached blocks.
pub fn cached_blocks(cache: &PrefixCache, blocks: &Blocks) -> Vec<(BlockId, BlockHash)> {
    cache.cached_blocks(blocks).into_iter().map(|(id, hash, _)| (id, hash)).collect()
}

/// The eviction queues alone, with the rows of their blocks.
pub struct EnqueuedBlocks {
    rows: GrowTable<RowPart>,
    queues: Queues,
    policy: Arc<dyn Policy>,
}

impl EnqueuedBlocks {
    /// Creates empty queues of a policy for `blocks` blocks.
    pub fn new(blocks: usize, policy: Arc<dyn Policy>) -> Self {
        Self { rows: GrowTable::new(blocks), queues: Queues::new(policy.queues(), blocks, Millis(0)), policy }
    }

    /// Enqueues blocks that the caller holds; consecutive ranks of a queue form one entry.
    pub fn enqueue(&self, blocks: &[(BlockId, Place)]) {
        for &(id, Place { queue, rank, state }) in blocks {
            row(&self.rows, id).set_place(usize::from(queue), rank, state);
        }
        self.queues.enqueue(&self.rows, blocks.iter().map(|&(id, _)| id));
    }

    /// Takes the blocks of the entry that the policy evicts next.
    pub fn take(&self) -> Vec<BlockId> {
        let entry = self.queues.take(&self.rows, &*self.policy, 0, 0, || Millis(0));
        let (mut blocks, mut next) = (Vec::new(), entry.map(|entry| entry.first));
        while let (Some(id), Some(entry)) = (next, entry) {
            next = self.queues.below(&self.rows, entry.queue, id);
            self.queues.enqueued(&self.rows, entry.queue, id).dequeue();
            blocks.push(id);
        }
        blocks
    }
}

//! A pool with a prefix cache, whose blocks are in lists and have cells that stand for their bytes.

use std::ops::Deref;

use kvpool::block::{AllocRequest, Blocks, BlocksConfig, Tenant, Tenants, models};
use kvpool::prefix::policy::Millis;
use kvpool::prefix::{self, BlockHash, HashKey, PrefixCache, PrefixConfig};
use kvpool::{BlockId, DeviceId, FrameId, TenantId};
use loom::sync::Arc;

use crate::TouchedBlocks;

/// A pool with a prefix cache, and a cell for each frame that stands for its bytes.
pub struct CachedBlocks {
    touched: Arc<TouchedBlocks>,
    /// The cache under test.
    pub cache: Arc<PrefixCache>,
}

impl Deref for CachedBlocks {
    type Target = TouchedBlocks;

    fn deref(&self) -> &TouchedBlocks {
        &self.touched
    }
}

impl CachedBlocks {
    /// Creates a pool of `blocks` blocks, without a null block and without magazines.
    pub fn new(blocks: usize) -> Arc<Self> {
        Self::of(blocks, PrefixConfig::new())
    }

    /// Creates such a pool with room for `events` events.
    pub fn with_events(blocks: usize, events: usize) -> Arc<Self> {
        Self::of(blocks, PrefixConfig::new().events(events))
    }

    /// Creates a pool with tenants 0, 1 .. of these quotas and floors.
    pub fn with_tenants(blocks: usize, limits: &[(Option<usize>, usize)]) -> Arc<Self> {
        let tenants = Arc::new(Tenants::new(blocks));
        for (id, &(quota, floor)) in limits.iter().enumerate() {
            tenants.set(TenantId(id as u64), quota, floor, blocks).unwrap();
        }
        Self::built(blocks, PrefixConfig::new(), Some(tenants))
    }

    fn of(blocks: usize, prefix: PrefixConfig) -> Arc<Self> {
        Self::built(blocks, prefix, None)
    }

    fn built(blocks: usize, prefix: PrefixConfig, tenants: Option<Arc<Tenants>>) -> Arc<Self> {
        let config = BlocksConfig {
            frames: blocks,
            frames_max: blocks,
            segment_frames: 8,
            magazine_blocks: 0,
            threads: 2,
            has_null_block: false,
            reserve: 0,
            run_frames: 0,
            device: DeviceId::Host,
        };
        let key = prefix.key(HashKey::from_bytes([7; 32]));
        let cache = PrefixCache::new(blocks, blocks, 1, key).unwrap();
        let cache = match &tenants {
            Some(tenants) => prefix::models::with_tenants(cache, blocks, tenants.clone()),
            None => cache,
        };
        let cache = Arc::new(cache);
        let blocks = Blocks::with_tenants(config, None, Some(Box::new(cache.clone())), tenants);
        Arc::new(Self { touched: TouchedBlocks::around(blocks), cache })
    }

    /// Returns the `n`th hash.
    pub fn hash(n: u64) -> BlockHash {
        BlockHash::new(u128::from(n) << 64 | u128::from(n) << 7 | 1, n + 100)
    }

    /// Allocates a block into a list, writes it, and registers it under the `n`th hash.
    pub fn fill(&self, n: u64) -> BlockId {
        let id = self.take_listed().expect("a block is free");
        self.register(id, n);
        id
    }

    /// Registers a block of a list under the `n`th hash.
    pub fn register(&self, id: BlockId, n: u64) {
        prefix::models::note(&self.cache, id, Self::hash(n));
        prefix::models::register(&self.cache, &self.blocks, self.blocks.handle(id));
    }

    /// Registers a block of a list, whose bytes arrived with a checksum, under the `n`th hash.
    pub fn arrive(&self, id: BlockId, n: u64, sum: u64) {
        prefix::models::note(&self.cache, id, Self::hash(n));
        prefix::models::note_sum(&self.cache, id, sum);
        prefix::models::register(&self.cache, &self.blocks, self.blocks.handle(id));
    }

    /// Returns the checksum of a block of a list.
    pub fn sum(&self, id: BlockId) -> Option<u64> {
        prefix::models::sum(&self.cache, id)
    }

    /// Allocates a block into a list, and writes it.
    pub fn take_listed(&self) -> Option<BlockId> {
        let id = models::allocate_listed(&self.blocks, &AllocRequest::new(1))?;
        self.write(id);
        Some(id)
    }

    /// Takes a reference to the block cached under the `n`th hash, if there is one at this moment.
    pub fn hit(&self, n: u64) -> Option<BlockId> {
        prefix::models::take(&self.cache, &self.blocks, Self::hash(n))
    }

    /// Removes a block from a list: releases one reference.
    pub fn leave(&self, id: BlockId) {
        models::release_listed(&self.blocks, &[id]);
    }

    /// Removes blocks from a list together.
    pub fn leave_all(&self, ids: &[BlockId]) {
        models::release_listed(&self.blocks, ids);
    }

    /// Makes the blocks of the `n`th hash evict-first.
    pub fn demote(&self, n: u64) {
        prefix::models::demote(&self.cache, &self.blocks, Self::hash(n));
    }

    /// Retains the blocks of these hashes: forever, or until a time that has come.
    pub fn retain(&self, hashes: &[u64], forever: bool) {
        let hashes: Vec<_> = hashes.iter().map(|&n| Self::hash(n)).collect();
        let until = Millis(if forever { u64::MAX } else { 0 });
        prefix::models::retain(&self.cache, &self.blocks, &hashes, until);
    }

    /// Ends a model: evictions in order find this many blocks, without a walk.
    pub fn finish_in_order(&self, evictable: usize) {
        let found = (0..self.blocks.total()).take_while(|_| self.evict()).count();
        assert_eq!(found, evictable, "blocks in no queue and no run");
        self.finish();
    }

    /// Creates an evictable block.
    pub fn keep(&self, n: u64) -> BlockId {
        let id = self.fill(n);
        self.leave(id);
        assert!(self.blocks.word(id).is_evictable());
        id
    }

    /// Evicts a block, writes its frame and frees it, if there is one to evict.
    pub fn evict(&self) -> bool {
        models::evict(&self.blocks, |frame| self.write_frame(frame))
    }

    /// Evicts a block, and takes the one at its frame into a list, if there is one to evict.
    pub fn replace(&self) -> Option<BlockId> {
        models::replace(&self.blocks).inspect(|&id| self.write(id))
    }

    /// Allocates a block into a list of the `n`th tenant, and writes it.
    pub fn take_for(&self, n: u64) -> Option<BlockId> {
        models::allocate_for(&self.blocks, self.tenant(n)).inspect(|&id| self.write(id))
    }

    /// Creates an evictable block of a tenant.
    pub fn keep_for(&self, tenant: u64, n: u64) -> BlockId {
        let id = self.take_for(tenant).expect("a block is free");
        self.register(id, n);
        self.leave(id);
        id
    }

    /// Returns the numbers of blocks that a tenant holds, and of the cached ones of them.
    pub fn holds(&self, n: u64) -> (u64, u64) {
        models::holds(&self.blocks, self.tenant(n))
    }

    fn tenant(&self, n: u64) -> Tenant {
        self.blocks.tenants().and_then(|tenants| tenants.find(TenantId(n))).expect("a tenant of the pool")
    }

    /// Like [`finish`](Self::finish), without the floors of `tenants` tenants.
    pub fn finish_tenants(&self, tenants: u64) {
        self.blocks.audit().unwrap();
        for n in 0..tenants {
            self.blocks.tenants().unwrap().set(TenantId(n), None, 0, self.blocks.total()).unwrap();
        }
        self.finish();
    }

    /// Returns whether a block is evictable, and no batch in flight sees it.
    pub fn can_evict(&self, id: BlockId) -> bool {
        models::can_evict(&self.blocks, id)
    }

    /// Returns the current frame of a block.
    pub fn frame(&self, id: BlockId) -> FrameId {
        self.blocks.frame(id)
    }

    /// Ends a model: no block is owned, the evictable ones are counted, and every block can be
    /// allocated.
    pub fn finish(&self) {
        crate::conclude(&self.blocks);
        let report = self.blocks.audit().unwrap();
        assert_eq!((report.owned, report.held), (0, 0), "leaked: {report:?}");
        assert_eq!(self.blocks.counted_references(), 0, "lists count out what they took");
        let total = self.blocks.total();
        assert_eq!(self.blocks.counts().free() + self.blocks.evictable(), total, "{report:?}");
        let all = self.take(total).expect("every evictable block can be allocated");
        self.put(&all);
    }
}

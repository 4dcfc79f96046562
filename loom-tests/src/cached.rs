//! A pool with a prefix cache, whose blocks are in lists, and whose bytes are touched.

use std::ops::Deref;

use kvpool::block::{AllocRequest, Blocks, BlocksConfig, models};
use kvpool::ids::{BlockId, DeviceId, FrameId};
use kvpool::prefix::{self, BlockHash, HashKey, PrefixCache, PrefixConfig};
use loom::sync::Arc;

use crate::TouchedBlocks;

/// See the [module](self).
pub struct CachedBlocks {
    touched: Arc<TouchedBlocks>,
    /// The cache.
    pub cache: Arc<PrefixCache>,
}

impl Deref for CachedBlocks {
    type Target = TouchedBlocks;

    fn deref(&self) -> &TouchedBlocks {
        &self.touched
    }
}

impl CachedBlocks {
    /// So many blocks, none of them null, without magazines.
    pub fn new(blocks: usize) -> Arc<Self> {
        Self::of(blocks, PrefixConfig::new())
    }

    /// The same, with room for so many events.
    pub fn with_events(blocks: usize, events: usize) -> Arc<Self> {
        Self::of(blocks, PrefixConfig::new().events(events))
    }

    fn of(blocks: usize, prefix: PrefixConfig) -> Arc<Self> {
        let config = BlocksConfig {
            frames: blocks,
            frames_max: blocks,
            segment_frames: 8,
            magazine_blocks: 0,
            threads: 2,
            has_null_block: false,
            reserve: 0,
            device: DeviceId::Host,
        };
        let key = prefix.key(HashKey::from_bytes([7; 32]));
        let cache = Arc::new(PrefixCache::new(blocks, blocks, 1, key).unwrap());
        let blocks = Blocks::with_evictor(config, None, Some(Box::new(cache.clone())));
        Arc::new(Self { touched: TouchedBlocks::around(blocks), cache })
    }

    /// The `n`th hash.
    pub fn hash(n: u64) -> BlockHash {
        BlockHash::new(u128::from(n) << 64 | u128::from(n) << 7 | 1, n + 100)
    }

    /// Takes a block into a list, writes it, and registers it under the `n`th hash.
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

    /// Takes a block into a list, and writes it.
    pub fn take_listed(&self) -> Option<BlockId> {
        let id = models::allocate_listed(&self.blocks, &AllocRequest::new(1))?;
        self.write(id);
        Some(id)
    }

    /// A reference on a block that is cached under the `n`th hash, as of this moment.
    pub fn hit(&self, n: u64) -> Option<BlockId> {
        prefix::models::take(&self.cache, &self.blocks, Self::hash(n))
    }

    /// Leaves a list: one reference less.
    pub fn leave(&self, id: BlockId) {
        models::release_listed(&self.blocks, &[id]);
    }

    /// A block that is evictable.
    pub fn keep(&self, n: u64) -> BlockId {
        let id = self.fill(n);
        self.leave(id);
        assert!(self.blocks.word(id).is_evictable());
        id
    }

    /// Evicts a block, writes its frame and frees it, if there is one to be evicted.
    pub fn evict(&self) -> bool {
        models::evict(&self.blocks, |frame| self.write_frame(frame))
    }

    /// Evicts a block, and takes the one at its frame into a list, if there is one to be evicted.
    pub fn replace(&self) -> Option<BlockId> {
        models::replace(&self.blocks).inspect(|&id| self.write(id))
    }

    /// Where a block is now.
    pub fn frame(&self, id: BlockId) -> FrameId {
        self.blocks.frame(id)
    }

    /// The end of every model: nothing is owned, what is evictable is counted, and everything can be had.
    pub fn finish(&self) {
        crate::settle(&self.blocks, 1);
        let report = self.blocks.audit().unwrap();
        assert_eq!((report.owned, report.held), (0, 0), "leaked: {report:?}");
        let total = self.blocks.total();
        assert_eq!(self.blocks.counts().free() + self.blocks.evictable(), total, "{report:?}");
        let all = self.take(total).expect("every evictable block can be had");
        self.put(&all);
    }
}

//! The builder of a frame pool.

use crate::block::{Blocks, BlocksConfig, Evictor};
use crate::error::PrefixError;
use crate::ids::Order;
use crate::pool::builder::{BuildError, PoolBuilder};
use crate::prefix::{HashKey, PrefixCache, PrefixConfig};
use crate::storage::KvLayout;
use crate::sync::Arc;

use super::frame_pool::FramePool;

/// Builds a [`FramePool`].
#[must_use]
pub struct FramePoolBuilder {
    /// Shape and checks are those of any pool; the layout is not used, because the pool has no
    /// bytes.
    shape: PoolBuilder,
    config: PrefixConfig,
    order: Order,
}

impl FramePool {
    /// Returns a builder of a pool of `frames` frames, and one more for the null block.
    pub fn builder(frames: usize) -> FramePoolBuilder {
        let layout = KvLayout::named("tiny").expect("a layout of this crate");
        FramePoolBuilder {
            shape: PoolBuilder::new(layout).blocks(frames).without_storage(),
            config: PrefixConfig::new(),
            order: Order(crate::config::FRAGMENTATION_ORDER),
        }
    }
}

impl FramePoolBuilder {
    /// Sets the number of frames, without the null block's, up to which the pool may
    /// [grow](FramePool::grow). Without it, the pool grows only to its first size, after a shrink.
    pub fn frames_max(mut self, frames: usize) -> Self {
        self.shape = self.shape.blocks_max(frames);
        self
    }

    /// Sets the number of frames per segment: a power of two, at least 64; 4096 by default.
    pub fn segment_frames(mut self, frames: usize) -> Self {
        self.shape = self.shape.segment_blocks(frames);
        self
    }

    /// Sets the number of frames per magazine: at most 64; 0 disables magazines, and evictions
    /// ahead of need.
    pub fn magazine_frames(mut self, frames: usize) -> Self {
        self.shape = self.shape.magazine_blocks(frames);
        self
    }

    /// Sets the expected number of allocating threads. The default is the number of CPUs.
    pub fn threads(mut self, threads: usize) -> Self {
        self.shape = self.shape.threads(threads);
        self
    }

    /// Builds the pool without a null block: frame 0 is allocated like any other.
    ///
    /// With it, frame 0 is never allocated, and calls that name it are refused.
    pub fn without_null_block(mut self) -> Self {
        self.shape = self.shape.without_null_block();
        self
    }

    /// Sets the order of the free runs that [moves](FramePool::propose_moves) gain, and at which
    /// fragmentation is reported; 4 by default, which is runs of 16.
    pub fn fragmentation_order(mut self, order: Order) -> Self {
        self.shape = self.shape.fragmentation_order(order);
        self.order = order;
        self
    }

    /// Sets the key by which foreign hashes become [keys](FramePool::key) of this pool. By default,
    /// it is drawn at random.
    pub fn hash_key(mut self, key: HashKey) -> Self {
        self.config = self.config.key(key);
        self
    }

    /// Sets the capacity of the [event queue](FramePool::events).
    pub fn events(mut self, capacity: usize) -> Self {
        self.config = self.config.events(capacity);
        self
    }

    /// Builds the pool.
    ///
    /// # Errors
    ///
    /// [`BuildError`]; no resource is kept.
    pub fn build(self) -> Result<FramePool, BuildError> {
        let Self { shape, config, order } = self;
        let shape = shape.check()?;
        let cache = cache_of(&shape, config)?;
        let evictor = Box::new(cache.clone()) as Box<dyn Evictor>;
        Ok(FramePool::new(Blocks::with_evictor(shape, None, Some(evictor)), cache, order))
    }
}

/// A function of its own: the stacks of a model checker have no room for both, the cache and the
/// pool, while they are built.
#[inline(never)]
fn cache_of(shape: &BlocksConfig, config: PrefixConfig) -> Result<Arc<PrefixCache>, PrefixError> {
    Ok(Arc::new(PrefixCache::foreign(shape.frames, shape.frames_max, config)?))
}

use crate::block::{Blocks, BlocksConfig, Evictor};
use crate::error::PrefixError;
use crate::ids::{DeviceId, Order};
use crate::pool::build_error::BuildError;
use crate::pool::shape::Shape;
use crate::prefix::{HashKey, PrefixCache, PrefixConfig};
use crate::sync::Arc;

use super::frame_pool::FramePool;

/// Builds a [`FramePool`].
#[must_use]
pub struct FramePoolBuilder {
    frames: usize,
    shape: Shape,
    config: PrefixConfig,
}

impl FramePool {
    /// Returns a builder of a pool of `frames` frames plus the null block.
    pub fn builder(frames: usize) -> FramePoolBuilder {
        FramePoolBuilder { frames, shape: Shape::default(), config: PrefixConfig::new() }
    }
}

impl FramePoolBuilder {
    /// Sets the number of frames, without the null block's, up to which the pool may
    /// [grow](FramePool::grow); by default its initial size.
    pub fn frames_max(mut self, frames: usize) -> Self {
        self.shape.blocks_max = Some(frames);
        self
    }

    /// Sets the number of frames per segment: a power of two, at least 64; 4096 by default.
    pub fn segment_frames(mut self, frames: usize) -> Self {
        self.shape.segment_blocks = frames;
        self
    }

    /// Sets the number of frames per magazine: at most 64; 0 disables magazines and evictions ahead
    /// of need.
    pub fn magazine_frames(mut self, frames: usize) -> Self {
        self.shape.magazine_blocks = Some(frames);
        self
    }

    /// Sets the expected number of allocating threads. The default is the number of CPUs.
    pub fn threads(mut self, threads: usize) -> Self {
        self.shape.threads = Some(threads);
        self
    }

    /// Builds the pool without a null block: frame 0 is allocated like any other.
    pub fn without_null_block(mut self) -> Self {
        self.shape.has_null_block = false;
        self
    }

    /// Sets the order of the free runs that [moves](FramePool::propose_moves) create, and at which
    /// fragmentation is reported; 4 by default, which is runs of 16.
    pub fn fragmentation_order(mut self, order: Order) -> Self {
        self.shape.order = order;
        self
    }

    /// Sets the key that derives [keys](FramePool::key) from foreign hashes; random by default.
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
    pub fn build(self) -> Result<FramePool, BuildError> {
        let Self { frames, shape, config } = self;
        let blocks = shape.check(frames, DeviceId::Host)?;
        let cache = cache_of(&blocks, config)?;
        let evictor = Box::new(cache.clone()) as Box<dyn Evictor>;
        Ok(FramePool::new(Blocks::with_evictor(blocks, None, Some(evictor)), cache, shape.order))
    }
}

/// Apart from `build`: loom's small stacks have no room for both.
#[inline(never)]
fn cache_of(shape: &BlocksConfig, config: PrefixConfig) -> Result<Arc<PrefixCache>, PrefixError> {
    Ok(Arc::new(PrefixCache::foreign(shape.frames, shape.frames_max, config)?))
}

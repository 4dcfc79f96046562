//! Growth, and shrinking in two steps, while the pool serves.
//!
//! ```text
//! begin     the frames beyond the new end are closed to allocation, and collected where they are free
//! move      as often as the engine likes: cached frames without references, to free frames below   `moves`
//! finish    no frame there has references: the rest of the cache there is evicted, and the pool is smaller
//! or drop   the pool is as before
//! ```
//!
//! A frame with references stays in place until the engine frees it. Nothing here waits: an engine
//! knows its requests, and when to try again.

use crate::block::Shrinking;
use crate::compact::Goal;
use crate::error::{FrameShrinkError, GrowError, ShrinkError};
use crate::ids::{FrameId, Run};

use super::frame_pool::{FramePool, Shared};
use super::moves::FrameMoves;

/// A shrink in progress: the frames beyond the new end are not allocated. Dropping it keeps the
/// pool's size.
#[must_use = "dropping it keeps the pool's size"]
#[derive(Debug)]
pub struct FrameShrink {
    pool: FramePool,
    shrinking: Shrinking,
}

impl FramePool {
    /// Adds `frames` frames while the pool serves.
    pub fn grow(&self, frames: usize) -> Result<(), GrowError> {
        self.0.blocks.grow(frames, &mut |_| Ok(()))
    }

    /// Begins to shrink the pool to `frames` frames, without the null block's. Allocations avoid
    /// the frames beyond the new end, whose contents can still be found and shared.
    ///
    /// ```
    /// # use kvpool::{AllocRequest, FrameGroup, FramePool, FrameShrinkError};
    /// let pool = FramePool::builder(256).build()?;
    /// let mut table = Vec::new();
    /// pool.allocate(AllocRequest::new(256), &mut table)?;
    /// let key = pool.key(FrameGroup(0), b"hash")?;
    /// pool.register(&[(table[255], key)])?;
    /// pool.free(&table[1..])?; // The last one is cached, the others but the first are free.
    ///
    /// let shrink = pool.begin_shrink(128)?;
    /// let moves = shrink.propose_moves(usize::MAX);
    /// for (from, to) in moves.pairs() {
    ///     // The engine copies the bytes of frame `from` to frame `to`.
    ///     assert!(from > 128 && to <= 128);
    /// }
    /// moves.commit();
    /// shrink.finish()?;
    /// assert_eq!(pool.frames(), 129, "with the null block's");
    /// assert!(pool.cached(key)?.is_some_and(|frame| frame <= 128));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Fails if the size is zero or not below the current one, or another shrink is open.
    pub fn begin_shrink(&self, frames: usize) -> Result<FrameShrink, ShrinkError> {
        let mut shrinking = self.0.blocks.begin_shrink(frames)?;
        shrinking.collect();
        Ok(FrameShrink { pool: self.clone(), shrinking })
    }

    /// Shrinks the pool to `frames` frames, without the null block's, immediately, and evicts
    /// cached frames beyond the new end, which [`begin_shrink`](Self::begin_shrink) lets the engine
    /// move.
    pub fn shrink(&self, frames: usize) -> Result<(), FrameShrinkError> {
        self.begin_shrink(frames)?.finish()
    }
}

impl FrameShrink {
    /// Returns the frames to be removed.
    pub fn region(&self) -> Run {
        self.shrinking.region()
    }

    /// Returns the frames to be removed that have references, in ascending order.
    pub fn in_use(&self) -> Vec<FrameId> {
        let blocks = &self.pool.0.blocks;
        let is_owned = |&frame: &FrameId| {
            let word = blocks.frame_word(frame);
            word.is_owned() && word.frame() == frame
        };
        self.region().frames().filter(is_owned).collect()
    }

    /// Proposes at most `moves_max` moves of cached frames out of the frames to be removed, to be
    /// [committed](FrameMoves::commit) before [`finish`](Self::finish). First evicts as many cached
    /// frames, in eviction order, as do not fit into the smaller pool.
    pub fn propose_moves(&self, moves_max: usize) -> FrameMoves {
        let Shared { blocks, .. } = &*self.pool.0;
        let counts = blocks.recount();
        let room = counts.total.saturating_sub(self.region().len as usize);
        let stay = counts.used().saturating_sub(self.in_use().len());
        blocks.evict_free((stay + counts.evictable).saturating_sub(room));
        self.pool.propose_moves(Goal::Empty { region: self.region() }, moves_max)
    }

    /// Removes the frames, and evicts cached ones among them.
    ///
    /// # Errors
    /// [`FrameShrinkError::NotFree`] counts the frames that a batch in flight may see, or that are
    /// in uncommitted moves. The pool keeps its size, and its cache unless another thread
    /// interferes.
    pub fn finish(mut self) -> Result<(), FrameShrinkError> {
        let (region, blocks) = (self.region(), &self.pool.0.blocks);
        // Before anything is evicted.
        self.check_unused()?;
        let not_free = self.shrinking.collect().saturating_sub(blocks.evictable_in(region));
        if not_free > 0 {
            return Err(FrameShrinkError::NotFree { frames: not_free });
        }
        blocks.evict_region(region);
        let missing = self.shrinking.collect();
        if missing > 0 {
            self.check_unused()?;
            return Err(FrameShrinkError::NotFree { frames: missing });
        }
        self.shrinking.commit(|_| ()).map_err(|open| FrameShrinkError::NotFree { frames: open.remaining() })
    }

    fn check_unused(&self) -> Result<(), FrameShrinkError> {
        let frames = self.in_use();
        if frames.is_empty() { Ok(()) } else { Err(FrameShrinkError::InUse { frames }) }
    }
}

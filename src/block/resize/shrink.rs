//! Shrinking: the frames above the new end are collected one by one, then removed together.
//!
//! ```text
//! begin_shrink ── collect ── (a compactor moves blocks out of the region) ── collect ── ... ── commit
//!                                                                                  └─ drop: all of it back
//! ```
//!
//! | number | meaning |
//! |---|---|
//! | `total` | current number of frames |
//! | `rows` | highest number of frames so far: rows of the table, and ids that handles may name |
//! | `held` | frames below `total` that are held, by this shrink or as the destination of a move |
//!
//! A block keeps its id, which may be beyond the last frame. The block in a removed frame is free
//! and held until growth returns the frame. `collect` never waits: frames that are owned, retired,
//! or in a magazine in use count as missing.

use crate::error::ShrinkError;
use crate::frame::Shrink;
use crate::ids::Run;
use crate::sync::Ordering::*;

use crate::block::core::Blocks;

/// A shrink in progress. Dropping it returns its frames.
#[must_use = "dropping it abandons the shrink"]
pub struct Shrinking {
    blocks: Blocks,
    shrink: Option<Shrink>,
}

impl Blocks {
    /// Begins a shrink to `blocks` blocks, excluding the null block. The caller
    /// [collects](Shrinking::collect) free frames, and moves owned blocks elsewhere.
    pub fn begin_shrink(&self, blocks: usize) -> Result<Shrinking, ShrinkError> {
        let min = self.space.reserve.mark() + 1;
        if blocks < min {
            return Err(ShrinkError::TooFew { asked: blocks, min });
        }
        let null = self.config.has_null_block as usize;
        let shrink =
            self.space.frames.begin_shrink(blocks.saturating_add(null)).map_err(|error| match error {
                // In blocks, like the caller's arguments.
                ShrinkError::NotSmaller { total, .. } => {
                    ShrinkError::NotSmaller { asked: blocks, total: total - null }
                }
                other => other,
            })?;
        Ok(Shrinking { blocks: self.clone(), shrink: Some(shrink) })
    }
}

impl Shrinking {
    /// Returns the frames to be removed.
    pub fn region(&self) -> Run {
        self.open().region()
    }

    /// Returns the number of frames that are not collected: owned, retired, or in magazines.
    pub fn remaining(&self) -> usize {
        self.open().missing()
    }

    /// Collects the free frames of the region from all places; returns the number of missing ones.
    pub fn collect(&mut self) -> usize {
        let missing = self.collect_from_bitmaps();
        if missing == 0 {
            return 0;
        }
        let blocks = self.blocks.clone();
        let wake_guard = blocks.wake_guard();
        // Frames in magazines, the depot, the reserve, and retire lists though no batch sees them.
        blocks.bring_in(&wake_guard);
        blocks.vacate_reserve(self.region());
        self.collect_from_bitmaps()
    }

    fn collect_from_bitmaps(&mut self) -> usize {
        let Self { blocks, shrink } = self;
        let shrink = shrink.as_mut().unwrap_or_else(|| committed());
        blocks
            .space
            .frames
            .collect(shrink, |run| run.frames().for_each(|frame| blocks.space.hold_frame(frame)))
    }

    /// Removes the collected frames, after `release` has released their memory or panicked. Returns
    /// the shrink itself if a frame is missing.
    pub fn commit(mut self, release: impl FnOnce(Run)) -> Result<(), Self> {
        if self.remaining() > 0 {
            return Err(self);
        }
        let Some(shrink) = self.shrink.take() else { committed() };
        let committing = Committing { blocks: &self.blocks, shrink: Some(shrink) };
        release(committing.region());
        drop(committing);
        Ok(())
    }

    fn open(&self) -> &Shrink {
        self.shrink.as_ref().unwrap_or_else(|| committed())
    }
}

/// Last step of a shrink, completed even if the storage panics: otherwise the pool would stay busy.
struct Committing<'a> {
    blocks: &'a Blocks,
    shrink: Option<Shrink>,
}

impl Committing<'_> {
    fn region(&self) -> Run {
        self.shrink.as_ref().unwrap_or_else(|| committed()).region()
    }
}

impl Drop for Committing<'_> {
    fn drop(&mut self) {
        let Some(shrink) = self.shrink.take() else { return };
        let (blocks, gone) = (self.blocks, shrink.region().len as usize);
        blocks.space.frames.commit_shrink(&shrink);
        // Relaxed: both are counts. No other shrink or growth is open.
        blocks.total.fetch_sub(gone, Relaxed);
        blocks.space.held.fetch_sub(gone, Relaxed);
        blocks.space.frames.end_shrink(shrink);
        // Requests for more blocks than remain can no longer be met.
        blocks.announce();
    }
}

#[cold]
fn committed() -> ! {
    unreachable!("a commit consumes the shrink")
}

impl Drop for Shrinking {
    fn drop(&mut self) {
        let Some(shrink) = self.shrink.take() else { return };
        shrink.for_each_collected(|run| run.frames().for_each(|frame| self.blocks.space.unhold_frame(frame)));
        // They were wiped on their way into the bitmaps, and not written since.
        self.blocks.space.frames.abandon_shrink(&shrink);
        self.blocks.space.frames.end_shrink(shrink);
        self.blocks.announce();
    }
}

impl std::fmt::Debug for Shrinking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shrinking").field("shrink", &self.shrink).finish_non_exhaustive()
    }
}

const _: () = {
    const fn anywhere<T: Send + Sync + 'static>() {}
    anywhere::<Shrinking>();
};

#[cfg(all(test, not(kvpool_loom)))]
mod tests;

//! A pool that shrinks: the frames from the new end on are collected, one after the other, until all of them are the
//! shrinker's; then they go.
//!
//! ```text
//! begin_shrink ── collect ── (somebody moves blocks out of the region) ── collect ── ... ── commit
//!                                                                                  └─ drop: all of it back
//! ```
//!
//! # Numbers
//!
//! | number | |
//! |---|---|
//! | `total` | frames now |
//! | `rows` | the most frames that there ever were: rows of the table, and ids that handles may name |
//! | `held` | frames below `total` that are held, by this shrink or as the destination of a move |
//!
//! A block keeps its id: one whose number is beyond the last frame may well be owned, its bytes further down. The block in
//! a frame that has gone is free and stays held, so that nothing can hand it out, until growth brings the frame back,
//! and with it whatever block is there by then.
//!
//! # Who may call what, and when
//!
//! Everything may go on meanwhile but growth and another shrink, which are refused. `collect` never waits: what is
//! owned, retired, or in the magazine of a thread that is inside its thread cache, is missing this time.

use crate::error::ShrinkError;
use crate::frame::Shrink;
use crate::ids::Run;
use crate::sync::Ordering::*;

use crate::block::Blocks;

/// A shrink that is open. Dropping it gives everything back, and the pool is as it was.
#[must_use = "dropping it gives the shrink up"]
pub struct Shrinking {
    blocks: Blocks,
    /// Taken by the commit.
    shrink: Option<Shrink>,
}

impl Blocks {
    /// Opens a shrink to `blocks` blocks, the null block not counted. Allocations avoid the frames that are to go; what
    /// is free there is to be [collected](Shrinking::collect), what is owned to be moved elsewhere or waited for.
    ///
    /// # Errors
    ///
    /// [`ShrinkError`]; the pool is unchanged.
    pub fn begin_shrink(&self, blocks: usize) -> Result<Shrinking, ShrinkError> {
        let min = self.space.reserve.mark() + 1;
        if blocks < min {
            return Err(ShrinkError::TooFew { asked: blocks, min });
        }
        let null = self.config.has_null_block as usize;
        let shrink =
            self.space.frames.begin_shrink(blocks.saturating_add(null)).map_err(|error| match error {
                // Told in blocks, as the caller counts them.
                ShrinkError::NotSmaller { total, .. } => {
                    ShrinkError::NotSmaller { asked: blocks, total: total - null }
                }
                other => other,
            })?;
        Ok(Shrinking { blocks: self.clone(), shrink: Some(shrink) })
    }
}

impl Shrinking {
    /// The frames that are to go.
    pub fn region(&self) -> Run {
        self.open().region()
    }

    /// Frames that are missing still: owned, retired, or kept by a thread.
    pub fn remaining(&self) -> usize {
        self.open().missing()
    }

    /// Takes what is free in the region by now, wherever it is, and returns how many frames are missing still.
    pub fn collect(&mut self) -> usize {
        let missing = self.collect_from_bitmaps();
        if missing == 0 {
            return 0;
        }
        let blocks = self.blocks.clone();
        // Others may miss what is on its way.
        let custody = blocks.custody();
        // Some of it may lie in magazines, in the depot, in limbo though no batch sees it any more, or in the reserve.
        blocks.bring_in(&custody);
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

    /// The pool has as many blocks as the shrink was opened for, and no more. `release` is called first, with the frames
    /// that go, while they are still the caller's: it gives their memory back. If it panics they are gone all the same,
    /// because their memory may be: growth makes it ready again.
    ///
    /// # Errors
    ///
    /// Itself, if a frame is missing: nothing has changed.
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

/// The last step of a shrink, which is taken also if the storage panics: else the pool would be busy for good.
struct Committing<'a> {
    blocks: &'a Blocks,
    /// Taken by the drop.
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
        // Relaxed: both are counts. Nobody else changes the total: no shrink but this is open, and none can grow.
        blocks.total.fetch_sub(gone, Relaxed);
        blocks.space.held.fetch_sub(gone, Relaxed);
        blocks.space.frames.end_shrink(shrink);
        // Who waits for more than there is now waits in vain.
        blocks.announce();
    }
}

#[cold]
fn committed() -> ! {
    unreachable!("a commit takes the shrink with it")
}

impl Drop for Shrinking {
    fn drop(&mut self) {
        let Some(shrink) = self.shrink.take() else { return };
        shrink.for_each_collected(|run| run.frames().for_each(|frame| self.blocks.space.unhold_frame(frame)));
        // They were wiped on their way into the bitmaps, and nobody has written them since.
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

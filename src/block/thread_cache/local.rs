//! The contents of a thread cache.

use crate::batch::Limbo;
use crate::config::MAGAZINE_BLOCKS_MAX;
use crate::frame::{Magazine, MagazinePair};
use crate::ids::{FrameId, Run, Ticket};

use crate::block::space::{Announce, Custody, FreeSpace};

/// The most blocks that take the fast path: as many as a lease stores inline.
pub(crate) const INLINE_BLOCKS: usize = 16;

/// Runs at least this long go to the bitmaps by themselves; shorter ones through the magazines.
const LONG_RUN: u32 = if cfg!(kvpool_loom) { 2 } else { 16 };

/// Retired frames between two looks at which batches have ended.
const RECLAIM_EVERY: usize = if cfg!(kvpool_loom) { 1 } else { 64 };

/// What is in a thread cache's cell.
pub(in crate::block) struct Local {
    pub(in crate::block) magazines: MagazinePair,
    pub(in crate::block) limbo: Limbo,
    pub(super) newest_tag: Ticket,
    reclaim_at: usize,
}

impl Local {
    pub(super) fn new(capacity: usize, near: FrameId) -> Self {
        let limbo = Limbo::default();
        Self {
            magazines: MagazinePair::new(capacity, near),
            limbo,
            newest_tag: Ticket(0),
            reclaim_at: RECLAIM_EVERY,
        }
    }

    /// Puts a run aside, and now and then gives back those that no batch sees any more.
    pub(in crate::block) fn retire(&mut self, space: &FreeSpace, run: Run, tag: Ticket) {
        self.limbo.retire(run, tag);
        self.newest_tag = self.newest_tag.max(tag);
        if self.limbo.len() >= self.reclaim_at {
            self.reclaim(space);
        }
    }

    /// Gives back what no batch sees any more: long runs to the bitmaps, single frames to the magazines.
    pub(in crate::block) fn reclaim(&mut self, space: &FreeSpace) {
        if self.limbo.is_empty() {
            return;
        }
        let Self { magazines, limbo, .. } = self;
        let mut returning = Returning::new(space);
        limbo.reclaim(space.clock.oldest(), |run| returning.run(run));
        returning.finish(magazines);
        self.reclaim_at = self.limbo.len() + RECLAIM_EVERY;
    }

    /// Gives everything that is free back to the bitmaps, where others find it; how many frames that were.
    pub(in crate::block) fn surrender(&mut self, space: &FreeSpace, _: &Custody<'_, impl Announce>) -> usize {
        let before = self.magazines.len() + self.limbo.len();
        self.limbo.reclaim(space.clock.oldest(), |run| space.free_run(run));
        self.reclaim_at = self.limbo.len() + RECLAIM_EVERY;
        self.magazines.flush(&space.frames);
        before - self.limbo.len()
    }
}

/// Frames on their way back: long runs to the bitmaps at once; the short ones, if they are few, to the magazines, else
/// to the bitmaps too, one operation a word. A sequence's scattered blocks, left to circulate in magazines, would keep
/// units broken that could be whole.
pub(in crate::block) struct Returning<'a> {
    space: &'a FreeSpace,
    short: Magazine,
}

impl<'a> Returning<'a> {
    pub(in crate::block) fn new(space: &'a FreeSpace) -> Self {
        Self { space, short: Magazine::default() }
    }

    pub(in crate::block) fn run(&mut self, run: Run) {
        if run.len >= LONG_RUN {
            return self.space.free_run(run);
        }
        if !self.space.wipe(run) {
            return;
        }
        for frame in run.frames() {
            if self.short.len() == MAGAZINE_BLOCKS_MAX {
                self.short.flush(&self.space.frames);
            }
            self.short.push(frame);
        }
    }

    pub(in crate::block) fn finish(mut self, magazines: &mut MagazinePair) {
        if self.short.len() > INLINE_BLOCKS.min(magazines.capacity()) {
            return self.short.flush(&self.space.frames);
        }
        // The last first, so that they come out in the order in which they were freed.
        while let Some(frame) = self.short.pop() {
            magazines.free(frame, &self.space.frames, &self.space.depot);
        }
    }
}

//! Contents of a thread cache: magazines, retire lists, and the path of freed frames into them.

use crate::clock::RetireList;
use crate::config::MAGAZINE_BLOCKS_MAX;
use crate::frame::{Magazine, MagazinePair};
use crate::ids::{FrameId, Run, Ticket};

use crate::block::space::{Announce, FreeSpace, WakeGuard};

/// Maximum number of blocks that take the fast path, and that a list of ids stores inline.
pub(crate) const INLINE_BLOCKS: usize = 16;

/// Runs of at least this length go directly to the bitmaps; shorter ones go through the magazines.
const LONG_RUN: u32 = if cfg!(kvpool_loom) { 2 } else { 16 };

/// Number of retired frames between two checks for ended batches.
const RECLAIM_EVERY: usize = if cfg!(kvpool_loom) { 1 } else { 64 };

pub(in crate::block) struct Local {
    pub(in crate::block) magazines: MagazinePair,
    pub(in crate::block) retire_list: RetireList,
    pub(super) newest_tag: Ticket,
    reclaim_at: usize,
}

impl Local {
    pub(super) fn new(capacity: usize, near: FrameId) -> Self {
        let retire_list = RetireList::default();
        Self {
            magazines: MagazinePair::new(capacity, near),
            retire_list,
            newest_tag: Ticket(0),
            reclaim_at: RECLAIM_EVERY,
        }
    }

    /// Retires a run, and reclaims runs that no batch sees every `RECLAIM_EVERY` frames.
    pub(in crate::block) fn retire(&mut self, space: &FreeSpace, run: Run, tag: Ticket) {
        self.retire_list.retire(run, tag);
        self.newest_tag = self.newest_tag.max(tag);
        if self.retire_list.len() >= self.reclaim_at {
            self.reclaim(space);
        }
    }

    pub(in crate::block) fn reclaim(&mut self, space: &FreeSpace) {
        if self.retire_list.is_empty() {
            return;
        }
        let Self { magazines, retire_list, .. } = self;
        let mut returning = Returning::new(space);
        retire_list.reclaim(space.clock.oldest(), |run| returning.run(run));
        returning.finish(magazines);
        self.reclaim_at = self.retire_list.len() + RECLAIM_EVERY;
    }

    /// Frees the retired frames that no batch sees: into the reserve, and the bitmaps.
    pub(in crate::block) fn give_up_retired(&mut self, space: &FreeSpace, _: &WakeGuard<'_, impl Announce>) {
        self.retire_list.reclaim(space.clock.oldest(), |run| space.free_run(run));
        self.reclaim_at = self.retire_list.len() + RECLAIM_EVERY;
    }

    pub(in crate::block) fn surrender(
        &mut self,
        space: &FreeSpace,
        wake_guard: &WakeGuard<'_, impl Announce>,
    ) -> usize {
        let before = self.magazines.len() + self.retire_list.len();
        self.give_up_retired(space, wake_guard);
        self.magazines.flush(&space.frames);
        before - self.retire_list.len()
    }
}

/// Freed frames on their way back: long runs to the bitmaps, a few short ones to the magazines.
/// Scattered blocks that circulated in magazines would keep units from becoming whole.
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
        // In reverse, so that they are handed out in the order in which they were freed.
        while let Some(frame) = self.short.pop() {
            magazines.free(frame, &self.space.frames, &self.space.depot);
        }
    }
}

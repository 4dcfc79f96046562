//! Allocation for an engine whose ids are frames: of runs, or by name (model:
//! `loom-tests/tests/named_claim.rs`). The blocks are pinned, see
//! [`release::in_place`](crate::block).

use crate::error::{AllocError, FrameError};
use crate::frame::RunList;
use crate::ids::{FrameId, Run};

use super::grab::Grab;
use super::ladder::Aim;
use crate::block::core::{Blocks, Core};
use crate::block::release::repeats;
use crate::block::request::AllocRequest;
use crate::block::tenants::Tenant;
use crate::block::thread_cache::INLINE_BLOCKS;

impl Blocks {
    /// Allocates `request.blocks` frames, each with one reference: all or none. With
    /// `prefers_runs`, looks for few runs before magazines, but evicts no block for a longer run.
    pub(crate) fn allocate_frames(
        &self,
        request: &AllocRequest,
        prefers_runs: bool,
        take: &mut dyn FnMut(Run),
    ) -> Result<(), AllocError> {
        if request.blocks == 1
            && let Some(owned) = self.allocate_one(request)
        {
            take(Run { start: owned.frame, len: 1 });
            return Ok(());
        }
        let mut few = [FrameId(0); INLINE_BLOCKS];
        if !prefers_runs && self.allocate_inline(request, |i, owned| few[i] = owned.frame) {
            let mut runs = RunList::new();
            few[..request.blocks].iter().for_each(|&start| runs.append(Run { start, len: 1 }));
            runs.iter().for_each(|&run| take(run));
            return Ok(());
        }
        let mut grab = Grab::new();
        self.allocate_into(request, if prefers_runs { Aim::Runs } else { Aim::Any }, &mut grab)?;
        self.hand_out(&grab, request, |_| ());
        grab.runs.iter().for_each(|&run| take(run));
        Ok(())
    }

    /// Allocates these frames, each with one reference: all or none. Evicts cached frames without
    /// references; an error may leave some evicted if another thread takes one concurrently.
    pub(crate) fn claim_frames(&self, frames: &[u32], request: &AllocRequest) -> Result<(), FrameError> {
        for (index, &frame) in frames.iter().enumerate() {
            let word = self.word(self.block_in_place(index, frame)?);
            if word.is_owned() && word.frame().0 == frame {
                let (frame, references) = (FrameId(frame), word.refs());
                return Err(FrameError::InUse { index, frame, references });
            }
        }
        repeats(frames, |_| 1)?;
        let mut grab = Grab::new();
        let wake_guard = self.wake_guard();
        let gathered = self.gather_named(frames, &mut grab);
        if gathered.is_err() {
            grab.runs.drain().for_each(|run| self.space.frames.free_run(run));
        }
        drop(wake_guard);
        gathered?;
        if !frames.is_empty() {
            self.counters.allocated(frames.len());
        }
        debug_assert!(request.pinned, "a block that stays in its frame");
        self.hand_out(&grab, request, |_| ());
        Ok(())
    }
}

impl Core {
    pub(crate) fn evictable_in(&self, region: Run) -> usize {
        let oldest = self.space.clock.oldest();
        region.frames().filter(|&frame| self.can_evict_at(frame, oldest)).count()
    }

    /// Takes frames by name: the free ones first, so that a refusal evicts nothing.
    fn gather_named(&self, frames: &[u32], grab: &mut Grab) -> Result<(), FrameError> {
        let oldest = self.space.clock.oldest();
        let (mut has_trimmed, mut cached) = (false, Vec::new());
        for (index, &frame) in frames.iter().enumerate() {
            let run = Run { start: FrameId(frame), len: 1 };
            if self.can_evict_at(run.start, oldest) {
                cached.push((index, run));
                continue;
            }
            let mut is_claimed = self.space.frames.claim(run);
            if !is_claimed && !has_trimmed {
                // It may be in a magazine, or retired and seen by no batch.
                self.trim();
                has_trimmed = true;
                is_claimed = self.space.frames.claim(run);
            }
            if !is_claimed {
                return Err(FrameError::Unavailable { index, frame: run.start });
            }
            grab.extend(Some(run));
        }
        for (index, run) in cached {
            if !self.evict_in(run.start, oldest, Tenant::NONE) {
                return Err(FrameError::Unavailable { index, frame: run.start });
            }
            grab.extend(Some(run));
        }
        Ok(())
    }
}

//! What an allocation has found so far.

use crate::frame::RunList;
use crate::ids::{FrameId, Run};

/// Frames got so far.
pub(in crate::block) struct Grab {
    pub(in crate::block) runs: RunList,
    pub(in crate::block) frames: usize,
    /// Of a search in vain: nothing was overlooked because somebody was inside its thread cache.
    pub(in crate::block) is_sure: bool,
    /// Of a search in vain: other threads' thread caches were not looked into.
    pub(in crate::block) is_refused: bool,
}

impl Grab {
    pub(in crate::block) fn new() -> Self {
        Self { runs: RunList::new(), frames: 0, is_sure: false, is_refused: false }
    }

    #[inline]
    pub(in crate::block) fn push(&mut self, frame: FrameId) {
        self.frames += 1;
        self.runs.push(frame);
    }

    pub(in crate::block) fn extend(&mut self, run: Option<Run>) {
        let Some(run) = run else { return };
        self.frames += run.len as usize;
        self.runs.append(run);
    }
}

//! Frames that one request has gathered.

use crate::frame::RunList;
use crate::ids::{FrameId, Run};

/// Gathered frames, and what is known after a search that failed.
pub(in crate::block) struct Grab {
    pub(in crate::block) runs: RunList,
    pub(in crate::block) frames: usize,
    /// After a failed search: no frame was overlooked because an owner was inside its thread cache.
    pub(in crate::block) is_sure: bool,
    /// After a failed search: the system refused the fence that visits to thread caches need.
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

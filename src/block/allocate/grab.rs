//! Frames that one request has gathered.

use crate::frame::RunList;
use crate::ids::{FrameId, Run};

pub(in crate::block) struct Grab {
    pub(in crate::block) runs: RunList,
    pub(in crate::block) frames: usize,
    /// After a failed search: no frame was missed because an owner was inside its thread cache.
    pub(in crate::block) is_sure: bool,
    /// After a failed search: the kernel denied the fence that visits to thread caches need.
    pub(in crate::block) is_refused: bool,
    /// After a failed search that had gathered frames: the number of such searches before it.
    pub(super) returned: Option<u64>,
    pub(super) rounds: usize,
    /// Whether the next round also visits thread caches that report no frames.
    pub(super) is_all: bool,
}

impl Grab {
    pub(in crate::block) fn new() -> Self {
        let runs = RunList::new();
        Self { runs, frames: 0, is_sure: false, is_refused: false, returned: None, rounds: 0, is_all: true }
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

//! How allocations and shrinks use the [reserve](crate::block::space::Reserve).

use crate::ids::{FrameId, Run};

use crate::block::core::{Core, WakeGuard};
use crate::block::request::{AllocRequest, Priority};
use crate::block::tenants::Tenant;

impl Core {
    pub(in crate::block) fn reserved_for(&self, request: &AllocRequest) -> usize {
        let takes_runs = request.contiguous && request.blocks > 1;
        if request.priority == Priority::Urgent && !takes_runs { self.space.reserve.held() } else { 0 }
    }

    /// Frees the reserve's frames in `region`, which allocations avoid; it refills from elsewhere.
    pub(in crate::block) fn vacate_reserve(&self, region: Run) {
        if self.space.reserve.mark() == 0 {
            return;
        }
        let wake_guard = self.wake_guard();
        let removed =
            self.space.reserve.sift(&wake_guard, |frame| (region.start.0..region.end()).contains(&frame.0));
        for &frame in &removed {
            self.space.frames.free_run(Run { start: frame, len: 1 });
        }
        if !removed.is_empty() {
            self.space.clock.set_awaited();
        }
    }

    /// Refills the reserve, to make it contiguous. For a moment any request may take its frames.
    pub fn renew_reserve(&self) {
        self.vacate_reserve(Run { start: FrameId(0), len: self.total_frames() as u32 });
    }

    /// Allocates a run through the reserve. Reached by `the_reserve_makes_way_for_a_run`.
    pub(in crate::block) fn run_through_reserve(
        &self,
        len: u32,
        near: FrameId,
        tenant: Tenant,
        wake_guard: &WakeGuard<'_>,
    ) -> Option<Run> {
        if self.space.reserve.held() == 0 {
            return None;
        }
        for frame in self.space.reserve.sift(wake_guard, |_| true) {
            self.space.frames.free_run(Run { start: frame, len: 1 });
        }
        let run = self
            .space
            .frames
            .allocate_run(len, near)
            .or_else(|| self.evict_run(len as usize, tenant, wake_guard));
        self.space.top_up();
        self.evict_for_reserve();
        if self.space.reserve.is_short() {
            // Other threads took frames first. The bit is set after taking, as always.
            self.space.clock.set_awaited();
        }
        run
    }

    pub(in crate::block) fn evict_for_reserve(&self) {
        if self.space.reserve.is_short() {
            self.evict_free(self.space.reserve.mark().saturating_sub(self.space.reserve.held()));
        }
    }

    pub(in crate::block) fn for_each_reserved(&self, wake_guard: &WakeGuard<'_>, mut f: impl FnMut(FrameId)) {
        let removed = self.space.reserve.sift(wake_guard, |frame| {
            f(frame);
            false
        });
        removed.iter().for_each(|&frame| self.space.frames.free_run(Run { start: frame, len: 1 }));
    }
}

//! A run for a contiguous request in a pool full of evictable blocks: a window with few evictions.
//!
//! A walk over the frames, region by region, at the end of the ladder of a contiguous request. It
//! ends with the first region in which a window begins, and takes the one with the fewest evictions
//! there; each walk begins in another region. Concurrent changes can make the run fail; the walk is
//! then repeated, a few times. That there is no window in the whole pool is
//! [remembered](super::refused).

use crate::config::FAN;
use crate::frame::cheapest_window;
use crate::ids::{FrameId, Run, Ticket};
use crate::sync::Ordering::Relaxed;

use crate::block::core::{Core, Custody};

/// Maximum number of walks.
const WINDOWS: usize = 3;

/// Minimum number of frames of a region.
const REGION: usize = 1 << 13;

/// A region has at least so many times the frames of a window.
const WINDOWS_IN_REGION: usize = 8;

/// Cost of one frame in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cost {
    /// None: it is free in the bitmaps.
    Free,
    /// One eviction.
    Evict,
    /// Infinite: it is owned, held, visible to a batch, or closed by a shrink.
    Fixed,
}

impl Cost {
    fn evictions(self) -> Option<u32> {
        match self {
            Self::Free => Some(0),
            Self::Evict => Some(1),
            Self::Fixed => None,
        }
    }
}

/// What a walk has found.
#[derive(Default)]
struct Walk {
    /// The costs of a region's frames, and of those behind it in which its last window ends.
    costs: Vec<Cost>,
    evictable: usize,
    /// Evictable blocks that batches see for certain.
    seen: usize,
    free: usize,
    /// A shrink has closed a frame. One that is given up opens it, which no counter shows.
    has_closed: bool,
}

impl Walk {
    /// Reads the costs of the frames from `start` to `end`. Those from `own_end` on belong to the
    /// next region, which counts them.
    fn read(&mut self, core: &Core, oldest: Ticket, start: usize, own_end: usize, end: usize) {
        self.costs.clear();
        for frame in start..end {
            let id = core.space.table.block_at(FrameId(frame as u32));
            let word = core.word(id);
            let is_evictable = word.frame().index() == frame && word.evict().is_some();
            let is_unseen = is_evictable && core.is_unseen(id, word, oldest);
            self.costs.push(if is_unseen { Cost::Evict } else { Cost::Fixed });
            if is_evictable && frame < own_end {
                self.evictable += usize::from(is_unseen);
                self.seen += usize::from(!is_unseen && core.is_seen_for_certain(id, word, oldest));
            }
        }
        for unit in (start..end).step_by(FAN) {
            let free = core.space.frames.all_free_in_unit(FrameId(unit as u32));
            for frame in free.frames().map(|frame| frame.index()) {
                self.free += usize::from(frame < own_end);
                if let Some(cost) = self.costs.get_mut(frame - start) {
                    *cost = Cost::Free;
                }
            }
            let closed = core.space.frames.closed_in_unit(FrameId(unit as u32));
            self.has_closed |= !closed.is_empty();
            for frame in closed.frames().map(|frame| frame.index()) {
                if let Some(cost) = self.costs.get_mut(frame - start) {
                    *cost = Cost::Fixed;
                }
            }
        }
    }
}

impl Core {
    /// Evicts the blocks in a window of `len` frames, if there is one, and takes the run.
    #[cold]
    pub(in crate::block) fn evict_run(&self, len: usize, _: &Custody<'_>) -> Option<Run> {
        let region = REGION.max(WINDOWS_IN_REGION * len).next_multiple_of(FAN);
        let mut walk = Walk::default();
        for _ in 0..WINDOWS {
            if self.evictable() == 0 || self.knows_no_eviction() || self.knows_no_window(len) {
                return None;
            }
            let (state, before) = (self.evictions(), self.space.frames.snapshot());
            let total = self.total_frames();
            let regions = total.div_ceil(region);
            // Where regions meet, frames are read twice, and counted once: that there was no window
            // when they were read first does not follow from the counts.
            let before = before.filter(|_| regions == 1);
            (walk.evictable, walk.seen, walk.free, walk.has_closed) = (0, 0, 0, false);
            // Relaxed: a hint.
            let first = self.windows.fetch_add(1, Relaxed);
            let cheapest = (0..regions).find_map(|at| {
                let start = first.wrapping_add(at) % regions * region;
                let own_end = (start + region).min(total);
                walk.read(self, state.oldest, start, own_end, (own_end + len - 1).min(total));
                let costs = &walk.costs;
                let (at, _) = cheapest_window(costs.len(), len, |at| costs[at].evictions(), |_| 0)?;
                Some((start, at))
            });
            let Some((start, at)) = cheapest else {
                if walk.evictable == 0 {
                    self.remember_no_eviction(state, walk.seen);
                }
                if walk.evictable + walk.seen == state.evictable
                    && let Some(before) = before
                    && walk.free == before.free()
                    && self.evictions() == state
                    && self.space.frames.snapshot() == Some(before)
                    && !walk.has_closed
                {
                    self.refused.remember_no_window((state, before, len));
                }
                return None;
            };
            for at in (at..at + len).filter(|&at| walk.costs[at] == Cost::Evict) {
                let id = self.space.table.block_at(FrameId((start + at) as u32));
                if let Ok(frame) = self.evict(id, state.oldest) {
                    // Not through the reserve, which would take a frame out of the window.
                    let run = Run { start: frame, len: 1 };
                    if self.space.wipe(run) {
                        self.space.frames.free_run(run);
                    }
                }
            }
            if let Some(run) = self.space.frames.allocate_run(len as u32, FrameId((start + at) as u32)) {
                return Some(run);
            }
        }
        None
    }
}

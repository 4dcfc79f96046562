//! A run for a contiguous request in a pool full of evictable blocks: the window with the fewest
//! evictions.
//!
//! One walk over all frames, at the end of the ladder of a contiguous request. Concurrent changes
//! can make the run fail; the walk is then repeated, a few times. That there is no window is
//! [remembered](super::refused).

use crate::frame::cheapest_window;
use crate::ids::{FrameId, Run};

use crate::block::core::{Core, Custody};

/// Maximum number of walks.
const WINDOWS: usize = 3;

/// Cost of one frame in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cost {
    /// None: it is free in the bitmaps.
    Free,
    /// One eviction.
    Evict,
    /// Infinite: it is owned, held, or visible to a batch.
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

impl Core {
    /// Evicts the blocks in the cheapest window of `len` frames, if there is one, and takes the
    /// run.
    #[cold]
    pub(in crate::block) fn evict_run(&self, len: usize, _: &Custody<'_>) -> Option<Run> {
        for _ in 0..WINDOWS {
            if self.evictable() == 0 || self.knows_no_eviction() || self.knows_no_window(len) {
                return None;
            }
            let (state, before) = (self.evictions(), self.space.frames.snapshot());
            let (oldest, mut evictable, mut seen, mut free) = (state.oldest, 0, 0, 0);
            let mut costs = vec![Cost::Fixed; self.total_frames()];
            for (frame, cost) in costs.iter_mut().enumerate() {
                let id = self.space.table.block_at(FrameId(frame as u32));
                let word = self.word(id);
                if word.frame().index() != frame || word.evict().is_none() {
                    continue;
                }
                if self.is_unseen(id, word, oldest) {
                    *cost = Cost::Evict;
                    evictable += 1;
                } else {
                    seen += usize::from(self.is_seen_for_certain(id, word, oldest));
                }
            }
            self.space.frames.for_each_free_run(&mut |run| {
                free += run.len as usize;
                // A pool that has grown meanwhile has more frames.
                run.frames().for_each(|frame| {
                    if let Some(cost) = costs.get_mut(frame.index()) {
                        *cost = Cost::Free;
                    }
                });
            });
            let cheapest = cheapest_window(costs.len(), len, |at| costs[at].evictions(), |_| 0);
            let Some((start, _)) = cheapest else {
                if evictable == 0 {
                    self.remember_no_eviction(state, seen);
                }
                if evictable + seen == state.evictable
                    && let Some(before) = before
                    && free == before.free()
                    && self.evictions() == state
                    && self.space.frames.snapshot() == Some(before)
                {
                    self.refused.remember_no_window((state, before, len));
                }
                return None;
            };
            for at in (start..start + len).filter(|&at| costs[at] == Cost::Evict) {
                if let Ok(frame) = self.evict(self.space.table.block_at(FrameId(at as u32)), oldest) {
                    // Not through the reserve, which would take a frame out of the window.
                    let run = Run { start: frame, len: 1 };
                    if self.space.wipe(run) {
                        self.space.frames.free_run(run);
                    }
                }
            }
            if let Some(run) = self.space.frames.allocate_run(len as u32, FrameId(start as u32)) {
                return Some(run);
            }
        }
        None
    }
}

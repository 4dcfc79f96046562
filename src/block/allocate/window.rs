//! A run for a contiguous request in a pool full of evictable blocks: the window with the fewest
//! evictions.
//!
//! One walk over all frames, at the end of the ladder of a contiguous request. Concurrent changes
//! can make the run fail; the walk is then repeated, a few times.

use crate::ids::{FrameId, Run};

use crate::block::core::{Core, Custody};

/// Maximum number of walks.
const WINDOWS: usize = 3;

/// Cost of one frame in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::block) enum Cost {
    /// None: it is free in the bitmaps.
    Free,
    /// One eviction.
    Evict,
    /// Infinite: it is owned, held, or visible to a batch.
    Fixed,
}

/// Returns the start of the first window of `len` frames with the fewest evictions; `None` if every
/// window contains a fixed frame.
pub(in crate::block) fn cheapest(costs: &[Cost], len: usize) -> Option<usize> {
    let (mut fixed, mut evictions, mut best) = (0, 0, None);
    for end in 0..costs.len() {
        let mut count = |at: usize, by: isize| match costs[at] {
            Cost::Free => {}
            Cost::Evict => evictions += by,
            Cost::Fixed => fixed += by,
        };
        count(end, 1);
        if end >= len {
            count(end - len, -1);
        }
        if end + 1 >= len && fixed == 0 && best.is_none_or(|(least, _)| evictions < least) {
            best = Some((evictions, end + 1 - len));
        }
    }
    best.map(|(_, start)| start)
}

impl Core {
    /// Evicts the blocks in the cheapest window of `len` frames, if there is one, and takes the
    /// run.
    #[cold]
    pub(in crate::block) fn evict_run(&self, len: usize, _: &Custody<'_>) -> Option<Run> {
        for _ in 0..WINDOWS {
            if self.evictable() == 0 {
                return None;
            }
            let oldest = self.space.clock.oldest();
            let mut costs = vec![Cost::Fixed; self.total_frames()];
            for (frame, cost) in costs.iter_mut().enumerate() {
                let id = self.space.table.block_at(FrameId(frame as u32));
                let word = self.word(id);
                if word.frame().index() == frame && self.can_evict(id, word, oldest) {
                    *cost = Cost::Evict;
                }
            }
            self.space.frames.for_each_free_run(&mut |run| {
                // A pool that has grown meanwhile has more frames.
                run.frames().for_each(|frame| {
                    if let Some(cost) = costs.get_mut(frame.index()) {
                        *cost = Cost::Free;
                    }
                });
            });
            let start = cheapest(&costs, len)?;
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

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_window_with_the_fewest_evictions_is_found() {
        let costs = |text: &str| -> Vec<Cost> {
            let cost = |c| match c {
                '.' => Cost::Free,
                'e' => Cost::Evict,
                _ => Cost::Fixed,
            };
            text.chars().map(cost).collect()
        };
        assert_eq!(cheapest(&costs("ee.xe.e.x...e"), 4), Some(9));
        assert_eq!(cheapest(&costs("ee.xe.e.x..xe"), 4), Some(4));
        assert_eq!(cheapest(&costs("ee.xe.e.x..xe"), 5), None);
        assert_eq!(cheapest(&costs(".."), 3), None);
        assert_eq!(cheapest(&costs("e"), 1), Some(0));
    }
}

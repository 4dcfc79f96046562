//! Hits of a sequence whose layers attend to a window: one boundary, behind which the blocks of the
//! window, and those of the sinks, are cached. The blocks between need not be.
//!
//! The search begins at the last boundary. It looks at the first block of the window before it: if
//! that one is not cached, no boundary up to one window further is a hit. Without hits it therefore
//! looks up one block of each window, not every block of the prompt.

use std::ops::Range;

use crate::block::{Blocks, Core};
use crate::ids::BlockId;

use super::{BlockHash, PrefixCache};

/// Numbers of blocks that a hit needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WindowBlocks {
    /// First blocks of the sequence.
    pub sinks: usize,
    /// Blocks before the boundary; at least one.
    pub window: usize,
}

impl WindowBlocks {
    /// Returns the places behind the sinks that a hit at this boundary needs.
    fn before(self, boundary: usize) -> Range<usize> {
        boundary.saturating_sub(self.window).max(self.sinks.min(boundary))..boundary
    }

    /// Returns the places that a hit at this boundary does not need.
    pub(crate) fn gap(self, boundary: usize) -> Range<usize> {
        let window = self.before(boundary);
        self.sinks.min(window.start)..window.start
    }
}

impl PrefixCache {
    /// Takes a reference on each block that the longest hit needs, and passes it with its place to
    /// `take`, in descending order. Returns the boundary: the number of blocks before it.
    pub(crate) fn take_window(
        &self,
        pool: &Blocks,
        hashes: &[BlockHash],
        era: u64,
        needs: WindowBlocks,
        is_in_line: bool,
        take: &mut dyn FnMut(usize, BlockId),
    ) -> usize {
        let mut most = hashes.len();
        loop {
            let (boundary, _) = self.find_boundary(pool, &hashes[..most], era, needs);
            let (window, sinks) = (needs.before(boundary), 0..needs.sinks.min(boundary));
            let mut taken = Vec::with_capacity(window.len() + sinks.len());
            let places = window.chain(sinks);
            // From the end: a block that is evicted meanwhile leaves shorter boundaries.
            let lost = places.rev().find(|&place| match self.take(pool, hashes[place], era) {
                Some(id) => {
                    taken.push((place, id));
                    false
                }
                None => true,
            });
            let Some(lost) = lost else {
                taken.into_iter().for_each(|(place, id)| take(place, id));
                return boundary;
            };
            // Reached by `a_window_is_hit_while_its_blocks_are_evicted`.
            let ids: Vec<BlockId> = taken.iter().rev().map(|&(_, id)| id).collect();
            self.untake(pool, &ids, is_in_line);
            most = if lost < needs.sinks { lost } else { lost.min(boundary - 1) };
        }
    }

    /// Returns the boundary of the longest hit, and the number of evictable blocks that it needs.
    pub(crate) fn find_boundary(
        &self,
        core: &Core,
        hashes: &[BlockHash],
        era: u64,
        needs: WindowBlocks,
    ) -> (usize, usize) {
        let (sinks, of_sinks) = self.count_prefix(core, &hashes[..needs.sinks.min(hashes.len())], era);
        // Without all sinks, only a boundary among them can be hit.
        let mut boundary = if sinks < needs.sinks { sinks } else { hashes.len() };
        while boundary > sinks {
            let window = needs.before(boundary);
            let mut evictable = of_sinks;
            // The first block of the window, then the others from the end.
            let others = (window.start + 1..window.end).rev();
            let missing = std::iter::once(window.start).chain(others).find(|&place| {
                let (hits, unowned) = self.count_prefix(core, &hashes[place..=place], era);
                evictable += unowned;
                hits == 0
            });
            match missing {
                None => return (boundary, evictable),
                Some(place) => boundary = place,
            }
        }
        (boundary, of_sinks)
    }
}

//! Counts of a pool's blocks by state.

use crate::sync::Ordering::*;

use super::core::Core;

/// Counts of a pool's blocks by state, each block in one. Exact while no thread allocates or frees.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Blocks that can be handed out: all but the null block.
    pub total: usize,
    /// Free in the bitmaps.
    pub in_bitmap: usize,
    /// Free in threads' magazines and in the depot.
    pub in_magazines: usize,
    /// Free, but visible to a batch in flight.
    pub retired: usize,
    /// Free, but held: destinations of moves, frames collected by a shrink, frames that could not
    /// be wiped.
    pub held: usize,
    /// Free, and set aside for urgent requests.
    pub reserved: usize,
    /// Cached and unowned: their bytes stay until a frame is needed.
    pub evictable: usize,
}

impl Counts {
    /// Returns the number of blocks that any allocation can get without evicting: the reserve not
    /// counted.
    pub fn free(&self) -> usize {
        self.in_bitmap + self.in_magazines
    }

    /// Returns the number of blocks that any allocation can get: [`free`](Self::free) and evictable
    /// ones.
    pub fn available(&self) -> usize {
        self.free() + self.evictable
    }

    /// Returns the number of owned blocks.
    pub fn used(&self) -> usize {
        self.total.saturating_sub(self.free() + self.retired + self.held + self.reserved + self.evictable)
    }
}

impl Core {
    /// Counts blocks by state, without a walk over the bitmaps: O(threads).
    ///
    /// Exact while no thread allocates or frees. Otherwise each number is approximate, and they
    /// need not add up.
    pub fn counts(&self) -> Counts {
        self.counts_with(self.space.frames.free_counted())
    }

    /// As [`counts`](Self::counts), with a walk over the bitmaps, for decisions: a frame that is
    /// free there during the whole walk is counted.
    pub(crate) fn recount(&self) -> Counts {
        self.counts_with(self.space.frames.free_frames())
    }

    fn counts_with(&self, in_bitmap: usize) -> Counts {
        let oldest = self.space.clock.oldest();
        let (mut in_magazines, mut retired) = (self.space.depot.frames(), 0);
        for thread_cache in self.thread_caches.iter() {
            let (cached, waiting, newest_tag) = thread_cache.mirror();
            in_magazines += cached;
            // The next allocation that needs these frames reclaims them, once no batch can see
            // them.
            if newest_tag < oldest { in_magazines += waiting } else { retired += waiting }
        }
        let (waiting, newest_tag) = self.shared_limbo.mirror();
        if newest_tag < oldest {
            in_magazines += waiting
        } else {
            retired += waiting
        }
        Counts {
            total: self.total(),
            in_bitmap,
            in_magazines,
            retired,
            // The releaser of a moving block counts its frame in, perhaps after the mover counted
            // it out.
            held: (self.space.held.load(Relaxed) as isize).max(0) as usize,
            reserved: self.space.reserve.held(),
            evictable: self.evictable(),
        }
    }
}

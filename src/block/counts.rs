//! Counts of a pool's blocks by state.

use crate::sync::Ordering::*;

use super::core::Core;
use super::state::{AllocationCounts, Refusals, WaitCounts};
use crate::error::AllocError;

/// Counts of a pool's blocks, each in exactly one state. Exact while no thread allocates or frees.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Counts {
    /// Allocatable blocks: all but the null block.
    pub total: usize,
    /// Free in the bitmaps.
    pub in_bitmap: usize,
    /// Free in threads' magazines and in the depot.
    pub in_magazines: usize,
    /// Free, but visible to a batch in flight.
    pub retired: usize,
    /// Free, but held: move destinations, frames collected by a shrink, failed wipes.
    pub held: usize,
    /// Free, and set aside for urgent requests.
    pub reserved: usize,
    /// Cached and unowned: their bytes stay until a frame is needed.
    pub evictable: usize,
}

impl Counts {
    /// Returns the number of blocks that can be allocated without evicting or using the reserve.
    pub fn free(&self) -> usize {
        self.in_bitmap + self.in_magazines
    }

    /// Returns the number of blocks that any allocation can get: [`free`](Self::free) or evictable.
    pub fn available(&self) -> usize {
        self.free() + self.evictable
    }

    /// Returns the number of owned blocks.
    pub fn used(&self) -> usize {
        self.total.saturating_sub(self.free() + self.retired + self.held + self.reserved + self.evictable)
    }
}

impl Core {
    /// Returns the counts of allocations since the pool was built: O(threads).
    pub fn allocation_counts(&self) -> AllocationCounts {
        self.sum_counts().0
    }

    /// Returns the number of references of leases and of a frame pool's engine: O(threads).
    pub fn counted_references(&self) -> i64 {
        let (sum, further) = self.sum_counts();
        sum.blocks.wrapping_sub(sum.freed_blocks).wrapping_add(further) as i64
    }

    pub(super) fn sum_counts(&self) -> (AllocationCounts, u64) {
        let mut sum = AllocationCounts::default();
        let mut further = self.counters.sum(&mut sum);
        for thread_cache in self.thread_caches.iter() {
            further = further.wrapping_add(thread_cache.counters.sum(&mut sum));
        }
        (sum, further)
    }

    /// Returns the counts of refused requests since the pool was built.
    pub fn refusals(&self) -> Refusals {
        self.counters.refusals()
    }

    /// Returns the counts of waiting requests since the pool was built.
    pub fn wait_counts(&self) -> WaitCounts {
        self.counters.wait_counts()
    }

    /// Returns the number of cached blocks freed by a release that wrapped their generation around.
    pub(crate) fn outlived_blocks(&self) -> u64 {
        self.counters.outlived_blocks()
    }

    pub(crate) fn set_in_transfer(&self, blocks: usize) {
        self.counters.set_in_transfer(blocks);
    }

    pub(crate) fn count_refusal(&self, error: &AllocError) {
        self.counters.refused(error);
    }

    pub(crate) fn count_missed_deadline(&self) {
        self.counters.missed_deadline();
    }

    /// Counts blocks by state, without a walk over the bitmaps: O(threads). Exact while no thread
    /// allocates or frees; otherwise each number is approximate, and they need not add up.
    pub fn counts(&self) -> Counts {
        self.counts_with(self.space.frames.free_counted())
    }

    /// Like [`counts`](Self::counts), with a walk over the bitmaps, for decisions.
    pub(crate) fn recount(&self) -> Counts {
        self.counts_with(self.space.frames.free_frames())
    }

    fn counts_with(&self, in_bitmap: usize) -> Counts {
        let oldest = self.space.clock.oldest();
        let (mut in_magazines, mut retired) = (self.space.depot.frames(), 0);
        for thread_cache in self.thread_caches.iter() {
            let (cached, waiting, newest_tag) = thread_cache.mirror();
            in_magazines += cached;
            // The next allocation that needs these frames reclaims them.
            if newest_tag < oldest { in_magazines += waiting } else { retired += waiting }
        }
        let (waiting, newest_tag) = self.shared_retire_list.mirror();
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
            // The releaser of a moving block may count its frame in after the mover counted it out.
            held: (self.space.held.load(Relaxed) as isize).max(0) as usize,
            reserved: self.space.reserve.held(),
            evictable: self.evictable(),
        }
    }
}

//! The blocks of a pool by where they are.

use crate::sync::Ordering::*;

use super::core::Core;

/// Where a pool's blocks are, each counted where it is: see [`Core::counts`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Blocks that can be handed out, without the null block.
    pub total: usize,
    /// Free in the bitmaps.
    pub in_bitmap: usize,
    /// Free in threads' magazines and in the depot.
    pub in_magazines: usize,
    /// Free, but some batch in flight may still read them.
    pub retired: usize,
    /// Free, and kept from being handed out: the destinations of moves, and what a pool that shrinks has collected.
    pub held: usize,
    /// Free, and set aside for urgent requests.
    pub reserved: usize,
    /// Owned by nobody, and kept for their bytes until a frame is needed.
    pub evictable: usize,
}

impl Counts {
    /// Blocks that any allocation can get now without evicting: without those that are set aside for urgent requests.
    pub fn free(&self) -> usize {
        self.in_bitmap + self.in_magazines
    }

    /// Blocks that any allocation can get now, if need be by evicting: [`free`](Self::free) and
    /// evictable ones.
    pub fn available(&self) -> usize {
        self.free() + self.evictable
    }

    /// Blocks that somebody owns.
    pub fn used(&self) -> usize {
        self.total.saturating_sub(self.free() + self.retired + self.held + self.reserved + self.evictable)
    }
}

impl Core {
    /// Counts blocks by where they are, without a walk over the bitmaps: O(threads). Exact when
    /// nobody is allocating or freeing. Beside threads that do, each number is of about this
    /// moment, and they need not add up.
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
            // What no batch can see any more is got by the next allocation that needs it.
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
            // Whoever releases a block that is moving counts its frame in, perhaps after the mover counted it out.
            held: (self.space.held.load(Relaxed) as isize).max(0) as usize,
            reserved: self.space.reserve.held(),
            evictable: self.evictable(),
        }
    }
}

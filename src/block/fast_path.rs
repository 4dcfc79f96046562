//! The fast path: a few blocks out of, or into, the magazine that the thread has loaded.
//!
//! Every rare case declines it: an empty or full magazine, a visitor, a failed device, a batch in
//! flight, a waiting request, a pool other than the one used last. The slow path (`allocate`,
//! `release`) handles all of these.

use crate::frame::MagazinePair;
use crate::ids::{BlockId, FrameId};

use super::allocate::own;
use super::thread_cache::CacheRef;
use super::{AllocRequest, Blocks, INLINE_BLOCKS};

/// A block that has just become owned.
pub(crate) struct Owned {
    pub(crate) id: BlockId,
    pub(crate) frame: FrameId,
}

impl Blocks {
    /// Allocates one block. `None`: nothing was done, take the slow path.
    #[inline]
    pub(crate) fn allocate_one(&self, request: &AllocRequest) -> Option<Owned> {
        let cache = self.recent_thread_cache()?;
        let clock = self.space.clock.read();
        if request.device.is_some() || clock.is_lost() {
            return None;
        }
        let frame = cache.enter_magazines(|magazines| magazines.pop_loaded())??;
        cache.counters().allocated_one();
        let id = own(self.space.table.view(), frame, request, clock.newest());
        Some(Owned { id, frame })
    }

    /// Puts a free frame into the loaded magazine. False: nothing was done, take the slow path.
    #[inline]
    pub(super) fn give_back_one(&self, cache: Option<CacheRef<'_>>, frame: FrameId) -> bool {
        self.give_back_with(cache, 1, |magazines| magazines.push_loaded(frame))
    }

    /// Allocates at most [`INLINE_BLOCKS`] blocks, and passes each to `take`, with its index.
    /// False: nothing was done, take the slow path.
    #[inline]
    pub(crate) fn allocate_inline(&self, request: &AllocRequest, mut take: impl FnMut(usize, Owned)) -> bool {
        let Some(cache) = self.recent_thread_cache() else { return false };
        let (count, clock) = (request.blocks, self.space.clock.read());
        if clock.is_lost() {
            return false;
        }
        if count.wrapping_sub(1) >= INLINE_BLOCKS
            || request.device.is_some()
            || (request.contiguous && count > 1)
        {
            return false;
        }
        let mut frames = [FrameId(0); INLINE_BLOCKS];
        if cache.enter_magazines(|magazines| magazines.pop_all(&mut frames[..count])) != Some(true) {
            return false;
        }
        cache.counters().allocated(count);
        let (table, now) = (self.space.table.view(), clock.newest());
        for (i, &frame) in frames[..count].iter().enumerate() {
            take(i, Owned { id: own(table, frame, request, now), frame });
        }
        true
    }

    /// Puts free frames into the loaded magazine. False: nothing was done, take the slow path.
    #[inline]
    pub(super) fn give_back_inline(&self, cache: Option<CacheRef<'_>>, frames: &[FrameId]) -> bool {
        self.give_back_with(cache, frames.len(), |magazines| magazines.push_all(frames))
    }

    #[inline]
    fn give_back_with(
        &self,
        cache: Option<CacheRef<'_>>,
        frames: usize,
        push: impl FnOnce(&mut MagazinePair) -> bool,
    ) -> bool {
        let section = |magazines: &mut MagazinePair| {
            // After the release: the frames are ours, so every batch that saw them is visible to
            // this load. Inside the section: a waiting request meets us here, or we see that it
            // waits.
            self.space.clock.read().is_quiet() && push(magazines)
        };
        !self.space.wipes()
            && cache.is_some_and(|cache| {
                let is_given = cache.enter_magazines(section) == Some(true);
                if is_given {
                    cache.counters().freed(frames);
                }
                is_given
            })
    }
}

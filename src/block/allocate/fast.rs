//! The fast path: a few blocks out of the thread's loaded magazine. Declines in every rare case: an
//! empty magazine, a visitor, a failed device, a pool other than the one used last.

use crate::ids::{BlockId, FrameId};

use super::own::own;
use crate::block::core::Blocks;
use crate::block::request::AllocRequest;
use crate::block::thread_cache::INLINE_BLOCKS;

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

    /// Allocates at most [`INLINE_BLOCKS`] blocks, like [`allocate_one`](Self::allocate_one).
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
}

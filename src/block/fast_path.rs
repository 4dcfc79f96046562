//! The fast path: a few blocks out of, or into, the magazine that the thread has loaded.
//!
//! Every rare case declines it: an empty or full magazine, a visitor, a failed device, a batch in
//! flight, a waiting request, a pool other than the one used last. The slow path (`allocate`,
//! `release`) handles all of these.

use crate::frame::MagazinePair;
use crate::ids::{BlockId, FrameId, SequenceId};

use super::thread_cache::CacheRef;
use super::{AllocRequest, Blocks, INLINE_BLOCKS, Ownership};

impl Blocks {
    /// Allocates one block, guarded or not. `None`: nothing was done, take the slow path.
    #[inline]
    pub(crate) fn allocate_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<BlockId> {
        self.allocate_one_at::<GUARDED>(self.recent_thread_cache()?, request)
    }

    #[inline]
    pub(super) fn allocate_one_at<const GUARDED: bool>(
        &self,
        cache: CacheRef<'_>,
        request: &AllocRequest,
    ) -> Option<BlockId> {
        let clock = self.space.clock.read();
        if request.device.is_some() || clock.is_lost() {
            return None;
        }
        let frame = cache.enter_magazines(|magazines| magazines.pop_loaded())??;
        let sequence = request.sequence.unwrap_or(SequenceId::NONE);
        Some(self.own(frame, request, sequence, clock.newest(), Ownership::of(GUARDED)))
    }

    /// Puts a free frame into the loaded magazine. False: nothing was done, take the slow path.
    #[inline]
    pub(super) fn give_back_one(&self, cache: Option<CacheRef<'_>>, frame: FrameId) -> bool {
        self.give_back_with(cache, |magazines| magazines.push_loaded(frame))
    }

    /// Allocates `request.blocks` blocks into the front of `out`. False: nothing was done, take the
    /// slow path.
    #[inline]
    pub(crate) fn allocate_inline<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        out: &mut [BlockId; INLINE_BLOCKS],
    ) -> bool {
        match self.recent_thread_cache() {
            Some(cache) => self.allocate_inline_at::<GUARDED>(cache, request, out),
            None => false,
        }
    }

    #[inline]
    pub(super) fn allocate_inline_at<const GUARDED: bool>(
        &self,
        cache: CacheRef<'_>,
        request: &AllocRequest,
        out: &mut [BlockId; INLINE_BLOCKS],
    ) -> bool {
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
        let (sequence, now) = (request.sequence.unwrap_or(SequenceId::NONE), clock.newest());
        for (id, &frame) in out.iter_mut().zip(&frames[..count]) {
            *id = self.own(frame, request, sequence, now, Ownership::of(GUARDED));
        }
        true
    }

    /// Puts free frames into the loaded magazine. False: nothing was done, take the slow path.
    #[inline]
    pub(super) fn give_back_inline(&self, cache: Option<CacheRef<'_>>, frames: &[FrameId]) -> bool {
        self.give_back_with(cache, |magazines| magazines.push_all(frames))
    }

    #[inline]
    fn give_back_with(
        &self,
        cache: Option<CacheRef<'_>>,
        push: impl FnOnce(&mut MagazinePair) -> bool,
    ) -> bool {
        let section = |magazines: &mut MagazinePair| {
            // After the release: the frames are ours, so every batch that saw them is visible to
            // this load. Inside the section: a waiting request meets us here, or we see that it
            // waits.
            self.space.clock.read().is_quiet() && push(magazines)
        };
        !self.space.wipes() && cache.is_some_and(|cache| cache.enter_magazines(section) == Some(true))
    }
}

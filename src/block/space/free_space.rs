//! The free frames outside of thread caches, on which modules below [`Core`](crate::block::Core)
//! depend.

use crate::clock::Clock;
use crate::frame::{Depot, FrameMask, Frames};
use crate::ids::{FrameId, Run};
use crate::sync::{AtomicUsize, CachePadded, Ordering::*, caught};

use super::reserve::{Reserve, ReservedFrames};
use super::wake_guard::{Announce, WakeGuard};
use crate::block::state::{BlockWord, Table};

/// Wipes the bytes of free frames.
pub trait Scrub: Send + Sync {
    /// Wipes the frames. After a panic, they are never handed out again.
    fn wipe(&self, run: Run);

    /// Returns whether the calling thread must not wait for the end of a wipe.
    fn is_deferred(&self) -> bool {
        false
    }

    /// Begins a wipe; without a panic, [`Core::wiped`](crate::block::Core::wiped) must end it.
    fn begin_wipe(&self, run: Run) {
        let _ = run;
    }
}

impl<F: Fn(Run) + Send + Sync> Scrub for F {
    fn wipe(&self, run: Run) {
        self(run);
    }
}

/// Frees frames one by one, at the latest when dropped; changes the bitmaps once per leaf.
pub(in crate::block) struct FreedFrames<'a> {
    space: &'a FreeSpace,
    mask: FrameMask,
}

impl<'a> FreedFrames<'a> {
    pub(in crate::block) fn new(space: &'a FreeSpace) -> Self {
        Self { space, mask: FrameMask { base: FrameId(0), bits: 0 } }
    }

    #[inline]
    pub(in crate::block) fn push(&mut self, frame: FrameId) {
        let one = FrameMask::of(frame);
        if one.base != self.mask.base {
            self.flush();
            self.mask.base = one.base;
        }
        self.mask.bits |= one.bits;
    }

    fn flush(&mut self) {
        if self.mask.bits != 0 {
            self.space.free_mask(self.mask);
            self.mask.bits = 0;
        }
    }
}

impl Drop for FreedFrames<'_> {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Frames, the words of the blocks in them, and the clock.
pub struct FreeSpace {
    pub(in crate::block) table: Table,
    pub(in crate::block) frames: Frames,
    pub(in crate::block) depot: Depot,
    pub(in crate::block) clock: Clock,
    pub(in crate::block) reserve: Reserve,
    pub(in crate::block) held: CachePadded<AtomicUsize>,
    unwiped: AtomicUsize,
    scrub: Option<Box<dyn Scrub>>,
}

impl FreeSpace {
    pub(in crate::block) fn new(
        table: Table,
        frames: Frames,
        depot: Depot,
        reserve: Reserve,
        scrub: Option<Box<dyn Scrub>>,
    ) -> Self {
        Self {
            table,
            frames,
            depot,
            clock: Clock::default(),
            reserve,
            held: CachePadded::new(AtomicUsize::new(0)),
            unwiped: AtomicUsize::new(0),
            scrub,
        }
    }

    /// Holds a frame until [`release_held`](Self::release_held), or until a move gives it away.
    /// Panics if the block is owned or already held.
    pub(crate) fn hold_frame(&self, frame: FrameId) {
        self.set_held(frame, BlockWord::hold);
        // Relaxed, here and below: statistics.
        self.held.fetch_add(1, Relaxed);
    }

    /// Gives a [held](Self::hold_frame) frame back to the bitmaps. Panics if it is not held.
    pub(crate) fn release_held(&self, frame: FrameId) {
        self.unhold_frame(frame);
        self.free_run(Run { start: frame, len: 1 });
    }

    pub(in crate::block) fn unhold_frame(&self, frame: FrameId) {
        self.set_held(frame, BlockWord::unhold);
        self.held.fetch_sub(1, Relaxed);
    }

    pub(in crate::block) fn set_held(
        &self,
        frame: FrameId,
        transition: impl Fn(BlockWord) -> Option<BlockWord>,
    ) {
        let atomic = self.table.word(self.table.block_at(frame));
        // Relaxed: the frame came to us by an Acquire, and with it the word of its last owner.
        let word = BlockWord::from_bits(atomic.load(Relaxed));
        let Some(next) = transition(word).filter(|_| word.frame() == frame) else {
            panic!("frame {frame} held or unheld without ownership: {word:?}")
        };
        // A plain store: no other thread writes the word of a free block whose frame is ours.
        // Release: a stale handle that reads it must not be ordered before the free.
        atomic.store(next.to_bits(), Release);
    }

    fn free_mask(&self, mask: FrameMask) {
        if self.wipes() || self.reserve.is_short() {
            mask.runs().for_each(|run| self.free_run(run));
        } else {
            self.frames.free_mask(mask);
        }
    }

    /// Frees frames that are unowned and unseen: first into the reserve, then into the bitmaps.
    pub(in crate::block) fn free_run(&self, run: Run) {
        if self.wipe(run) {
            self.free_wiped(run);
        }
    }

    fn free_wiped(&self, mut run: Run) {
        if self.reserve.is_short() {
            run = self.reserve.fill(run);
        }
        if run.len > 0 {
            self.frames.free_run(run);
        }
    }

    #[inline]
    pub(in crate::block) fn wipes(&self) -> bool {
        self.scrub.is_some()
    }

    /// Wipes free frames of the caller, if the pool wipes. False: only begun, or failed and held
    /// permanently. Does not propagate panics: destructors free frames. Reached by
    /// `storage_faults`.
    #[inline]
    #[must_use = "frames that were not wiped must not be handed out"]
    pub(in crate::block) fn wipe(&self, run: Run) -> bool {
        match &self.scrub {
            None => true,
            Some(scrub) => self.wipe_with(&**scrub, run),
        }
    }

    #[inline(never)]
    fn wipe_with(&self, scrub: &dyn Scrub, run: Run) -> bool {
        if scrub.is_deferred() {
            run.frames().for_each(|frame| self.hold_frame(frame));
            if caught(|| scrub.begin_wipe(run)).is_none() {
                self.end_wipe(run, false);
            }
            return false;
        }
        let wiped = caught(|| scrub.wipe(run)).is_some();
        if !wiped {
            run.frames().for_each(|frame| self.hold_frame(frame));
            self.unwiped.fetch_add(run.len as usize, Relaxed);
        }
        wiped
    }

    pub(in crate::block) fn end_wipe(&self, run: Run, is_wiped: bool) {
        if is_wiped {
            run.frames().for_each(|frame| self.unhold_frame(frame));
            self.free_wiped(run);
        } else {
            self.unwiped.fetch_add(run.len as usize, Relaxed);
        }
    }

    /// Returns the number of blocks that are held because their frames could not be wiped.
    pub fn unwiped(&self) -> usize {
        self.unwiped.load(Relaxed)
    }

    /// Takes `count` frames out of the reserve: all or none.
    pub(in crate::block) fn take_reserved(
        &self,
        count: usize,
        _: &WakeGuard<'_, impl Announce>,
    ) -> Option<ReservedFrames> {
        if count > self.reserve.mark() {
            return None;
        }
        let taken: ReservedFrames = std::iter::from_fn(|| self.reserve.pop()).take(count).collect();
        if taken.len() < count {
            taken.iter().for_each(|&frame| self.reserve_frame(frame));
            return None;
        }
        if !taken.is_empty() {
            // After taking: the thread that clears the bit re-reads the reserve afterwards.
            self.clock.set_awaited();
        }
        Some(taken)
    }

    fn reserve_frame(&self, frame: FrameId) {
        let rest = self.reserve.fill(Run { start: frame, len: 1 });
        if rest.len > 0 {
            self.frames.free_run(rest);
        }
    }

    /// Fills the reserve by hints: frames that they miss are being freed, and are announced.
    pub(in crate::block) fn top_up(&self) {
        let short = self.reserve.mark().saturating_sub(self.reserve.held());
        if short > 0 && self.reserve.is_short() {
            self.frames.allocate_with_reserved(short as u32, FrameId(0), &mut |run| {
                // Other threads may have filled it meanwhile. The caller announces the rest.
                let rest = self.reserve.fill(run);
                if rest.len > 0 {
                    self.frames.free_run(rest);
                }
            });
        }
    }
}

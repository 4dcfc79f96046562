//! The low-water reserve: frames set aside for urgent requests.
//!
//! They are in no bitmap and no magazine, so no other request finds them. An urgent request takes
//! them after all other steps of the allocation.
//!
//! - At most `mark` frames are in it: unowned, unseen by batches, and wiped if the pool wipes.
//! - While it holds fewer, the clock's word is *awaited*: every free takes the slow path, and tops
//!   it up before any request gets what was freed. The end of a batch tops it up from the retire
//!   lists of all threads. A taker sets the bit after taking; the thread that clears it re-reads
//!   the reserve afterwards (see [`wait`](crate::block::wait)).
//!
//! A shrink [vacates](crate::block::Core::vacate_reserve) the reserve's frames in its region.
//! Contiguous requests do not take from the reserve; a run may go through it.

use smallvec::SmallVec;

use crate::config::MAGAZINE_BLOCKS_MAX;
use crate::frame::Stock;
use crate::ids::{FrameId, Run};
use crate::sync::{AtomicUsize, Ordering::*};

use super::wake_guard::{Announce, WakeGuard};

pub(in crate::block) struct Reserve {
    stock: Stock<FrameId>,
    mark: usize,
    /// Incremented before a push and decremented after a pop: never too low.
    held: AtomicUsize,
}

pub(in crate::block) type ReservedFrames = SmallVec<[FrameId; MAGAZINE_BLOCKS_MAX]>;

impl Reserve {
    pub(in crate::block) fn new(mark: usize) -> Self {
        Self { stock: Stock::new(mark), mark, held: AtomicUsize::new(0) }
    }

    #[inline]
    pub(in crate::block) fn mark(&self) -> usize {
        self.mark
    }

    pub(in crate::block) fn held(&self) -> usize {
        // Relaxed: a statistic.
        self.held.load(Relaxed)
    }

    #[inline]
    pub(in crate::block) fn is_short(&self) -> bool {
        self.stock.has_room()
    }

    /// Adds as many of a run's first frames as fit, and returns the rest.
    pub(in crate::block) fn fill(&self, mut run: Run) -> Run {
        while run.len > 0 && self.push(run.start) {
            run = Run { start: FrameId(run.start.0 + 1), len: run.len - 1 };
        }
        run
    }

    fn push(&self, frame: FrameId) -> bool {
        self.held.fetch_add(1, Relaxed);
        let pushed = self.stock.push(frame).is_ok();
        if !pushed {
            self.held.fetch_sub(1, Relaxed);
        }
        pushed
    }

    pub(super) fn pop(&self) -> Option<FrameId> {
        let frame = self.stock.pop()?;
        self.held.fetch_sub(1, Relaxed);
        Some(frame)
    }

    /// Removes the frames for which `leaves` is true. Counts all meanwhile, so that a request that
    /// finds the reserve empty tries again.
    pub(in crate::block) fn sift(
        &self,
        _: &WakeGuard<'_, impl Announce>,
        mut leaves: impl FnMut(FrameId) -> bool,
    ) -> ReservedFrames {
        let all: ReservedFrames = std::iter::from_fn(|| self.stock.pop()).take(self.mark).collect();
        // If other threads filled it meanwhile, some of the frames that should stay do not fit.
        let removed: ReservedFrames =
            all.into_iter().filter(|&frame| leaves(frame) || self.stock.push(frame).is_err()).collect();
        self.held.fetch_sub(removed.len(), Relaxed);
        removed
    }
}

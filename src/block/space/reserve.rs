//! The low-water reserve: frames that are set aside for urgent requests.
//!
//! They are in no bitmap and no magazine, so no other request finds them and other allocations pay
//! nothing for them. An urgent request takes from the reserve when everything else is used up: the
//! last rung of the ladder.
//!
//! # Invariants
//!
//! - At most `mark` frames are in the reserve, and they are free: unowned, unseen by batches, and
//!   wiped if the pool wipes.
//! - While it is short of its mark, the clock's word is *awaited*, as if the reserve were waiting
//!   in the queue: every free takes the slow path, and tops it up before any request gets what was
//!   freed. A taker sets the bit after taking; the thread that clears it re-reads the reserve
//!   afterwards (see [`wait`](crate::block::wait)).
//!
//! A pool that shrinks [vacates](crate::block::Core::vacate_reserve) the reserve's frames in the
//! region to be removed. It does not shrink below the reserve and one block.
//!
//! Contiguous requests cannot take from it: its frames came back one by one and are no run. They
//! are not blocked by it either: where its frames interrupt a run, others are set aside instead.

use smallvec::SmallVec;

use crate::config::MAGAZINE_BLOCKS_MAX;
use crate::frame::Stock;
use crate::ids::{FrameId, Run};
use crate::sync::{AtomicUsize, Ordering::*};

use super::wake_guard::{Announce, WakeGuard};

/// Frames set aside, and the number that there should be.
pub(in crate::block) struct Reserve {
    stock: Stock<FrameId>,
    mark: usize,
    /// Number of frames in the stock. Incremented before a push and decremented after a pop, so
    /// that it never reads too low.
    held: AtomicUsize,
}

/// Frames taken out of the reserve.
pub(in crate::block) type ReservedFrames = SmallVec<[FrameId; MAGAZINE_BLOCKS_MAX]>;

impl Reserve {
    /// Creates an empty reserve that should hold `mark` frames.
    pub(in crate::block) fn new(mark: usize) -> Self {
        Self { stock: Stock::new(mark), mark, held: AtomicUsize::new(0) }
    }

    /// Returns the number of frames that it should hold.
    #[inline]
    pub(in crate::block) fn mark(&self) -> usize {
        self.mark
    }

    /// Returns the number of frames that it holds; exact while no thread takes or fills.
    pub(in crate::block) fn held(&self) -> usize {
        // Relaxed: a statistic.
        self.held.load(Relaxed)
    }

    /// Returns whether it holds fewer frames than it should.
    #[inline]
    pub(in crate::block) fn is_short(&self) -> bool {
        self.stock.has_room()
    }

    /// Takes in as many of a run's first frames as fit, and returns the rest.
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

    /// Removes the frames for which `leaves` is true. All frames stay counted meanwhile, so that a
    /// request that finds the reserve empty tries again.
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

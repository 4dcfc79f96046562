//! The low-water reserve: frames that are set aside for urgent requests.
//!
//! They are in no bitmap and no magazine, so that no other request comes upon them and nothing else pays for them. An
//! urgent request takes from here when there is nothing left anywhere else: the last rung of the ladder.
//!
//! # Invariants
//!
//! - At most `mark` frames are in the reserve, and they are free: nobody owns them, no batch sees them, their bytes are
//!   wiped if the pool wipes.
//! - While it is short of its mark, the clock's word is *awaited*, as if the reserve were waiting in line: every free
//!   goes the long way, and tops it up before anybody else gets what was freed. Who takes sets the bit after taking; who
//!   clears it looks at the reserve afterwards (see [`waiters`](crate::block::waiters)).
//!
//! A pool that shrinks [vacates](Core::vacate_reserve) what lies in the frames that are to go, and does not shrink to less
//! than the reserve and one block.
//!
//! It is not there for contiguous requests: single frames that came back by chance are no run. Nor does it stand in their
//! way: where it lies in between, other frames are set aside in place of those.

use smallvec::SmallVec;

use crate::config::MAGAZINE_BLOCKS_MAX;
use crate::frame::Stock;
use crate::ids::{FrameId, Run};
use crate::sync::{AtomicUsize, Ordering::*};

use super::custody::{Announce, Custody};

/// See the [module](self).
pub(in crate::block) struct Reserve {
    stock: Stock<FrameId>,
    mark: usize,
    /// Frames in the stock. Counted up before a push and down after a pop, so that it never reads too low.
    held: AtomicUsize,
}

/// Frames taken out of the reserve.
pub(in crate::block) type Taken = SmallVec<[FrameId; MAGAZINE_BLOCKS_MAX]>;

impl Reserve {
    /// An empty reserve that should hold `mark` frames.
    pub(in crate::block) fn new(mark: usize) -> Self {
        Self { stock: Stock::new(mark), mark, held: AtomicUsize::new(0) }
    }

    /// Frames that it should hold.
    #[inline]
    pub(in crate::block) fn mark(&self) -> usize {
        self.mark
    }

    /// Frames that it holds; exact when nobody takes or fills.
    pub(in crate::block) fn held(&self) -> usize {
        // Relaxed: a statistic.
        self.held.load(Relaxed)
    }

    /// Whether it holds fewer frames than it should.
    #[inline]
    pub(in crate::block) fn is_short(&self) -> bool {
        self.stock.has_room()
    }

    /// Takes in the first frames of a run, as many as there is room for; the rest is the caller's.
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

    /// Takes out the frames that are to leave. The others are counted throughout, so that a request that finds none
    /// meanwhile asks again.
    pub(in crate::block) fn sift(
        &self,
        _: &Custody<'_, impl Announce>,
        mut leaves: impl FnMut(FrameId) -> bool,
    ) -> Taken {
        let all: Taken = std::iter::from_fn(|| self.stock.pop()).take(self.mark).collect();
        // Those that others have filled it up with meanwhile make some of ours leave.
        let gone: Taken =
            all.into_iter().filter(|&frame| leaves(frame) || self.stock.push(frame).is_err()).collect();
        self.held.fetch_sub(gone.len(), Relaxed);
        gone
    }
}

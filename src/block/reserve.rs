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
//!   clears it looks at the reserve afterwards (see [`waiters`](super::waiters)).
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

use super::blocks::Core;
use super::custody::Custody;
use super::{AllocRequest, Priority};

/// See the [module](self).
pub(super) struct Reserve {
    stock: Stock<FrameId>,
    mark: usize,
    /// Frames in the stock. Counted up before a push and down after a pop, so that it never reads too low.
    held: AtomicUsize,
}

/// Frames taken out of the reserve.
pub(super) type Taken = SmallVec<[FrameId; MAGAZINE_BLOCKS_MAX]>;

impl Reserve {
    /// An empty reserve that should hold `mark` frames.
    pub(super) fn new(mark: usize) -> Self {
        Self { stock: Stock::new(mark), mark, held: AtomicUsize::new(0) }
    }

    /// Frames that it should hold.
    #[inline]
    pub(super) fn mark(&self) -> usize {
        self.mark
    }

    /// Frames that it holds; exact when nobody takes or fills.
    pub(super) fn held(&self) -> usize {
        // Relaxed: a statistic.
        self.held.load(Relaxed)
    }

    /// Whether it holds fewer frames than it should.
    #[inline]
    pub(super) fn is_short(&self) -> bool {
        self.stock.has_room()
    }

    /// Takes in the first frames of a run, as many as there is room for; the rest is the caller's.
    pub(super) fn fill(&self, mut run: Run) -> Run {
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

    fn pop(&self) -> Option<FrameId> {
        let frame = self.stock.pop()?;
        self.held.fetch_sub(1, Relaxed);
        Some(frame)
    }

    /// Takes out the frames that are to leave. The others are counted throughout, so that a request that finds none
    /// meanwhile asks again.
    fn sift(&self, _: &Custody<'_>, mut leaves: impl FnMut(FrameId) -> bool) -> Taken {
        let all: Taken = std::iter::from_fn(|| self.stock.pop()).take(self.mark).collect();
        // Those that others have filled it up with meanwhile make some of ours leave.
        let gone: Taken =
            all.into_iter().filter(|&frame| leaves(frame) || self.stock.push(frame).is_err()).collect();
        self.held.fetch_sub(gone.len(), Relaxed);
        gone
    }
}

impl Core {
    /// Frames of the reserve that a request may take.
    pub(super) fn reserved_for(&self, request: &AllocRequest) -> usize {
        let takes_runs = request.contiguous && request.blocks > 1;
        if request.priority == Priority::Urgent && !takes_runs { self.reserve.held() } else { 0 }
    }

    /// Takes exactly so many frames out of the reserve, or none.
    pub(super) fn take_reserved(&self, count: usize, _: &Custody<'_>) -> Option<Taken> {
        if count > self.reserve.mark {
            return None;
        }
        let taken: Taken = std::iter::from_fn(|| self.reserve.pop()).take(count).collect();
        if taken.len() < count {
            // Others took the rest, or will fill it up meanwhile.
            taken.iter().for_each(|&frame| self.reserve_frame(frame));
            return None;
        }
        if !taken.is_empty() {
            // After the taking: whoever clears the bit looks at the reserve afterwards.
            self.clock.set_awaited();
        }
        Some(taken)
    }

    /// Puts a free frame into the reserve, or, where it is full by now, into the bitmaps.
    fn reserve_frame(&self, frame: FrameId) {
        let rest = self.reserve.fill(Run { start: frame, len: 1 });
        if rest.len > 0 {
            self.frames.free_run(rest);
        }
    }

    /// Fills the reserve from the bitmaps, as far as it is short. Every free comes by here while it is, so that it takes
    /// what hints lead to: what they miss is being freed, and is announced.
    pub(super) fn top_up(&self) {
        let short = self.reserve.mark.saturating_sub(self.reserve.held());
        if short > 0 && self.reserve.is_short() {
            self.frames.allocate_some(short as u32, FrameId(0), &mut |run| {
                // Others may have filled it meanwhile. The caller announces what goes back.
                let rest = self.reserve.fill(run);
                if rest.len > 0 {
                    self.frames.free_run(rest);
                }
            });
        }
    }

    /// Frees the reserve's frames that lie in `region`, which allocations avoid; the reserve is then topped up from elsewhere.
    /// Frames that are freed into the region later can come into the reserve again.
    pub(super) fn vacate_reserve(&self, region: Run) {
        if self.reserve.mark == 0 {
            return;
        }
        // Announced whatever becomes of them.
        let custody = self.custody();
        let gone = self.reserve.sift(&custody, |frame| (region.start.0..region.end()).contains(&frame.0));
        for &frame in &gone {
            self.frames.free_run(Run { start: frame, len: 1 });
        }
        if !gone.is_empty() {
            self.clock.set_awaited();
        }
    }

    /// Sets the reserve aside anew, from what is free by now: frames that came one by one lie together then, as far as the
    /// free ones do. For a moment they are anybody's.
    pub fn renew_reserve(&self) {
        self.vacate_reserve(Run { start: FrameId(0), len: self.total_frames() as u32 });
    }

    /// A run of which the reserve has some frames: others are set aside in their place. Reached by
    /// `the_reserve_makes_way_for_a_run`.
    pub(super) fn run_through_reserve(&self, len: u32, near: FrameId, custody: &Custody<'_>) -> Option<Run> {
        if self.reserve.held() == 0 {
            return None;
        }
        for frame in self.reserve.sift(custody, |_| true) {
            self.frames.free_run(Run { start: frame, len: 1 });
        }
        let run = self.frames.allocate_run(len, near).or_else(|| self.evict_run(len as usize, custody));
        self.top_up();
        self.evict_for_reserve();
        if self.reserve.is_short() {
            // Others were faster. After the taking, as always.
            self.clock.set_awaited();
        }
        run
    }

    /// Evicts what the reserve is short of.
    pub(super) fn evict_for_reserve(&self) {
        if self.reserve.is_short() {
            self.evict_free(self.reserve.mark.saturating_sub(self.reserve.held()));
        }
    }

    /// The frames in the reserve, for an audit.
    pub(super) fn for_each_reserved(&self, custody: &Custody<'_>, mut f: impl FnMut(FrameId)) {
        let gone = self.reserve.sift(custody, |frame| {
            f(frame);
            false
        });
        gone.iter().for_each(|&frame| self.frames.free_run(Run { start: frame, len: 1 }));
    }
}

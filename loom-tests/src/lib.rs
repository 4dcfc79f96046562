//! Shared code of the models: a bounded checker that reports the executions it explored, and a pool
//! with cells that stand for the bytes of its frames.
//!
//! Limits of the checker, which every claim made here inherits:
//! - It explores C11 executions without load buffering.
//! - It treats SeqCst *accesses* as AcqRel (kvpool has none; its store-load orders are explicit
//!   fences, which are modelled).
//! - The number of preemptions is bounded (2, or the model's own number, or a larger
//!   `LOOM_MAX_PREEMPTIONS`), which hides schedules that need more.
//! - A model has at most five threads.
//! - The checks at the end of a model are not explored against the destructors that a thread runs
//!   after it was joined ([`end_exploring`](kvpool::testing::end_exploring)).
//! - A light fence orders against heavy fences alone, as in production (see `sync/asymmetric` of
//!   kvpool).
//! - A `fence(SeqCst)` is stronger than the language's: operations after it happen after those
//!   before an earlier one, so that it hides a missing Acquire or Release between the two.
//! - The checker remembers one last access for each atomic: it does not play a load against another
//!   thread's later change if that thread itself loaded the same atomic in between. A model that
//!   explores one execution suffers from this, and needs a conflicting access elsewhere.
#![cfg(kvpool_loom)]

mod blocks;
mod cached;
mod memory;
mod stop;
mod tasks;

pub use blocks::{TouchedBlocks, conclude, join_last, settle};
pub use cached::CachedBlocks;
pub use kvpool::testing::end_exploring;
pub use memory::Memory;
pub use stop::Stop;
pub use tasks::{Bell, block_on, boxed, lull};

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use kvpool::frame::{FrameConfig, FrameMask, Frames};
use kvpool::{FrameId, Order, Run};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// Explores `model` and prints the number of executions.
///
/// # Panics
/// If an execution fails.
pub fn check(name: &str, model: impl Fn() + Send + Sync + 'static) {
    check_to(2, name, model);
}

/// Explores a small model that can afford `preemptions` of them. `LOOM_MAX_PREEMPTIONS` raises the
/// bound, and `KVPOOL_LOOM_PREEMPTIONS_MAX` lowers it.
///
/// # Panics
/// If an execution fails.
pub fn check_to(preemptions: usize, name: &str, model: impl Fn() + Send + Sync + 'static) {
    let capped = preemptions.min(number("KVPOOL_LOOM_PREEMPTIONS_MAX").unwrap_or(usize::MAX));
    let check = kvpool::testing::Check::new(name).preemptions(capped);
    if let Err(cause) = catch_unwind(AssertUnwindSafe(|| check.run(model))) {
        if is_set("KVPOOL_MUTANT") {
            // One failing model suffices to catch a planted bug; the others need not be explored
            // completely.
            eprintln!("planted bug caught by {name}");
            std::process::exit(101);
        }
        resume_unwind(cause);
    }
}

/// Explores a model with very many executions. With `KVPOOL_LOOM_QUICK` set it explores one
/// preemption less.
///
/// # Panics
/// If an execution fails.
pub fn check_wide(preemptions: usize, name: &str, model: impl Fn() + Send + Sync + 'static) {
    check_to(preemptions - usize::from(is_set("KVPOOL_LOOM_QUICK")), name, model);
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some()
}

fn number(variable: &str) -> Option<usize> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{variable}={value} is not a number")))
}

/// A pool of frames, and a cell for each frame that stands for its bytes: two owners at once, or an
/// owner that does not see the previous one's writes, is a causality violation that the checker
/// reports.
pub struct Touched {
    /// The pool under test.
    pub frames: Frames,
    cells: Vec<UnsafeCell<u32>>,
}

// SAFETY: a cell is accessed by the owner of its frame only. The models check exactly this.
unsafe impl Sync for Touched {}

impl Touched {
    /// Creates a pool of `frames` free frames, in segments of 16 (4 units of 4).
    pub fn new(frames: usize) -> Arc<Self> {
        Self::growing(frames, frames, 16)
    }

    /// Creates a pool that can grow, in segments of `segment_frames`.
    pub fn growing(frames: usize, frames_max: usize, segment_frames: usize) -> Arc<Self> {
        let frames = Frames::new(FrameConfig { frames, frames_max, segment_frames });
        Arc::new(Self { frames, cells: (0..frames_max).map(|_| UnsafeCell::new(0)).collect() })
    }

    /// Accesses the frames of a run, as their owner.
    pub fn touch(&self, run: Run) {
        for frame in run.frames() {
            // SAFETY: the caller owns the frame; the checker verifies it.
            self.cells[frame.index()].with_mut(|bytes| unsafe { *bytes += 1 });
        }
    }

    /// Accesses the frames of a mask, as their owner.
    pub fn touch_mask(&self, mask: FrameMask) {
        mask.frames().for_each(|frame| self.touch(Run { start: frame, len: 1 }));
    }

    /// Allocates a run and accesses it.
    pub fn take(&self, len: u32, near: u32) -> Option<Run> {
        let run = self.frames.allocate_run(len, FrameId(near))?;
        self.touch(run);
        Some(run)
    }

    /// Accesses a run once more and frees it.
    pub fn put(&self, run: Run) {
        self.touch(run);
        self.frames.free_run(run);
    }

    /// Accesses frames once more and frees them.
    pub fn put_mask(&self, mask: FrameMask) {
        self.touch_mask(mask);
        self.frames.free_mask(mask);
    }

    /// Claims exactly this run, accesses it, and frees it; returns false if it was not free.
    pub fn pass(&self, run: Run) -> bool {
        let claimed = self.frames.claim(run);
        if claimed {
            self.put(run);
        }
        claimed
    }

    /// Ends a model: every frame is free, merged, hinted, and can be allocated.
    pub fn finish(&self) {
        let total = self.frames.total();
        self.frames.audit().unwrap();
        let census = self.frames.census(Order(0));
        assert_eq!((census.free, census.runs), (total, 1), "leaked, duplicated or not coalesced");
        let whole = self.take(total as u32, 0).expect("everything can be allocated");
        self.frames.free_run(whole);
    }
}

/// Returns the run `start .. start + len`.
pub fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

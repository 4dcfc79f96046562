//! Compaction: blocks move so that scattered frames, free or evictable, form runs.
//!
//! [`plan()`] is a pure function from a [`Snapshot`] of every frame to moves of blocks. It is only
//! a hint: a move whose block or destination is no longer available is cancelled by itself.
//!
//! # Objectives
//!
//! - The *fragmentation rate* at order `k` ([`Snapshot::fragmentation`]): one minus the number of
//!   free aligned runs of `2^k`, divided by the number that the free frames could form. Free frames
//!   outside of the bitmaps are in no run.
//! - Second, the *mean run of a sequence* ([`Snapshot::mean_sequence_run`]): blocks that are
//!   neighbours both in a sequence and in memory share one descriptor of a transfer.
//!
//! A broken run of a sequence costs a descriptor in every later transfer, so breaks have a
//! [price](FRAGMENTATION_PENALTY). Three kinds of frames have rules of their own:
//!
//! - *Frames reserved for growth*, after a growing list, are neither destinations nor holes to
//!   fill, except for a request that waits for a run at a given place.
//! - *Evictable* blocks are dropped from the frames to which others move, and stay in all others. A
//!   plan for an unchanged [`Snapshot`], and for a frame pool, moves them instead; so does a
//!   shrink, while there is room.
//! - *Fixed* blocks (unsealed, pinned or moving) stay. A report counts them.
//!
//! # Files
//!
//! `snapshot` the input · `goal` goals and plans · `plan` the planner, and why greedy is optimal ·
//! `plan/map` the snapshot as bitmaps · `plan/choose` the regions to empty · `plan/donors` the
//! frames to fill · `plan/steps` the steps that do not pay · `plan/place` which block moves to
//! which frame · `plan/window` goals at a given place · `turns` one run at a time.

mod bytes;
mod compactor;
mod copies;
mod copying;
mod error;
mod goal;
mod live;
mod options;
mod plan;
mod report;
mod resize;
mod snapshot;
mod stop;
mod task;
mod turns;

pub use crate::block::MoveCancelled;
pub use crate::storage::WAVE_BYTES;
pub use bytes::{Bytes, FrameCopier};
pub(crate) use compactor::Compactor;
pub use error::{Blocker, DefragError, ResizeError};
pub use goal::{FRAGMENTATION_PENALTY, Goal, Move, Plan, Shortfall, Step};
pub use options::{COPY_DEADLINE, DefragOptions};
pub use plan::plan;
pub use report::{
    CompactionState, DefragReport, DefragTotals, GivenUp, MoveCounts, OverdueCopy, ResizeReport,
};
pub use resize::ResizeOptions;
pub use snapshot::{FrameKind, FrameState, PLACE_MAX, Snapshot};
#[cfg(feature = "internals")]
pub use stop::Stop;
pub use task::{DefragConfig, Defragmenter};
#[cfg(feature = "internals")]
pub use turns::{Share, Turn, Turns};

//! Compaction: blocks move so that scattered frames, free or evictable, form runs.
//!
//! [`plan()`] is a pure function of a [`Snapshot`] of every frame at one moment. It returns which
//! blocks should move where: a hint, since a block may be freed, or a destination taken, before it
//! is carried out. Such a move is cancelled without affecting the others.
//!
//! # Objectives
//!
//! - The *fragmentation rate* at order `k` ([`Snapshot::fragmentation`]): one minus the number of
//!   free aligned runs of `2^k`, divided by the number that the free frames could form. Free frames
//!   outside of the bitmaps are in no run.
//! - The *mean run of a sequence* ([`Snapshot::mean_sequence_run`]), which comes second: blocks
//!   that are neighbours both in a sequence and in memory share one descriptor of a transfer.
//!
//! A run of a sequence that is broken costs a descriptor in every later transfer, so breaks have a
//! [price](FRAGMENTATION_PENALTY), and a plan that does not pay is empty. Three kinds of frames
//! deserve a rule:
//!
//! - *Frames reserved for growth* wait behind a list that grows. They are neither destinations nor
//!   holes to cure, except for a request that waits for a run at a given place.
//! - *Evictable* blocks are dropped from the frames to which others move, and stay in all others. A
//!   plan for a [`Snapshot`] as it is, and for a frame pool, moves them instead; so does a shrink,
//!   while there is room.
//! - *Fixed* blocks stay: unsealed, pinned or moving ones. A report counts them.
//!
//! # Files
//!
//! `snapshot` the input · `goal` goals and plans · `plan` the planner, and why greedy is enough ·
//! `plan/map` the snapshot as bitmaps · `plan/choose` which regions are emptied · `plan/donors`
//! which frames are filled · `plan/steps` which steps do not pay · `plan/place` which block goes to
//! which frame · `plan/window` the goals that concern a given place · `turns` one run at a time.

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

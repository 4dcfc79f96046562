//! Compaction: free frames that lie scattered become free runs, by moving the blocks between them.
//!
//! [`plan()`] is the pure half. It takes a [`Snapshot`], what every frame held at one moment, and says which blocks should
//! move where; it touches no pool, has no randomness and reads no clock, so that the same snapshot gives the same plan.
//! A plan is advice: by the time it is carried out a block may be gone or a destination taken, and that move is given
//! up, and no other suffers.
//!
//! # What is being improved
//!
//! - The *fragmentation rate* at order `k`: of the free aligned runs of `2^k` that there could be,
//!   the share that there is not ([`Snapshot::fragmentation`]). Frames that are free but not in the
//!   bitmaps are on no run.
//! - The *mean run of a sequence*: blocks that are neighbours in a sequence and in memory go in one descriptor of a
//!   transfer ([`Snapshot::mean_sequence_run`]). It comes second: of the plans that move the fewest blocks, one that
//!   joins runs of sequences, or breaks few.
//!
//! # Files
//!
//! `snapshot` the input · `plan` the interface, and why greedy is enough · `plan/map` the snapshot as bitmaps ·
//! `plan/choose` which regions are emptied · `plan/donors` which frames are filled · `plan/place` which block goes to
//! which of them · `plan/window` the goals that name a place.

mod bytes;
mod compactor;
mod copies;
mod error;
mod live;
mod plan;
mod report;
mod resize;
mod snapshot;
mod task;

pub use crate::block::GaveWay;
pub use bytes::{Bytes, FrameCopier};
pub use compactor::{COPY_DEADLINE, Compactor, DefragOptions, WAVE_BYTES};
pub use error::{Blocker, DefragError, ResizeError};
pub use plan::{Goal, Move, Plan, Shortfall, Step, plan};
pub use report::{DefragReport, DefragTotals, GivenUp, OverdueCopy, ResizeReport};
pub use resize::ResizeOptions;
pub use snapshot::{FrameKind, FrameState, PLACE_MAX, Snapshot};
pub use task::{DefragConfig, Defragmenter};

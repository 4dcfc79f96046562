//! Pools: the interface over all floors below.
//!
//! A [`Pool`] clones cheaply, and all clones are the same pool. [`PoolBuilder`] checks a
//! configuration and builds a pool. A [`Lease`] owns blocks. A [`PoolHandle`] is an explicit cache
//! for a task that moves between threads. [`Stats`], [`Fragmentation`] and the [audit](Pool::audit)
//! report a pool's state.

mod allocate;
mod builder;
mod compaction;
mod frame_pool;
mod handle;
mod lease;
mod leased;
mod migration;
mod pin;
#[expect(clippy::module_inception, reason = "the floor is named after its main type")]
mod pool;
mod stats;
mod waiting;

pub use crate::block::{
    AllocRequest, AuditError, AuditReport, BlockInfo, Counts, FramePlace, Latency, Priority, flush_thread,
};
pub use crate::compact::{
    DefragConfig, DefragError, DefragOptions, DefragReport, DefragTotals, Defragmenter, ResizeError,
    ResizeOptions, ResizeReport,
};
pub use crate::migrate::{BringBackReport, Carried, MigrateError, MigrationReport, OffloadReport};
pub use builder::{BuildError, PoolBuilder};
pub use frame_pool::{
    FrameBatch, FrameGroup, FrameInfo, FrameKey, FrameMoves, FramePool, FramePoolBuilder, MovedFrames,
};
pub use handle::PoolHandle;
pub use lease::Lease;
pub use migration::Target;
pub use pin::BlockPin;
pub use pool::Pool;
pub use stats::{Fragmentation, Pressure, Stats};

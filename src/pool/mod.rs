//! Pools: the public interface over all lower layers. [`PoolBuilder`] builds a [`Pool`], and a
//! [`Lease`] owns blocks. [`Stats`], [`Metrics`], [`Fragmentation`], [`SequenceRuns`], [`Owners`]
//! and the [audit](Pool::audit) report a pool's state.

mod admission;
mod allocate;
mod build_error;
mod builder;
mod cache;
mod compaction;
mod frame_pool;
mod hints;
mod layered;
mod lease;
mod leased;
mod metrics;
mod migration;
mod owners;
mod pin;
#[expect(clippy::module_inception, reason = "the floor is named after its main type")]
mod pool;
mod preemption;
mod resume;
mod scrub;
mod sequence_runs;
mod settled;
mod shape;
mod stats;
mod tenants;
mod transfer;
mod victims;
mod wait;
mod waiting;

pub use crate::block::{
    AllocRequest, AllocationCounts, AuditError, AuditReport, BlockInfo, Counts, FramePlace, Latency,
    LatencyBucket, LatencyHistogram, Priority, Refusals, SourcePlace, Unaccounted, WaitCounts, flush_thread,
};
pub use crate::compact::{
    CompactionState, DefragConfig, DefragError, DefragOptions, DefragReport, DefragTotals, Defragmenter,
    MoveCounts, ResizeError, ResizeOptions, ResizeReport,
};
pub use crate::migrate::{
    BringBackReport, Carried, MigrateError, MigrationCounts, MigrationReport, OffloadReport,
};
pub use build_error::BuildError;
pub use builder::PoolBuilder;
pub use frame_pool::{
    FrameBatch, FrameGroup, FrameInfo, FrameKey, FrameLease, FrameMoves, FramePool, FramePoolBuilder,
    FrameShrink, HitGroup, MovedFrames, Need,
};
pub use layered::{CacheGroup, GroupKeeps, LayerPlace};
pub use lease::Lease;
pub use metrics::{Latencies, Metrics};
pub use owners::{BlockOwner, Owners, PinOwner, PinnedBlock, SequenceOwner};
pub use pin::BlockPin;
pub use pool::Pool;
pub use preemption::{Preempt, Preempted, Swapped};
pub use sequence_runs::SequenceRuns;
pub use settled::Settled;
pub use stats::{Fragmentation, Pressure, Stats};
pub use victims::{LowestPriorityFirst, Victim, VictimOrder};
pub use wait::{CallUntil, Wait};

//! A lock-free concurrent pool of KV-cache blocks for LLM inference engines: the memory under paged
//! attention, for schedulers with many threads, compacted while in use.
//!
//! # Concepts
//!
//! A **block** holds the K and V of a number of tokens, over all layers. Its id never changes while
//! it lives. A **frame** is the place in memory that holds a block; compaction moves a block's
//! bytes to another frame. A **slot** is the place of one token in a frame. A **sequence** is the
//! list of blocks with the tokens of one request; its **block table** lists their frames.
//!
//! A block is owned by a [`Lease`] or a [`Sequence`]. A [handle](BlockHandle) names a block.
//! Freeing a block *retires* its frame while a **batch**, one step of the engine, may still read
//! it: the frame is reused when every such batch has ended. A block is *sealed* when its bytes are
//! final; only then can it be moved, shared by its contents, or found in the prefix cache. A cached
//! block without owners is *evictable*: it keeps its bytes until its frame is needed.
//!
//! # Example
//!
//! ```
//! use kvpool::{AllocRequest, BlockTable, KvLayout, Pool, SequenceId};
//!
//! let pool = Pool::builder(KvLayout::named("qwen2.5-0.5b")?).blocks(10_000).build()?;
//!
//! // Blocks for an engine with block tables of its own.
//! let lease = pool.allocate(AllocRequest::new(4))?;
//! assert_eq!(lease.blocks().len(), 4);
//! drop(lease);
//!
//! // Tokens, block tables and slots kept by the pool.
//! let mut sequence = pool.sequence(SequenceId(7)).open()?;
//! let mut batch = pool.begin_batch();
//! let new = batch.append(&mut sequence, 100)?;
//! let (mut slots, mut table) = (Vec::new(), BlockTable::new());
//! batch.slot_mapping(&sequence, new.tokens, &mut slots)?;
//! batch.block_table([&sequence], &mut table)?;
//! batch.finish();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Runtimes
//!
//! Futures and their deadlines, which are [`std::time::Instant`]s, work on any executor. In a tokio
//! runtime (feature `tokio`, on by default) they use its timer and its threads for long copies;
//! elsewhere, a timer thread that the first wait starts, and copies run where the future is polled.
//! The [background task](Pool::start_defragmenter) needs tokio. Tests that pause tokio's clock pass
//! `tokio::time::Instant::into_std` of its time.
//!
//! # Where to go
//!
//! - [`Pool`]: allocation, sequences, batches, waiting, compaction, resizing, migration, statistics.
//! - [`PoolBuilder`] and [`KvLayout`]: the shape of a pool and of its blocks.
//! - [`prefix`]: the prefix cache and its eviction policies.
//! - [`storage`]: the bytes, in host or device memory, or the engine's own.
//! - [`compact`]: snapshots and plans, for tools.
//! - [`transfer`] and [`transport`]: manifests and the halves of a transfer, and who moves the bytes.
//! - [`testing`]: model checks of your own concurrent code on a pool.
//! - The crate `kvpool-cuda`: pools in the memory of CUDA devices.
//!
//! The repository's `docs/tour.md` has examples, and `ARCHITECTURE.md` explains how the pool works.

#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

/// Declares a function for this workspace's tests and benches: public with the feature `internals`.
macro_rules! internal {
    ($(#[$attribute:meta])* fn $($function:tt)*) => {
        #[cfg(feature = "internals")]
        $(#[$attribute])*
        pub fn $($function)*

        #[cfg(not(feature = "internals"))]
        $(#[$attribute])*
        pub(crate) fn $($function)*
    };
    ($(#[$attribute:meta])* unsafe fn $($function:tt)*) => {
        #[cfg(feature = "internals")]
        $(#[$attribute])*
        pub unsafe fn $($function)*

        #[cfg(not(feature = "internals"))]
        $(#[$attribute])*
        pub(crate) unsafe fn $($function)*
    };
}

// The floors, from the ground up; a floor uses those before it (`tests/floors` checks this).
#[cfg(feature = "internals")]
pub mod config;
#[cfg(not(feature = "internals"))]
mod config;

/// Runs a future inside a span of this name, with the feature `tracing`. Each poll is a
/// [call](sync::call).
macro_rules! traced {
    ($name:literal, $future:expr) => {{
        #[cfg(feature = "tracing")]
        let future = tracing::Instrument::instrument($future, tracing::info_span!(target: "kvpool", $name));
        #[cfg(not(feature = "tracing"))]
        let future = $future;
        $crate::sync::calls(future)
    }};
}

mod dtype;
mod error;
mod ids;
mod sync;

// These floors trust their callers: calls in the wrong order corrupt other owners' blocks.
#[cfg(feature = "internals")]
pub mod frame;
#[cfg(not(feature = "internals"))]
#[allow(dead_code, unused_imports, reason = "tests and models use more than the pool does")]
mod frame;

#[cfg(feature = "internals")]
pub mod clock;
#[cfg(not(feature = "internals"))]
#[allow(dead_code, unused_imports, reason = "tests and models use more than the pool does")]
mod clock;

#[cfg(feature = "internals")]
pub mod block;
#[cfg(not(feature = "internals"))]
#[allow(dead_code, unused_imports, reason = "tests and models use more than the pool does")]
mod block;

pub mod storage;

pub mod prefix;

pub mod hints;

pub mod tenants;

#[cfg(feature = "internals")]
pub mod sequence;
#[cfg(not(feature = "internals"))]
mod sequence;

pub mod compact;

mod migrate;

mod pool;

pub mod testing;

/// The halves of a transfer to another pool, for engines and stores that move the bytes themselves,
/// and the traits by which a pool reaches other nodes. [`Pool::export`] and [`Pool::import`] begin
/// them; [`Pool::migrate`] and [`Pool::offload`] do a whole transfer within the process.
pub mod transfer {
    pub use crate::migrate::{
        Arriving, Export, Fetched, Finished, HeadRange, Import, ImportError, Imported, Manifest, PackedForm,
        Piece, Remote, RemoteFuture, Remotes, SendError, Sent, TransferDirection, TransferOwner,
    };
    pub use crate::sequence::{PromptBlock, PromptBlocks};
}

#[doc(inline)]
pub use migrate::transport;
#[doc(inline)]
pub use pool::{
    AllocRequest, AllocationCounts, AuditError, AuditReport, BlockInfo, BlockOwner, BlockPin,
    BringBackReport, BuildError, CacheGroup, CallUntil, Carried, CompactionState, Counts, DefragConfig,
    DefragError, DefragOptions, DefragReport, DefragTotals, Defragmenter, Fragmentation, FrameBatch,
    FrameGroup, FrameInfo, FrameKey, FrameLease, FrameMoves, FramePlace, FramePool, FramePoolBuilder,
    FrameShrink, GroupKeeps, HitGroup, Latencies, Latency, LatencyBucket, LatencyHistogram, LayerPlace,
    Lease, LowestPriorityFirst, Metrics, MigrateError, MigrationCounts, MigrationReport, MoveCounts,
    MovedFrames, Need, OffloadReport, Owners, PinOwner, PinnedBlock, Pool, PoolBuilder, Preempt, Preempted,
    Pressure, Priority, Refusals, ResizeError, ResizeOptions, ResizeReport, SequenceOwner, SequenceRuns,
    Settled, SourcePlace, Stats, Swapped, Unaccounted, Victim, VictimOrder, Wait, WaitCounts, flush_thread,
};
#[doc(inline)]
pub use sequence::{
    AdmitRequest, AnySequence, Append, Appended, Batch, BlockTable, Copied, CsrTable, Finish, FinishError,
    GroupCopy, GroupedAppended, GroupedSequence, Listed, Moved, MovedEntry, PinnedInfo, PinnedPrefix,
    ResumeOptions, Sequence, SequenceBuilder, SequenceView, Since, Stepped, TOKENS_MAX, Tokens, VersionRange,
    Window,
};
#[doc(inline)]
pub use {
    dtype::Dtype,
    error::{
        AllocError, FrameError, FrameShrinkError, GrowError, HandleError, HeadOfLine, Invalid, LayersError,
        OldestBatch, PrefixError, Retry, SequenceError, SettleError, ShrinkError, StepError, StorageError,
        TenantError, TransferError, TransportError, TurnHolder, TurnTask,
    },
    ids::{
        BlockHandle, BlockId, DeviceId, FRAMES_MAX, FrameId, Generation, Order, PoolTag, Run, SequenceId,
        SessionId, TenantId, Ticket, WeightsVersion,
    },
    prefix::PrefixConfig,
    storage::KvLayout,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(all(doctest, feature = "tokio"))]
#[doc = include_str!("../docs/tour.md")]
struct Tour;

#![doc = include_str!("../README.md")]
#![deny(unsafe_op_in_unsafe_fn, clippy::undocumented_unsafe_blocks)]

/// Declares a function for this workspace's tests, models and benches, not for users: public with
/// the feature `internals`.
macro_rules! internal {
    ($(#[$attribute:meta])* fn $($function:tt)*) => {
        #[cfg(feature = "internals")]
        $(#[$attribute])*
        pub fn $($function)*

        #[cfg(not(feature = "internals"))]
        $(#[$attribute])*
        pub(crate) fn $($function)*
    };
}

// The floors, from the ground up; a floor uses those before it (`tests/floors` checks this).
#[cfg(feature = "internals")]
pub mod config;
#[cfg(not(feature = "internals"))]
mod config;

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

#[cfg(feature = "internals")]
pub mod sequence;
#[cfg(not(feature = "internals"))]
mod sequence;

pub mod compact;

mod migrate;

mod pool;

pub mod testing;

#[cfg(all(feature = "cuda", not(kvpool_loom)))]
pub mod cuda;

#[doc(inline)]
pub use pool::{
    AllocRequest, AuditError, AuditReport, BlockInfo, BlockPin, BringBackReport, BuildError, Carried, Counts,
    DefragConfig, DefragError, DefragOptions, DefragReport, DefragTotals, Defragmenter, Fragmentation,
    FramePlace, Latency, Lease, MigrateError, MigrationReport, OffloadReport, Pool, PoolBuilder, PoolHandle,
    Pressure, Priority, ResizeError, ResizeOptions, ResizeReport, Stats, Target, flush_thread,
};
#[doc(inline)]
pub use sequence::{
    Appended, Batch, BlockTable, Copied, CsrTable, Finish, FinishError, Listed, Moved, MovedEntry, Sequence,
    SequenceBuilder, SequenceView, Since, TOKENS_MAX,
};
#[doc(inline)]
pub use {
    dtype::Dtype,
    error::{
        AllocError, GrowError, HandleError, HeadOfLine, LayoutError, OldestBatch, PrefixError, SequenceError,
        ShrinkError, SizingError, StorageError, TransferError,
    },
    ids::{
        BlockHandle, BlockId, DeviceId, FRAMES_MAX, FrameId, Generation, Order, PoolTag, Run, SequenceId,
        Ticket,
    },
    prefix::PrefixConfig,
    storage::KvLayout,
};

/// The examples of the tour, compiled and run as tests.
#[cfg(doctest)]
#[doc = include_str!("../docs/tour.md")]
struct Tour;

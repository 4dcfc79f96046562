//! Error types, one enum per boundary.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::ids::{BlockHandle, BlockId, DeviceId, Generation, PoolTag, Priority, TenantId, Ticket};

mod frame;
mod invalid;
mod layers;
mod migrate;
mod prefix;
mod retry;
mod sequence;
mod settle;
mod storage;
mod tenants;
mod transport;
mod turn;

pub use frame::{FrameError, FrameShrinkError};
pub use invalid::Invalid;
pub use layers::LayersError;
pub use migrate::TransferError;
pub use prefix::PrefixError;
pub use retry::Retry;
pub use sequence::{SequenceError, StepError};
pub use settle::SettleError;
pub use storage::StorageError;
pub use tenants::TenantError;
pub use transport::TransportError;
pub use turn::{TurnHolder, TurnTask};

/// Reason why an allocation failed. The pool is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The request was for zero blocks.
    #[error("zero blocks requested")]
    Zero,
    /// The request was for more blocks than the pool has.
    #[error("requested {asked} blocks from a pool of {total}")]
    TooLarge {
        /// Number of blocks requested.
        asked: usize,
        /// Number of blocks in the pool.
        total: usize,
    },
    /// The pool has too few free blocks, counting all caches and lists.
    #[error(
        "requested {asked} blocks; {free} free, {evictable} cached, {in_transfer} in transfer, {held} held, \
         {retired} retired until a batch in flight ends{}",
        TheOldestIs(oldest_batch)
    )]
    Exhausted {
        /// Number of blocks requested.
        asked: usize,
        /// Number of free blocks when the search gave up.
        free: usize,
        /// Number of retired blocks, which become free when a batch ends.
        retired: usize,
        /// Number of cached blocks without an owner that the request may evict; batches in flight may
        /// still read them.
        evictable: usize,
        /// Number of free blocks held by moves or a shrink.
        held: usize,
        /// Number of blocks in transfers, including those whose future was dropped. Those without
        /// other owners become free when the transfers end: wait rather than preempt.
        in_transfer: usize,
        /// Oldest batch in flight. Blocks retired after it began become free when it ends.
        oldest_batch: Option<Ticket>,
    },
    /// Enough blocks are free or evictable, but no run of them is long enough.
    #[error(
        "requested a run of {asked} blocks; the longest free run has {longest_run} of {free} free blocks{}",
        Cached(evictable)
    )]
    NoRun {
        /// Number of blocks requested.
        asked: usize,
        /// Length of the longest free run.
        longest_run: usize,
        /// Number of free blocks.
        free: usize,
        /// Number of cached blocks without an owner; batches in flight may still read them.
        evictable: usize,
    },
    /// The request needs the reserve, which is only for urgent requests that need no run.
    #[error(
        "requested {asked} blocks from a pool of {total}; {reserve} of them are reserved for urgent requests"
    )]
    Reserved {
        /// Number of blocks requested.
        asked: usize,
        /// Number of blocks in the pool.
        total: usize,
        /// Number of blocks in the reserve.
        reserve: usize,
    },
    /// The deadline passed before the request was first in the queue and enough blocks were free.
    #[error(
        "the deadline of a request for {asked} blocks passed; {free} free, {retired} retired until a batch in flight ends{}{}{}",
        TheOldestIs(oldest_batch),
        Also(head, "; the head of the line is "),
        Also(turn, "; ")
    )]
    Deadline {
        /// Number of blocks requested.
        asked: usize,
        /// Number of free blocks at the deadline.
        free: usize,
        /// Number of retired blocks at the deadline.
        retired: usize,
        /// Oldest batch in flight at the deadline.
        oldest_batch: Option<OldestBatch>,
        /// Request at the head of the queue at the deadline, if it was another request.
        head: Option<HeadOfLine>,
        /// Task whose turn it was to move blocks at the deadline. It may hold free blocks, and a
        /// request for a run waits for its own turn.
        turn: Option<TurnHolder>,
    },
    /// A request of higher priority waits for blocks; for an admission that does not wait, also one
    /// of the same priority.
    ///
    /// While that request lacks blocks, only owners can release them. If all owners are waiting
    /// themselves, such as growing sequences, none will: close or [preempt](crate::Pool::victims) a
    /// sequence, or drop the waiting request.
    #[error(
        "requested {asked} blocks at {priority} priority; a request of {waiting} priority waits ahead, and lacks {lacking} blocks"
    )]
    Behind {
        /// Number of blocks requested.
        asked: usize,
        /// Priority of the request.
        priority: Priority,
        /// Highest priority of the waiting requests.
        waiting: Priority,
        /// Number of blocks that owners have to release for the first of them: its request minus
        /// all free, retired and cached blocks, or 0.
        lacking: usize,
    },
    /// Some of the free blocks may be in other threads' magazines, which this thread cannot search:
    /// the kernel denies it `membarrier`, for example by a seccomp filter on this thread alone. A
    /// request that would have to wait fails too: without the fence this thread may miss a free.
    #[error(
        "requested {asked} blocks; {free} free, possibly in other threads' caches: the system refuses this thread \
         membarrier(2), which searching them requires (check for a seccomp filter)"
    )]
    FenceRefused {
        /// Number of blocks requested.
        asked: usize,
        /// Number of free blocks when the search gave up.
        free: usize,
    },
    /// The request would take its tenant beyond its quota, and the tenant has too few cached blocks
    /// of its own to evict. Also of a request that would wait otherwise.
    #[error("requested {asked} blocks for tenant {tenant}, which holds {held} of its quota of {quota}")]
    OverQuota {
        /// Number of blocks requested.
        asked: usize,
        /// The tenant.
        tenant: TenantId,
        /// Its quota in blocks.
        quota: usize,
        /// Number of blocks that it holds, owned and cached, with those being allocated for it.
        held: usize,
    },
    /// A request that would wait asks for more than the floors of other tenants leave of the pool: as
    /// long as those tenants hold as much, it would wait in vain, and others behind it.
    #[error(
        "requested {asked} blocks; what it keeps and the floors of other tenants leave {most} of the pool"
    )]
    Floors {
        /// Number of blocks requested.
        asked: usize,
        /// The most that it could get if all owners released their blocks.
        most: usize,
    },
    /// The pool's device failed. The contents of its blocks are lost, and it allocates no more.
    #[error("the pool's device {device} is lost")]
    DeviceLost {
        /// The failed device.
        device: DeviceId,
    },
    /// The request names a device other than that of the pool's memory.
    #[error("requested blocks on {asked}, but the pool is on {device}")]
    WrongDevice {
        /// Device requested.
        asked: DeviceId,
        /// Device of the pool.
        device: DeviceId,
    },
}

/// A duration in milliseconds. It is 32 bits wide to keep the result of an allocation small.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
struct Millis(u32);

impl Millis {
    fn of(time: Duration) -> Self {
        Self(u32::try_from(time.as_millis()).unwrap_or(u32::MAX))
    }

    const fn get(self) -> Duration {
        Duration::from_millis(self.0 as u64)
    }
}

/// The batch that has been in flight longest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct OldestBatch {
    /// Ticket of the batch.
    pub ticket: Ticket,
    age: Millis,
}

impl OldestBatch {
    pub(crate) fn new(ticket: Ticket, age: Duration) -> Self {
        Self { ticket, age: Millis::of(age) }
    }

    /// Returns a lower bound of the time for which the batch has been the oldest, in milliseconds,
    /// from when a reader of the [statistics](crate::pool::Stats::oldest_batch) first observed it.
    pub const fn age(&self) -> Duration {
        self.age.get()
    }
}

impl fmt::Display for OldestBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {}, in flight for at least {:.1?}", self.ticket, self.age())
    }
}

/// The request at the head of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct HeadOfLine {
    /// Priority of the request.
    pub priority: Priority,
    /// Number of blocks requested.
    pub asked: usize,
    waited: Millis,
    /// `u32::MAX` if the request has not been woken since its last poll.
    unpolled: Millis,
}

impl HeadOfLine {
    pub(crate) fn new(
        priority: Priority,
        asked: usize,
        waited: Duration,
        unpolled: Option<Duration>,
    ) -> Self {
        let unpolled = unpolled.map_or(Millis(u32::MAX), Millis::of);
        Self { priority, asked, waited: Millis::of(waited), unpolled }
    }

    /// Returns how long the request has waited, in milliseconds.
    pub const fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// Returns the time since the request was woken, if its future has not been polled since. The
    /// pool [passes over](crate::pool::PoolBuilder::turn_patience) it until it is polled.
    pub fn unpolled(&self) -> Option<Duration> {
        (self.unpolled.0 != u32::MAX).then(|| self.unpolled.get())
    }
}

impl fmt::Display for HeadOfLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { priority, asked, .. } = self;
        let waited = self.waited();
        write!(f, "a request for {asked} blocks at {priority} priority, waiting for {waited:.1?}")?;
        match self.unpolled() {
            Some(unpolled) => write!(f, ", woken {unpolled:.1?} ago and not polled since"),
            None => Ok(()),
        }
    }
}

struct TheOldestIs<'a, T>(&'a Option<T>);

impl fmt::Display for TheOldestIs<'_, Ticket> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |ticket| write!(f, " (the oldest is batch {ticket})"))
    }
}

impl fmt::Display for TheOldestIs<'_, OldestBatch> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |batch| write!(f, " (the oldest is {batch})"))
    }
}

struct Cached<'a>(&'a usize);

impl fmt::Display for Cached<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self.0 > 0 { write!(f, ", and {} are cached without an owner", self.0) } else { Ok(()) }
    }
}

/// Displays the value, if any, after a prefix.
pub(crate) struct Also<'a, T>(pub(crate) &'a Option<T>, pub(crate) &'static str);

impl<T: fmt::Display> fmt::Display for Also<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.as_ref().map_or(Ok(()), |what| write!(f, "{}{what}", self.1))
    }
}

/// Reason why a handle, or one more reference to a block, was refused. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The handle belongs to another pool.
    #[error("{handle} was passed to pool {pool}")]
    Foreign {
        /// The refused handle.
        handle: BlockHandle,
        /// Pool that refused it.
        pool: PoolTag,
    },
    /// The pool has no block with this id.
    #[error("{handle} is outside the pool's {total} blocks")]
    OutOfRange {
        /// The refused handle.
        handle: BlockHandle,
        /// Number of blocks in the pool, including those it had before it shrank.
        total: usize,
    },
    /// The block was freed after the handle was created, and may have a new owner.
    #[error("{handle} is stale: the block is at generation {now}")]
    Stale {
        /// The refused handle.
        handle: BlockHandle,
        /// Current generation of the block.
        now: Generation,
    },
    /// The block has the maximum number of references.
    #[error("block {id} already has the maximum of {max} references")]
    TooManyReferences {
        /// Id of the block.
        id: BlockId,
        /// Maximum number of references.
        max: u32,
    },
    /// The block has the maximum number of pins.
    #[error("block {id} is already pinned the maximum of {max} times")]
    TooManyPins {
        /// Id of the block.
        id: BlockId,
        /// Maximum number of pins.
        max: u32,
    },
}

/// Reason why a shrink did not begin. The pool is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ShrinkError {
    /// Another shrink is open: its owner has neither committed nor abandoned it.
    #[error("the pool is already being resized")]
    Busy,
    /// The requested size is not below the current one.
    #[error("cannot shrink a pool of {total} blocks to {asked}")]
    NotSmaller {
        /// Requested size in blocks.
        asked: usize,
        /// Current size in blocks.
        total: usize,
    },
    /// The requested size is below the minimum of a pool.
    #[error("cannot shrink to {asked} blocks; a pool has at least {min}")]
    TooFew {
        /// Requested size in blocks.
        asked: usize,
        /// Minimum size in blocks.
        min: usize,
    },
}

/// Reason why the pool did not grow. The pool is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum GrowError {
    /// A shrink is open: its owner has neither committed nor abandoned it.
    #[error("the pool is being resized")]
    Busy,
    /// The request was to grow by zero blocks.
    #[error("cannot grow by zero blocks")]
    Zero,
    /// The pool would exceed the maximum size that it was built for.
    #[error("cannot grow a pool of {total} blocks by {asked}; its maximum is {max}")]
    TooLarge {
        /// Number of blocks to add.
        asked: usize,
        /// Current size in blocks.
        total: usize,
        /// Maximum size in blocks.
        max: usize,
    },
    /// The system could not provide memory for the new blocks.
    #[error("no memory for {asked} more blocks: {reason}")]
    Memory {
        /// Number of blocks to add.
        asked: usize,
        /// Reason given by the system.
        reason: &'static str,
    },
}

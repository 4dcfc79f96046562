//! Errors, one enum a boundary. Exhaustion is a value that says what was asked for and what there was; misuse by
//! the caller is an error that says what and where; a broken internal invariant is a panic.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::ids::{BlockHandle, BlockId, DeviceId, Generation, PoolTag, Priority, Ticket};

mod migrate;
mod prefix;
mod sequence;
mod storage;

pub use migrate::TransferError;
pub use prefix::PrefixError;
pub use sequence::SequenceError;
pub use storage::{LayoutError, SizingError, StorageError};

/// Why blocks were not allocated. The pool is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum AllocError {
    /// Zero blocks were asked for.
    #[error("asked for zero blocks")]
    Zero,
    /// More blocks were asked for than the pool has.
    #[error("asked for {asked} blocks of a pool of {total}")]
    TooLarge {
        /// Blocks asked for.
        asked: usize,
        /// Blocks that the pool has.
        total: usize,
    },
    /// Too few blocks are free, wherever they may be.
    #[error(
        "asked for {asked} blocks, {free} free, {evictable} cached, {retired} retired until a batch in flight ends{}",
        TheOldestIs(oldest_batch)
    )]
    Exhausted {
        /// Blocks asked for.
        asked: usize,
        /// Blocks that were free when the search gave up.
        free: usize,
        /// Blocks that wait for a batch to end.
        retired: usize,
        /// Cached blocks that nobody owns, and that batches in flight may see.
        evictable: usize,
        /// The oldest batch in flight: what was retired after it began waits for its end.
        oldest_batch: Option<Ticket>,
    },
    /// Enough blocks are free, and no run of them is long enough.
    #[error(
        "asked for a run of {asked} blocks; the longest free run has {longest_run} of {free} free blocks"
    )]
    NoRun {
        /// Blocks asked for.
        asked: usize,
        /// The longest free run.
        longest_run: usize,
        /// Blocks that were free.
        free: usize,
    },
    /// More blocks were asked for than the pool has for requests of this kind: the reserve is for urgent requests that
    /// need no run.
    #[error(
        "asked for {asked} blocks of a pool of {total}, of which {reserve} are set aside for urgent requests"
    )]
    Reserved {
        /// Blocks asked for.
        asked: usize,
        /// Blocks that the pool has.
        total: usize,
        /// Blocks that are set aside.
        reserve: usize,
    },
    /// The deadline passed before the request had its turn and enough blocks were free.
    #[error(
        "asked for {asked} blocks by a deadline that passed; {free} free, {retired} retired until a batch in flight ends{}{}",
        TheOldestIs(oldest_batch),
        BehindHead(head)
    )]
    Deadline {
        /// Blocks asked for.
        asked: usize,
        /// Blocks that were free when the deadline passed.
        free: usize,
        /// Blocks that waited for a batch to end then.
        retired: usize,
        /// The batch that was in flight the longest then.
        oldest_batch: Option<OldestBatch>,
        /// The request that was first in line then, if it was another one.
        head: Option<HeadOfLine>,
    },
    /// Enough blocks are free, and some of them are in the caches of other threads, which this thread cannot search: the
    /// system refuses it `membarrier`, as a filter of system calls that was put on this thread alone does. A request that
    /// would have to wait is refused too, because on this thread nothing tells it that it has not missed a free.
    #[error(
        "asked for {asked} blocks with {free} free, perhaps in the caches of other threads: the system refuses this thread \
         membarrier(2), which a search there needs (a seccomp filter?)"
    )]
    FenceRefused {
        /// Blocks asked for.
        asked: usize,
        /// Blocks that were free when the search gave up.
        free: usize,
    },
    /// The pool's device has failed, and what its blocks held is lost. It hands out none any more.
    #[error("asked for blocks of a pool whose device, {device}, is lost")]
    DeviceLost {
        /// The device.
        device: DeviceId,
    },
    /// The pool's memory is on another device.
    #[error("asked for blocks on {asked}; this pool is on {device}")]
    WrongDevice {
        /// The device asked for.
        asked: DeviceId,
        /// The pool's device.
        device: DeviceId,
    },
}

/// A time as errors have it: in milliseconds, because they are part of what an allocation returns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Millis(u32);

impl Millis {
    fn of(time: Duration) -> Self {
        Self(u32::try_from(time.as_millis()).unwrap_or(u32::MAX))
    }

    const fn get(self) -> Duration {
        Duration::from_millis(self.0 as u64)
    }
}

/// The batch that has been in flight for the longest time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct OldestBatch {
    /// Its ticket.
    pub ticket: Ticket,
    age: Millis,
}

impl OldestBatch {
    pub(crate) fn new(ticket: Ticket, age: Duration) -> Self {
        Self { ticket, age: Millis::of(age) }
    }

    /// How long it has been the oldest, at least: since a look first found it so, in milliseconds. See
    /// [`Stats::oldest_batch`](crate::pool::Stats::oldest_batch).
    pub const fn age(&self) -> Duration {
        self.age.get()
    }
}

impl fmt::Display for OldestBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {}, in flight for at least {:.1?}", self.ticket, self.age())
    }
}

/// The request that is first in line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct HeadOfLine {
    /// Its priority.
    pub priority: Priority,
    /// Blocks asked for.
    pub asked: usize,
    waited: Millis,
    /// All ones: it has no reason to run, or is running.
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

    /// How long it has waited, in milliseconds.
    pub const fn waited(&self) -> Duration {
        self.waited.get()
    }

    /// If its future has reason to run and was not polled since: for how long. Such a request is
    /// [passed over](crate::pool::PoolBuilder::turn_patience) until it is polled.
    pub fn unpolled(&self) -> Option<Duration> {
        (self.unpolled.0 != u32::MAX).then(|| self.unpolled.get())
    }
}

impl fmt::Display for HeadOfLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { priority, asked, .. } = self;
        let waited = self.waited();
        write!(f, "a request for {asked} blocks at {priority} priority, which has waited for {waited:.1?}")?;
        match self.unpolled() {
            Some(unpolled) => write!(f, " and was woken {unpolled:.1?} ago without being polled since"),
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

struct BehindHead<'a>(&'a Option<HeadOfLine>);

impl fmt::Display for BehindHead<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |head| write!(f, "; first in line is {head}"))
    }
}

/// Why a handle was refused. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum HandleError {
    /// The handle was handed out by another pool.
    #[error("{handle} was given to pool {pool}")]
    Foreign {
        /// The handle.
        handle: BlockHandle,
        /// The pool that was asked.
        pool: PoolTag,
    },
    /// The pool has no block of this id.
    #[error("{handle} is outside the pool's {total} blocks")]
    OutOfRange {
        /// The handle.
        handle: BlockHandle,
        /// Blocks that the pool has, or had before it shrank.
        total: usize,
    },
    /// The block has been freed since the handle was handed out, and perhaps belongs to somebody else by now.
    #[error("{handle} is stale: the block is at generation {now}")]
    Stale {
        /// The handle.
        handle: BlockHandle,
        /// The block's generation now.
        now: Generation,
    },
    /// The block belongs to a lease, or to sequences: they alone share, seal, reopen, unpin and free it.
    #[error(
        "{handle} is of a block that a lease or a sequence owns: drop the lease, or make handles of it by `Lease::into_raw`"
    )]
    Guarded {
        /// The handle.
        handle: BlockHandle,
    },
    /// The block has other references: a lease takes over the only one.
    #[error("block {id} is shared, and a lease takes over only references")]
    Shared {
        /// The block.
        id: BlockId,
    },
    /// The same block stands twice in one list of blocks to free, and has fewer references than that.
    #[error("{handle} is freed more often in one call than it has references")]
    Repeated {
        /// The handle.
        handle: BlockHandle,
    },
    /// The block has as many references as its word can count.
    #[error("block {id} already has the maximum of {max} references")]
    TooManyReferences {
        /// The block.
        id: BlockId,
        /// The maximum.
        max: u32,
    },
    /// The block is pinned as often as its word can count.
    #[error("block {id} is already pinned the maximum of {max} times")]
    TooManyPins {
        /// The block.
        id: BlockId,
        /// The maximum.
        max: u32,
    },
    /// The block is not pinned.
    #[error("block {id} is not pinned")]
    NotPinned {
        /// The block.
        id: BlockId,
    },
}

/// Why the pool did not begin to shrink. It is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ShrinkError {
    /// Another shrink is open: it ends when its owner commits it or gives it up.
    #[error("the pool is already being resized")]
    Busy,
    /// That is what the pool has, or more.
    #[error("asked to shrink to {asked} blocks a pool of {total}")]
    NotSmaller {
        /// Blocks asked for.
        asked: usize,
        /// Blocks that the pool has.
        total: usize,
    },
    /// A pool has at least so many.
    #[error("asked to shrink to {asked} blocks; at least {min}")]
    TooFew {
        /// Blocks asked for.
        asked: usize,
        /// The fewest.
        min: usize,
    },
}

/// Why the pool did not grow. It is unchanged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum GrowError {
    /// A shrink is open: it ends when its owner commits it or gives it up.
    #[error("the pool is being resized")]
    Busy,
    /// Growth by nothing.
    #[error("asked to grow by zero blocks")]
    Zero,
    /// The pool would pass the size that it was built to reach at most.
    #[error("asked to grow from {total} by {asked} blocks; the pool was built to reach {max} at most")]
    TooLarge {
        /// Blocks to add.
        asked: usize,
        /// Blocks that the pool has.
        total: usize,
        /// The most that it may have.
        max: usize,
    },
    /// The memory for the bytes could not be had.
    #[error("no memory for {asked} more blocks: {reason}")]
    Memory {
        /// Blocks to add.
        asked: usize,
        /// What the system said.
        reason: &'static str,
    },
}

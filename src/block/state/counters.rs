//! Monotonic counters of allocations, frees, refusals and waits.
//!
//! Counts in thread caches are plain stores; calls without a cache, and rare events, are counted in
//! shared counters. No decision depends on them: Relaxed throughout.
//!
//! # Counted references
//!
//! Lists record their references; leases and the engine of a frame pool do not. Their number is:
//!
//! `references == blocks - freed + further`
//!
//! | step | `blocks` | `freed` | `further` |
//! |---|---|---|---|
//! | a block of a lease, or a frame, is allocated | 1 | | |
//! | its last reference is released | | 1 | |
//! | a lease is shared; a frame is shared or hit | | | 1 |
//! | a lease is dropped, a frame is freed, and other references or the cache keep the block | | | -1 |
//! | a block is allocated for a list | 1 | | -1 |
//! | a list releases the last reference of a block that is not cached | | 1 | 1 |
//!
//! The [audit](crate::Pool::audit) checks the sum. Other steps of lists, and evictions, change
//! none.

use crate::error::AllocError;
use crate::sync::{Ordering::*, StatisticU64};

/// Counts of blocks allocated and freed since the pool was built. Exact once the threads that
/// changed them have returned and are synchronized with the reader.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AllocationCounts {
    /// Requests that got their blocks: leases, and appends that needed blocks.
    pub requests: u64,
    /// Blocks that were allocated.
    pub blocks: u64,
    /// Blocks whose last reference was released, except those that the prefix cache kept.
    pub freed_blocks: u64,
}

/// Counts of refusals, by reason. A request that then waits counts, unless others waited already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Refusals {
    /// Too few blocks were free: [`AllocError::Exhausted`], or [`AllocError::Floors`].
    pub exhausted: u64,
    /// No run of free blocks was long enough: [`AllocError::NoRun`].
    pub no_run: u64,
    /// The request exceeded the pool: [`AllocError::TooLarge`].
    pub too_large: u64,
    /// The request exceeded what is not in the reserve: [`AllocError::Reserved`].
    pub reserved: u64,
    /// A request of higher priority waited: [`AllocError::Behind`].
    pub behind: u64,
    /// The kernel denied a fence: [`AllocError::FenceRefused`].
    pub fence_refused: u64,
    /// The device was lost: [`AllocError::DeviceLost`].
    pub device_lost: u64,
    /// The request was for zero blocks, or for another device.
    pub invalid: u64,
    /// The request exceeded the quota of its tenant: [`AllocError::OverQuota`].
    #[cfg_attr(feature = "serde", serde(default))]
    pub over_quota: u64,
}

impl Refusals {
    /// Returns the sum over all reasons.
    pub const fn total(&self) -> u64 {
        self.exhausted
            + self.no_run
            + self.too_large
            + self.reserved
            + self.behind
            + self.fence_refused
            + self.device_lost
            + self.invalid
            + self.over_quota
    }
}

/// Counts of requests that waited in the queue. A request in neither of the last two is waiting,
/// was dropped, or was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct WaitCounts {
    /// Requests that joined the queue.
    pub waits: u64,
    /// Requests that got their blocks in the queue.
    pub granted: u64,
    /// Requests whose deadline passed: [`AllocError::Deadline`].
    pub missed_deadlines: u64,
}

#[derive(Default)]
pub(in crate::block) struct OwnCounters {
    /// Requests for one block on the fast path, which updates only this counter.
    singles: StatisticU64,
    requests: StatisticU64,
    blocks: StatisticU64,
    freed: StatisticU64,
    /// Wraps around below 0.
    further: StatisticU64,
}

#[inline(always)]
fn add(counter: &StatisticU64, count: u64) {
    // No read-modify-write: only the calling thread changes it.
    counter.store(counter.load(Relaxed).wrapping_add(count), Relaxed);
}

impl OwnCounters {
    #[inline(always)]
    pub(in crate::block) fn allocated_one(&self) {
        add(&self.singles, 1);
    }

    #[inline(always)]
    pub(in crate::block) fn allocated(&self, blocks: usize) {
        add(&self.requests, 1);
        add(&self.blocks, blocks as u64);
    }

    #[inline(always)]
    pub(in crate::block) fn freed(&self, blocks: usize) {
        add(&self.freed, blocks as u64);
    }

    #[inline]
    pub(in crate::block) fn further(&self, references: isize) {
        add(&self.further, references as u64);
    }

    pub(in crate::block) fn sum(&self, sum: &mut AllocationCounts) -> u64 {
        let singles = self.singles.load(Relaxed);
        sum.requests += singles + self.requests.load(Relaxed);
        sum.blocks += singles + self.blocks.load(Relaxed);
        sum.freed_blocks += self.freed.load(Relaxed);
        self.further.load(Relaxed)
    }
}

#[derive(Default)]
pub(in crate::block) struct SharedCounters {
    requests: StatisticU64,
    blocks: StatisticU64,
    freed: StatisticU64,
    further: StatisticU64,
    /// Cached blocks freed by a release that wrapped their generation around.
    outlived: StatisticU64,
    /// By reason, in the order of the fields of [`Refusals`].
    refusals: [StatisticU64; 9],
    waits: StatisticU64,
    granted: StatisticU64,
    missed_deadlines: StatisticU64,
    in_transfer: StatisticU64,
}

impl SharedCounters {
    pub(in crate::block) fn set_in_transfer(&self, blocks: usize) {
        self.in_transfer.store(blocks as u64, Relaxed);
    }

    pub(in crate::block) fn in_transfer(&self) -> usize {
        self.in_transfer.load(Relaxed) as usize
    }

    pub(in crate::block) fn allocated(&self, blocks: usize) {
        self.requests.fetch_add(1, Relaxed);
        self.blocks.fetch_add(blocks as u64, Relaxed);
    }

    pub(in crate::block) fn freed(&self, blocks: usize) {
        self.freed.fetch_add(blocks as u64, Relaxed);
    }

    pub(in crate::block) fn further(&self, references: isize) {
        self.further.fetch_add(references as u64, Relaxed);
    }

    pub(in crate::block) fn outlived(&self) {
        self.outlived.fetch_add(1, Relaxed);
    }

    pub(in crate::block) fn refused(&self, error: &AllocError) {
        let reason = match error {
            AllocError::Exhausted { .. } | AllocError::Floors { .. } => 0,
            AllocError::NoRun { .. } => 1,
            AllocError::TooLarge { .. } => 2,
            AllocError::Reserved { .. } => 3,
            AllocError::Behind { .. } => 4,
            AllocError::FenceRefused { .. } => 5,
            AllocError::DeviceLost { .. } => 6,
            AllocError::Zero | AllocError::WrongDevice { .. } => 7,
            AllocError::OverQuota { .. } => 8,
            // Counted by `missed_deadline`.
            AllocError::Deadline { .. } => return,
        };
        self.refusals[reason].fetch_add(1, Relaxed);
    }

    pub(in crate::block) fn waits(&self) {
        self.waits.fetch_add(1, Relaxed);
    }

    pub(in crate::block) fn granted(&self, blocks: usize) {
        self.granted.fetch_add(1, Relaxed);
        self.allocated(blocks);
    }

    pub(in crate::block) fn missed_deadline(&self) {
        self.missed_deadlines.fetch_add(1, Relaxed);
    }

    pub(in crate::block) fn sum(&self, sum: &mut AllocationCounts) -> u64 {
        sum.requests += self.requests.load(Relaxed);
        sum.blocks += self.blocks.load(Relaxed);
        sum.freed_blocks += self.freed.load(Relaxed);
        self.further.load(Relaxed)
    }

    pub(in crate::block) fn outlived_blocks(&self) -> u64 {
        self.outlived.load(Relaxed)
    }

    pub(in crate::block) fn refusals(&self) -> Refusals {
        let [exhausted, no_run, too_large, reserved, behind, fence_refused, device_lost, invalid, over_quota] =
            std::array::from_fn(|reason| self.refusals[reason].load(Relaxed));
        Refusals {
            exhausted,
            no_run,
            too_large,
            reserved,
            behind,
            fence_refused,
            device_lost,
            invalid,
            over_quota,
        }
    }

    pub(in crate::block) fn wait_counts(&self) -> WaitCounts {
        WaitCounts {
            waits: self.waits.load(Relaxed),
            granted: self.granted.load(Relaxed),
            missed_deadlines: self.missed_deadlines.load(Relaxed),
        }
    }
}

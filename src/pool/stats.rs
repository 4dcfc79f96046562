//! The pool seen from outside.

use crate::compact::OverdueCopy;
use crate::error::{HeadOfLine, OldestBatch};
use crate::frame::ORDERS;

use super::Latency;
use super::pool::Shared;

/// How near the pool is to its end.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Pressure {
    /// Less than 70 % is used.
    Low,
    /// Less than 85 %.
    Medium,
    /// Less than 95 %.
    High,
    /// 95 % or more.
    Critical,
}

impl Pressure {
    /// Of a share of used blocks, 0 to 1.
    pub fn of(utilization: f64) -> Self {
        match utilization {
            u if u < 0.70 => Self::Low,
            u if u < 0.85 => Self::Medium,
            u if u < 0.95 => Self::High,
            _ => Self::Critical,
        }
    }
}

/// How full a pool is, and how the free part hangs together.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Blocks, without the null block.
    pub total: usize,
    /// Blocks that somebody owns.
    pub used: usize,
    /// Blocks that any allocation can get, those in magazines among them, those in the reserve not.
    pub free: usize,
    /// Blocks that nobody owns and the prefix cache keeps until their frames are needed; none without that cache.
    pub evictable: usize,
    /// Freed blocks that some batch in flight may still read.
    pub retired: usize,
    /// Free blocks that are set aside for urgent requests.
    pub reserved: usize,
    /// Free blocks that moves and a shrink under way keep.
    pub held: usize,
    /// Requests that wait their turn.
    pub waiting: usize,
    /// Free blocks in threads' magazines and in the depot.
    pub in_magazines: usize,
    /// `used / total`.
    pub utilization: f64,
    /// Share of the free frames that are not part of a free aligned run of 2^k, for the pool's order k. Frames in
    /// magazines are on no run, and count as fragmented.
    pub fragmentation: f64,
    /// Linux's unusable-free-space index at the same order, over the bitmaps alone.
    pub unusable: f64,
    /// Free aligned runs by order, as few as cover the free frames.
    pub free_by_order: [usize; ORDERS],
    /// The longest free run, in frames, at any alignment.
    pub longest_run: usize,
    /// Mean length of the maximal free runs, in frames; 0 if nothing is free.
    pub mean_run: f64,
    /// From [`utilization`](Self::utilization).
    pub pressure: Pressure,
    /// Sampled times of allocations.
    pub latency: Latency,
    /// Batches that have begun and not ended.
    pub batches_in_flight: u64,
    /// The one among them that began first: what was [retired](Self::retired) since waits for its end. Its age counts from
    /// the look that first found it the oldest: by this, by an allocation that is refused, or by one that waits. So it is
    /// a lower bound, and two calls in a row find a batch that is never ended.
    pub oldest_batch: Option<OldestBatch>,
    /// The request that is first in line, and since when it has not been polled although it has reason to run.
    pub head_of_line: Option<HeadOfLine>,
    /// Requests that did not come when they were woken, so that others have their turn until they are polled.
    pub passed_over: usize,
    /// A copy of moving blocks that is not over although its deadline has passed: its blocks are among the
    /// [held](Self::held).
    pub overdue_copy: Option<OverdueCopy>,
    /// Blocks that are held for good because their bytes could not be [wiped](crate::pool::PoolBuilder::zero_on_free).
    pub unwiped: usize,
}

impl Stats {
    pub(super) fn of(shared: &Shared) -> Self {
        let counts = shared.blocks.counts();
        let census = shared.blocks.census(shared.order);
        let utilization = counts.used() as f64 / counts.total.max(1) as f64;
        let free = census.free + counts.in_magazines;
        Self {
            total: counts.total,
            used: counts.used(),
            free: counts.free(),
            evictable: counts.evictable,
            retired: counts.retired,
            reserved: counts.reserved,
            held: counts.held,
            waiting: shared.blocks.waiting(),
            in_magazines: counts.in_magazines,
            utilization,
            fragmentation: if free == 0 { 0.0 } else { 1.0 - census.free_in_order as f64 / free as f64 },
            unusable: census.fragmentation(),
            free_by_order: census.by_order,
            longest_run: census.longest_run,
            mean_run: if census.runs == 0 { 0.0 } else { census.free as f64 / census.runs as f64 },
            pressure: Pressure::of(utilization),
            latency: shared.sampler.read(),
            batches_in_flight: shared.blocks.clock().in_flight(),
            oldest_batch: shared.blocks.oldest_batch(),
            head_of_line: shared.blocks.head_of_line(),
            passed_over: shared.blocks.passed_over(),
            overdue_copy: shared.compactor.overdue_copy(),
            unwiped: shared.blocks.unwiped(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_changes_at_its_thresholds() {
        for (utilization, pressure) in [
            (0.0, Pressure::Low),
            (0.69, Pressure::Low),
            (0.70, Pressure::Medium),
            (0.85, Pressure::High),
            (0.95, Pressure::Critical),
            (1.0, Pressure::Critical),
        ] {
            assert_eq!(Pressure::of(utilization), pressure, "{utilization}");
        }
    }
}

//! The pool seen from outside: [`Stats`] are counted all the while, [`Fragmentation`] is looked
//! for.

use crate::compact::OverdueCopy;
use crate::error::{HeadOfLine, OldestBatch};
use crate::frame::ORDERS;
use crate::ids::Order;

use super::pool::Shared;
use crate::block::Latency;

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

/// How full a pool is. Beside threads that allocate and free, each number is of about the moment of
/// the call, and they need not add up; blocks that a thread is just handing on count where they
/// were before. When nobody is inside a call, they are exact.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Blocks, without the null block.
    pub total: usize,
    /// Blocks that somebody owns.
    pub used: usize,
    /// Blocks that any allocation can get now without evicting: in the bitmaps, in threads'
    /// magazines and in the depot. Those in the reserve are not among them.
    pub free: usize,
    /// Blocks that any allocation can get now, if need be by evicting: [`free`](Self::free) +
    /// [`evictable`](Self::evictable).
    pub available: usize,
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
    /// Of the [`free`](Self::free) blocks, those in threads' magazines and in the depot.
    pub in_magazines: usize,
    /// `used / total`.
    pub utilization: f64,
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
        let utilization = counts.used() as f64 / counts.total.max(1) as f64;
        Self {
            total: counts.total,
            used: counts.used(),
            free: counts.free(),
            available: counts.available(),
            evictable: counts.evictable,
            retired: counts.retired,
            reserved: counts.reserved,
            held: counts.held,
            waiting: shared.blocks.waiting(),
            in_magazines: counts.in_magazines,
            utilization,
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

/// How the free part of a pool hangs together, at one order. Exact when nobody allocates or frees
/// meanwhile.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub struct Fragmentation {
    /// The order k that [`rate`](Self::rate) and [`unusable`](Self::unusable) are about.
    pub order: Order,
    /// Of the free aligned runs of 2^k that there could be, if all blocks lay as well as they can,
    /// the share that there is not: 0 to 1. Frames in magazines are free, and on no run. An empty
    /// pool has 0, whatever its size, and so has one in which fewer than 2^k blocks are free.
    pub rate: f64,
    /// Linux's unusable-free-space index at the same order, over the bitmaps alone: the share of
    /// the free frames that are on no free aligned run of 2^k, also where none could be.
    pub unusable: f64,
    /// Free aligned runs by order, as few as cover the free frames.
    pub free_by_order: [usize; ORDERS],
    /// The longest free run, in frames, at any alignment.
    pub longest_run: usize,
    /// Mean length of the maximal free runs, in frames; 0 if nothing is free.
    pub mean_run: f64,
}

impl Fragmentation {
    pub(super) fn of(shared: &Shared, order: Order) -> Self {
        let census = shared.blocks.census(order);
        Self {
            order,
            rate: shared.blocks.rate(&census),
            unusable: census.fragmentation(),
            free_by_order: census.by_order,
            longest_run: census.longest_run,
            mean_run: if census.runs == 0 { 0.0 } else { census.free as f64 / census.runs as f64 },
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

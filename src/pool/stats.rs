use crate::block::{Blocks, Latency};
use crate::compact::OverdueCopy;
use crate::error::{HeadOfLine, OldestBatch, TurnHolder};
use crate::frame::ORDERS;
use crate::ids::Order;
use crate::sync::call;

use super::pool::Pool;

/// Pressure on the pool, by the share of used blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Pressure {
    /// Below 70 %.
    Low,
    /// From 70 % to below 85 %.
    Medium,
    /// From 85 % to below 95 %.
    High,
    /// From 95 %.
    Critical,
}

impl Pressure {
    /// Returns the pressure at this share of used blocks, 0 to 1.
    pub fn of(utilization: f64) -> Self {
        match utilization {
            u if u < 0.70 => Self::Low,
            u if u < 0.85 => Self::Medium,
            u if u < 0.95 => Self::High,
            _ => Self::Critical,
        }
    }
}

/// Occupancy of a pool. Exact while no thread is inside a call; otherwise each number is
/// approximate, the sums need not match, and a block in transit counts in its previous state.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Stats {
    /// Blocks in the pool, without the null block.
    pub total: usize,
    /// Owned blocks.
    pub used: usize,
    /// Blocks that can be allocated without evicting. Excludes the reserve.
    pub free: usize,
    /// [`free`](Self::free) + [`evictable`](Self::evictable).
    pub available: usize,
    /// Unowned blocks that the prefix cache keeps until their frames are needed.
    pub evictable: usize,
    /// Freed blocks that a batch in flight may still read.
    pub retired: usize,
    /// Free blocks reserved for urgent requests.
    pub reserved: usize,
    /// Free blocks held by moves or a shrink.
    pub held: usize,
    /// Part of [`free`](Self::free) reserved behind the ends of sequences. Other allocations use it
    /// last.
    pub reserved_for_growth: usize,
    /// Requests in the wait queue.
    pub waiting: usize,
    /// Waiting requests by priority: normal, high, urgent.
    #[cfg_attr(feature = "serde", serde(default))]
    pub waiting_by_priority: [usize; 3],
    /// Part of [`free`](Self::free) in threads' magazines and the depot.
    pub in_magazines: usize,
    /// `used / total`.
    pub utilization: f64,
    /// Pressure at this [`utilization`](Self::utilization).
    pub pressure: Pressure,
    /// Sampled latencies of allocations.
    #[cfg_attr(feature = "serde", serde(default))]
    pub latency: Latency,
    /// Batches in flight.
    pub batches_in_flight: u64,
    /// Batches that were [abandoned](crate::Batch#abandoned-batches) after writing to a sequence.
    #[cfg_attr(feature = "serde", serde(default))]
    pub batches_abandoned: u64,
    /// Closed sequences whose blocks count as used, and are cached once batches in flight finish.
    #[cfg_attr(feature = "serde", serde(default))]
    pub closing: usize,
    /// Oldest batch in flight; blocks [retired](Self::retired) after it began become free when it
    /// ends. Its age is a lower bound, measured from the first call that found it to be the oldest.
    pub oldest_batch: Option<OldestBatch>,
    /// First request in the queue, and since when it has been ready without being polled.
    pub head_of_line: Option<HeadOfLine>,
    /// Requests that were woken and not polled in time, so that others are served before them.
    pub passed_over: usize,
    /// Task whose turn it is to move blocks.
    #[cfg_attr(feature = "serde", serde(default))]
    pub turn: Option<TurnHolder>,
    /// A copy of moving blocks past its deadline; its blocks are among [`held`](Self::held).
    pub overdue_copy: Option<OverdueCopy>,
    /// Owned blocks whose bytes are being transferred to or from another pool or node.
    #[cfg_attr(feature = "serde", serde(default))]
    pub in_transfer: usize,
    /// Owned blocks of cancelled transfers, whose bytes a transport may still read or write.
    #[cfg_attr(feature = "serde", serde(default))]
    pub quarantined: usize,
    /// Blocks held because [wiping](crate::pool::PoolBuilder::zero_on_free) them failed.
    #[cfg_attr(feature = "serde", serde(default))]
    pub unwiped: usize,
}

impl Pool {
    /// Returns the pool's occupancy and state. O(threads), plus a word per 4,096 blocks.
    pub fn stats(&self) -> Stats {
        let _call = call();
        let transfers = self.0.transfers.counts();
        let stats = Stats::of(&self.0.blocks, self.0.sampler.read(), self.0.compactor.overdue_copy());
        let (batches_abandoned, closing) = self.0.sequences.unfinished();
        Stats {
            turn: self.0.compactor.turn_holder(),
            batches_abandoned,
            closing,
            in_transfer: transfers.in_transfer,
            quarantined: transfers.quarantined,
            ..stats
        }
    }

    /// Returns the fragmentation at the pool's [order](super::PoolBuilder::fragmentation_order).
    /// Scans the bitmaps: some hundred microseconds per million blocks.
    pub fn fragmentation(&self) -> Fragmentation {
        Fragmentation::of(&self.0.blocks, self.0.order)
    }

    /// Returns the [fragmentation rate](Fragmentation::rate) over free and evictable frames at the
    /// pool's [order](super::PoolBuilder::fragmentation_order): the rate after evicting all
    /// evictable blocks, which moves can lower. Reads the word of every block if any are evictable:
    /// some milliseconds per million blocks.
    pub fn available_fragmentation(&self) -> f64 {
        self.0.blocks.available_fragmentation(self.0.order)
    }
}

impl Stats {
    pub(super) fn of(blocks: &Blocks, latency: Latency, overdue_copy: Option<OverdueCopy>) -> Self {
        let counts = blocks.counts();
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
            reserved_for_growth: blocks.reserved_for_growth(),
            waiting: blocks.waiting(),
            waiting_by_priority: blocks.waiting_by_priority(),
            in_magazines: counts.in_magazines,
            utilization,
            pressure: Pressure::of(utilization),
            latency,
            batches_in_flight: blocks.clock().in_flight(),
            batches_abandoned: 0,
            closing: 0,
            oldest_batch: blocks.oldest_batch(),
            head_of_line: blocks.head_of_line(),
            passed_over: blocks.passed_over(),
            turn: None,
            overdue_copy,
            in_transfer: 0,
            quarantined: 0,
            unwiped: blocks.unwiped(),
        }
    }
}

/// Fragmentation of a pool's free frames at one order. Exact without concurrent calls.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Fragmentation {
    /// Order k of [`rate`](Self::rate) and [`unusable`](Self::unusable).
    pub order: Order,
    /// Fragmentation rate, 0 to 1: one minus the number of free aligned runs of 2^k, divided by the
    /// number that the same free frames could form. Frames in magazines count as free, but form no
    /// run. The rate is 0 if fewer than 2^k blocks are free, and in an empty pool.
    pub rate: f64,
    /// Linux's unusable-free-space index over the bitmaps: the share of the free frames that are in
    /// no free aligned run of 2^k, even where no such run is possible.
    pub unusable: f64,
    /// Number of free aligned runs of each order, in the smallest set that covers the free frames.
    pub free_by_order: [usize; ORDERS],
    /// Length of the longest free run of any alignment, in frames.
    pub longest_run: usize,
    /// Mean length of the maximal free runs in frames, or 0. See also [`Pool::sequence_runs`].
    pub mean_run: f64,
    /// Number of free frames that sequences reserve behind their last blocks.
    pub reserved_for_growth: usize,
}

impl Fragmentation {
    pub(super) fn of(blocks: &Blocks, order: Order) -> Self {
        let census = blocks.census(order);
        Self {
            order,
            rate: blocks.rate(&census),
            unusable: census.fragmentation(),
            free_by_order: census.by_order,
            longest_run: census.longest_run,
            reserved_for_growth: census.reserved_for_growth,
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

use crate::block::{AllocationCounts, LatencyHistogram, Operation, Refusals, Sampler, WaitCounts};
use crate::compact::MoveCounts;
use crate::migrate::MigrationCounts;
use crate::prefix::{EvictionCounts, PrefixCache, PrefixStats};

use super::{Pool, Stats};

/// Counters since the pool was built, current gauges, and histograms of latencies.
///
/// While other threads use the pool, each counter is read at a different moment, so sums need not
/// match. A thread counts its allocations and frees by plain stores, which may lag until the thread
/// synchronizes with the reader, for example by a join. While no thread is inside a call,
/// `allocations.blocks == allocations.freed_blocks + evictions.total() + stats.used +
/// stats.evictable`.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Metrics {
    /// Gauges of the current state.
    pub stats: Stats,
    /// Requests that got blocks, and numbers of blocks allocated and freed.
    pub allocations: AllocationCounts,
    /// Refused requests, by reason.
    pub refusals: Refusals,
    /// Requests that waited in the queue.
    pub waits: WaitCounts,
    /// Lookups, hits and registrations of the prefix cache; zero without one.
    pub prefix: PrefixStats,
    /// Tokens in the full blocks of all prompts that were looked up, without partly filled last
    /// blocks.
    #[cfg_attr(feature = "serde", serde(default))]
    pub query_tokens: u64,
    /// Tokens in the full blocks that were hit.
    #[cfg_attr(feature = "serde", serde(default))]
    pub hit_tokens: u64,
    /// Evicted blocks, by the policy's reason.
    pub evictions: EvictionCounts,
    /// Moves of blocks within the pool, by outcome.
    pub moves: MoveCounts,
    /// Transfers between pools that this pool began; `None` for a frame pool, which has none.
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    pub migrations: Option<MigrationCounts>,
    /// Subscribers to the events of the prefix cache.
    pub event_subscribers: usize,
    /// Events that subscribers lost by receiving too slowly, counted when they would have been
    /// received.
    pub lost_events: u64,
    /// Latencies.
    pub latencies: Latencies,
}

/// Histograms of operation latencies. All but waits and resizes are sampled: one in
/// [`sampled_every`](Self::sampled_every) per thread and kind.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct Latencies {
    /// Number of operations per [timed](super::PoolBuilder::latency_sample) one; 0 if none is
    /// timed.
    pub sampled_every: u64,
    /// Requests for leases that did not wait, including refused ones.
    pub allocate: LatencyHistogram,
    /// Allocations of appends and drafts that needed blocks, including refused ones.
    pub append: LatencyHistogram,
    /// Openings of sequences with a prompt, including the lookup of its prefix.
    pub admit: LatencyHistogram,
    /// Waits in the queue that ended with blocks, from joining the queue. Not sampled.
    pub wait: LatencyHistogram,
    /// Closings of sequences, and releases of leases whose allocation was timed and that gave out
    /// no handle and no second lease.
    pub free: LatencyHistogram,
    /// Resizes, including refused ones and their waits for batches. Not sampled.
    pub resize: LatencyHistogram,
}

impl Latencies {
    pub(super) fn of(sampler: &Sampler) -> Self {
        Self {
            sampled_every: sampler.every(),
            allocate: sampler.histogram(Operation::Allocate),
            append: sampler.histogram(Operation::Append),
            admit: sampler.histogram(Operation::Admit),
            wait: sampler.histogram(Operation::Wait),
            free: sampler.histogram(Operation::Free),
            resize: sampler.histogram(Operation::Resize),
        }
    }
}

impl Pool {
    /// Returns counters since the pool was built, current gauges, and histograms. O(threads).
    pub fn metrics(&self) -> Metrics {
        let (blocks, cache) = (&self.0.blocks, self.prefix_cache());
        // Lookups count the blocks of the first list.
        let block_tokens = self.0.sequences.block_tokens() as u64;
        let prefix = cache.map(PrefixCache::stats).unwrap_or_default();
        let events = cache.map(PrefixCache::events);
        Metrics {
            stats: self.stats(),
            allocations: blocks.allocation_counts(),
            refusals: blocks.refusals(),
            waits: blocks.wait_counts(),
            query_tokens: prefix.lookup_blocks * block_tokens,
            hit_tokens: prefix.hit_blocks * block_tokens,
            prefix,
            evictions: cache.map(|cache| cache.evictions(blocks.outlived_blocks())).unwrap_or_default(),
            moves: self.0.compactor.move_counts(),
            migrations: Some(*self.0.migrations()),
            event_subscribers: events.map_or(0, |events| events.subscribers()),
            lost_events: events.map_or(0, |events| events.lost()),
            latencies: Latencies::of(&self.0.sampler),
        }
    }
}

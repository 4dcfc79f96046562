use crate::block::{Latency, Sampler};
use crate::migrate::MigrationCounts;
use crate::pool::metrics::{Latencies, Metrics};
use crate::pool::stats::Stats;
use crate::prefix::PrefixStats;

use super::frame_pool::{FramePool, Shared};

impl FramePool {
    /// Returns counters since the pool was built, current gauges, and histograms. O(threads).
    ///
    /// `query_tokens` and `hit_tokens` count keys. Moves are those that
    /// [`FrameMoves`](crate::FrameMoves) proposed, without bytes. Only waits are timed. A
    /// successful [claim](Self::claim) counts as an allocation.
    pub fn metrics(&self) -> Metrics {
        let Shared { blocks, cache, .. } = &*self.0;
        let prefix: PrefixStats = cache.stats();
        let sampler = Sampler::new(0, blocks.latencies().clone());
        Metrics {
            stats: Stats::of(blocks, Latency::default(), None),
            allocations: blocks.allocation_counts(),
            refusals: blocks.refusals(),
            waits: blocks.wait_counts(),
            query_tokens: prefix.lookup_blocks,
            hit_tokens: prefix.hit_blocks,
            prefix,
            evictions: cache.evictions(blocks.outlived_blocks()),
            moves: self.0.move_counts(),
            migrations: MigrationCounts::default(),
            event_subscribers: cache.events().subscribers(),
            lost_events: cache.events().lost(),
            latencies: Latencies::of(&sampler),
        }
    }
}

use crate::block::{Accounts, Latency, Sampler};
use crate::compact::Snapshot;
use crate::ids::BlockId;
use crate::pool::metrics::{Latencies, Metrics};
use crate::pool::owners::{Listed, Owners};
use crate::pool::stats::{Fragmentation, Stats};
use crate::prefix::PrefixStats;

use super::frame_pool::{FramePool, Shared};

impl FramePool {
    /// Returns the fragmentation at the pool's
    /// [order](crate::FramePoolBuilder::fragmentation_order), from the bitmaps.
    pub fn fragmentation(&self) -> Fragmentation {
        Fragmentation::of(&self.0.blocks, self.0.order)
    }

    /// Returns the rate over free frames and those that an allocation can evict, like
    /// [`Pool::available_fragmentation`](crate::Pool::available_fragmentation).
    pub fn available_fragmentation(&self) -> f64 {
        self.0.blocks.available_fragmentation(self.0.order)
    }

    /// Returns the state of every frame, without sequences. Visits the whole pool.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of_frames(&self.0.blocks, self.0.order)
    }

    /// Returns the frames with references, as [leases](Owners::leases) by the sequence that their
    /// requests named; blocks are named by the frames that they are in. None is reported as pinned.
    /// [Unaccounted](Owners::unaccounted) references are named by ids of blocks. For diagnosis:
    /// visits the whole pool.
    pub fn owners(&self) -> Owners {
        let blocks = &self.0.blocks;
        let mut owners = Owners::of(blocks, Listed::default(), Accounts::default, Vec::new);
        let in_place = |id: &mut BlockId| *id = BlockId(blocks.word(*id).frame().0);
        for owner in &mut owners.leases {
            owner.blocks.iter_mut().for_each(in_place);
            owner.blocks.sort_unstable();
        }
        // The pin of each used frame is the pool's own.
        owners.pinned.clear();
        owners
    }

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
            migrations: None,
            event_subscribers: cache.events().subscribers(),
            lost_events: cache.events().lost(),
            latencies: Latencies::of(&sampler),
        }
    }
}

//! Counts of lookups, hits, registrations and evictions.

use crate::sync::{CachePadded, Ordering::*, StatisticU64, thread_number};

use super::policy::QUEUES_MAX;

/// Counts since the pool was built. Each is exact; together they are about one snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default))]
#[non_exhaustive]
pub struct PrefixStats {
    /// Prompts that were looked up. A request counts once, at its first append, but not while it is
    /// refused, nor when it is [resumed](Self::resumed_lookups).
    pub lookups: u64,
    /// Full blocks of those prompts.
    pub lookup_blocks: u64,
    /// Leading blocks that were cached, over all prompts.
    pub hit_blocks: u64,
    /// Prompts of requests that were resumed after a [preemption](crate::Preempt::Recompute).
    pub resumed_lookups: u64,
    /// Full blocks of those prompts.
    pub resumed_lookup_blocks: u64,
    /// Leading blocks of those prompts that were cached.
    pub resumed_hit_blocks: u64,
    /// Lookups that ended at a cached block because it has the maximum of 8,191 references.
    #[cfg_attr(feature = "serde", serde(default))]
    pub full_blocks: u64,
    /// Blocks that were registered.
    pub registered_blocks: u64,
    /// Entries of registered blocks that found no room in the index, so that lookups miss them.
    /// Includes entries of duplicates, which compete for the same places.
    pub forgotten_blocks: u64,
    /// Blocks that were evicted.
    pub evicted_blocks: u64,
    /// Blocks that were [uncached](crate::Pool::uncache); not evictions.
    pub uncached_blocks: u64,
}

impl PrefixStats {
    /// Returns the hit share of `lookup_blocks`; 0 before the first lookup.
    pub fn hit_rate(&self) -> f64 {
        if self.lookup_blocks == 0 { 0.0 } else { self.hit_blocks as f64 / self.lookup_blocks as f64 }
    }
}

/// Counts of evicted blocks since the pool was built, by the policy's reason.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct EvictionCounts {
    /// Blocks evicted in the policy's order, by the number of the queue that the policy chose.
    pub by_queue: Vec<u64>,
    /// Blocks that no lookup would have found: duplicates, and those cached before a clear.
    pub useless: u64,
    /// Blocks that were [demoted](crate::hints::Action::Demote); frames of a frame pool that were
    /// freed to be evicted first; blocks of checkpoints that later ones dominate.
    pub evict_first: u64,
    /// Blocks evicted before the end of their [retention](crate::AdmitRequest::keep_until), because
    /// no others could be.
    #[cfg_attr(feature = "serde", serde(default))]
    pub retained: u64,
    /// Blocks evicted out of order: for a run, for a unit of free frames, by a shrink, or, if
    /// cached before a clear, by an export of cold blocks.
    pub out_of_order: u64,
}

impl EvictionCounts {
    /// Returns the number of evicted blocks.
    pub fn total(&self) -> u64 {
        let beside = self.useless + self.evict_first + self.retained;
        self.by_queue.iter().sum::<u64>() + beside + self.out_of_order
    }
}

/// Threads that look prompts up rarely share a stripe.
const STRIPES: usize = if cfg!(kvpool_loom) { 1 } else { 16 };

/// Index of retained blocks.
pub(super) const RETAINED: usize = QUEUES_MAX + 2;
const OUT_OF_ORDER: usize = RETAINED + 1;

/// Relaxed counters: no other data depends on them. Those that one call changes share a cache line.
#[derive(Default)]
pub(super) struct Tallies {
    /// Of new and of resumed requests, in stripes by thread.
    lookups: [CachePadded<[[StatisticU64; 3]; 2]>; STRIPES],
    registered: CachePadded<StatisticU64>,
    pub(super) uncached: StatisticU64,
    full: StatisticU64,
    /// By queue of the policy; then useless blocks and evict-first ones; last, retained ones, and
    /// those out of order.
    evicted: CachePadded<[StatisticU64; OUT_OF_ORDER + 1]>,
}

impl Tallies {
    pub(super) fn looked_up(&self, blocks: usize, hits: usize, comes_back: bool) {
        let stripe = &self.lookups[thread_number() % STRIPES];
        let [lookups, lookup_blocks, hit_blocks] = &stripe[usize::from(comes_back)];
        lookups.fetch_add(1, Relaxed);
        lookup_blocks.fetch_add(blocks as u64, Relaxed);
        if hits > 0 {
            hit_blocks.fetch_add(hits as u64, Relaxed);
        }
    }

    pub(super) fn full(&self) {
        self.full.fetch_add(1, Relaxed);
    }

    pub(super) fn registered(&self, blocks: usize) {
        self.registered.fetch_add(blocks as u64, Relaxed);
    }

    /// Counts evicted blocks of a queue; `None`: out of order.
    pub(super) fn evicted(&self, queue: Option<usize>, blocks: usize) {
        self.evicted[queue.unwrap_or(OUT_OF_ORDER)].fetch_add(blocks as u64, Relaxed);
    }

    /// `forgotten` blocks were freed by their last owner, and are not counted as out of order.
    pub(super) fn evictions(&self, queues: usize, forgotten: u64) -> EvictionCounts {
        let count = |queue: usize| self.evicted[queue].load(Relaxed);
        EvictionCounts {
            by_queue: (0..queues).map(count).collect(),
            useless: count(queues),
            evict_first: count(queues + 1),
            retained: count(RETAINED),
            out_of_order: count(OUT_OF_ORDER).saturating_sub(forgotten),
        }
    }

    pub(super) fn read(&self, forgotten_blocks: u64) -> PrefixStats {
        let count = |counter: &StatisticU64| counter.load(Relaxed);
        let looked_up = |resumed: usize, at: usize| -> u64 {
            self.lookups.iter().map(|stripe| count(&stripe[resumed][at])).sum()
        };
        PrefixStats {
            lookups: looked_up(0, 0),
            lookup_blocks: looked_up(0, 1),
            hit_blocks: looked_up(0, 2),
            resumed_lookups: looked_up(1, 0),
            resumed_lookup_blocks: looked_up(1, 1),
            resumed_hit_blocks: looked_up(1, 2),
            full_blocks: count(&self.full),
            registered_blocks: count(&self.registered),
            forgotten_blocks,
            evicted_blocks: self.evicted.iter().map(count).sum(),
            uncached_blocks: count(&self.uncached),
        }
    }
}

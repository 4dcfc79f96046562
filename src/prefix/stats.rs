//! Counts of lookups, hits, registrations and evictions.

use crate::sync::{AtomicU64, CachePadded, Ordering::*};

/// Counts since the pool was built. Each is exact; together they are a snapshot of about one
/// moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PrefixStats {
    /// Prompts that were looked up.
    pub lookups: u64,
    /// Full blocks of those prompts.
    pub lookup_blocks: u64,
    /// Leading blocks that were cached, over all prompts.
    pub hit_blocks: u64,
    /// Blocks that were registered.
    pub registered_blocks: u64,
    /// Entries of registered blocks that found no room in the index. Lookups miss those blocks.
    /// Blocks with the same content as a cached one, which sequences that compute the same tokens
    /// side by side register, compete for the same places and are counted here.
    pub forgotten_blocks: u64,
    /// Blocks that were evicted.
    pub evicted_blocks: u64,
}

impl PrefixStats {
    /// Returns the share of looked-up blocks that were cached; 0 before the first lookup.
    pub fn hit_rate(&self) -> f64 {
        if self.lookup_blocks == 0 { 0.0 } else { self.hit_blocks as f64 / self.lookup_blocks as f64 }
    }
}

/// The counters. Relaxed throughout: no other data depends on them. Counters that one call changes
/// share a cache line.
#[derive(Default)]
pub(super) struct Tallies {
    lookups: CachePadded<[AtomicU64; 3]>,
    registered: CachePadded<AtomicU64>,
    evicted: CachePadded<AtomicU64>,
}

impl Tallies {
    pub(super) fn looked_up(&self, blocks: usize, hits: usize) {
        let [lookups, lookup_blocks, hit_blocks] = &*self.lookups;
        lookups.fetch_add(1, Relaxed);
        lookup_blocks.fetch_add(blocks as u64, Relaxed);
        if hits > 0 {
            hit_blocks.fetch_add(hits as u64, Relaxed);
        }
    }

    pub(super) fn registered(&self, blocks: usize) {
        self.registered.fetch_add(blocks as u64, Relaxed);
    }

    pub(super) fn evicted(&self, blocks: usize) {
        self.evicted.fetch_add(blocks as u64, Relaxed);
    }

    pub(super) fn read(&self, forgotten_blocks: u64) -> PrefixStats {
        let count = |counter: &AtomicU64| counter.load(Relaxed);
        PrefixStats {
            lookups: count(&self.lookups[0]),
            lookup_blocks: count(&self.lookups[1]),
            hit_blocks: count(&self.lookups[2]),
            registered_blocks: count(&self.registered),
            forgotten_blocks,
            evicted_blocks: count(&self.evicted),
        }
    }
}

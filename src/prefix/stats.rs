//! What lookups found, and what became of blocks.

use crate::sync::{AtomicU64, CachePadded, Ordering::*};

/// Counts since the pool was built. Each is exact; together they are of about the same moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct PrefixStats {
    /// Prompts that were looked up.
    pub lookups: u64,
    /// Full blocks of those prompts.
    pub lookup_blocks: u64,
    /// Leading ones of each that were cached.
    pub hit_blocks: u64,
    /// Blocks that were registered.
    pub registered_blocks: u64,
    /// Times that the index had no room for one, which is not found then.
    pub forgotten_blocks: u64,
    /// Blocks that were evicted.
    pub evicted_blocks: u64,
}

impl PrefixStats {
    /// The share of looked-up blocks that were cached; 0 before the first.
    pub fn hit_rate(&self) -> f64 {
        if self.lookup_blocks == 0 { 0.0 } else { self.hit_blocks as f64 / self.lookup_blocks as f64 }
    }
}

/// The counters. Relaxed throughout: nothing is reached by them. Those that one call changes share a line.
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

    pub(super) fn evicted(&self) {
        self.evicted.fetch_add(1, Relaxed);
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

//! Policies behind the pool's trait, called as a pool calls them.
//!
//! The queues of a pool are concurrent and approximate; these are exact and used by one thread, so
//! that only the decisions of the policy count.

use std::collections::BTreeMap;

use kvpool::prefix::policy::{CachePriority, Head, Lookup, Millis, Policy, Released};

use super::leading;
use super::prompts::Prompts;

/// The state of a cached block.
#[derive(Clone, Copy, Default)]
struct Row {
    is_cached: bool,
    queue: u8,
    rank: u64,
    state: u64,
    hits: u32,
}

/// Evictable blocks by queue, rank and number.
type Queues = Vec<BTreeMap<(u64, u32), u64>>;

/// Returns the hits of a policy with `capacity` blocks.
pub(super) fn hits(prompts: &Prompts, capacity: usize, policy: &dyn Policy) -> usize {
    let mut rows = vec![Row::default(); prompts.distinct()];
    let mut queues: Queues = vec![BTreeMap::new(); policy.queues()];
    let (mut hits, mut cached, mut order) = (0, 0, 0);
    for prompt in &prompts.prompts {
        let (blocks, now) = (&prompt.blocks[..], Millis(prompt.at_ms));
        let found = leading(blocks, |block| rows[block].is_cached);
        hits += found;
        let mut hashes = blocks.iter().map(|&block| hash(block));
        let context = policy.looked_up(
            &mut Lookup {
                blocks: blocks.len() as u32,
                hits: found as u32,
                state: found.checked_sub(1).map_or(0, |last| rows[blocks[last] as usize].state),
                hashes: &mut hashes,
            },
            now,
        );
        for &block in blocks {
            let row = &mut rows[block as usize];
            if row.is_cached {
                queues[row.queue as usize].remove(&(row.rank, block));
                row.hits = row.hits.saturating_add(1);
                cached -= 1;
            } else {
                *row = Row { is_cached: true, ..Row::default() };
            }
        }
        for (depth, &block) in blocks.iter().enumerate().rev() {
            let row = &mut rows[block as usize];
            let released = Released {
                order,
                hash: hash(block),
                depth: depth as u32,
                chain: blocks.len() as u32,
                hits: row.hits,
                context,
                state: row.state,
                priority: CachePriority::Normal,
                keep_until: None,
            };
            let place = policy.place(&released, now);
            (row.queue, row.rank, row.state) = (place.queue, place.rank, place.state);
            queues[row.queue as usize].insert((row.rank, block), row.state);
            order += 1;
            cached += 1;
        }
        while cached > capacity {
            let heads: Vec<_> = queues.iter().map(head).collect();
            let queue = policy.victim(&heads, now).expect("a cached block is evictable");
            let ((_, block), _) = queues[queue].pop_first().expect("a queue with a head");
            rows[block as usize].is_cached = false;
            cached -= 1;
        }
    }
    hits
}

fn head(queue: &BTreeMap<(u64, u32), u64>) -> Option<Head> {
    queue.first_key_value().map(|(&(rank, _), &state)| Head { rank, state })
}

/// Returns the hash of a block, by any function that mixes well.
fn hash(block: u32) -> u64 {
    let mut hash = u64::from(block).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ hash >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^ hash >> 32
}

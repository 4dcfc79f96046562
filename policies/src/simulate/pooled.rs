//! Policies behind the pool's trait, called as a pool calls them.
//!
//! The queues of a pool are concurrent and approximate; these are exact and used by one thread, so
//! that only the decisions of the policy count.

use std::collections::BTreeMap;

use kvpool::prefix::policy::{CachePriority, Head, Lookup, Millis, Policy, Released};

use super::leading;
use super::prompts::Prompts;

/// What a pool notes beside a block.
#[derive(Clone, Copy, Default)]
struct Row {
    queue: u8,
    rank: u64,
    state: u64,
    hits: u32,
}

/// Where a released block stood in the request that released it.
#[derive(Clone, Copy)]
pub(super) struct Position {
    /// Blocks before it.
    pub depth: u32,
    /// Blocks of the request.
    pub chain: u32,
    /// The policy's context of the request.
    pub context: u64,
}

/// The evictable blocks of a pool, in the queues that a policy chose.
pub(super) struct Evictable<'a> {
    policy: &'a dyn Policy,
    rows: Vec<Row>,
    /// Blocks by queue, rank and number.
    queues: Vec<BTreeMap<(u64, u32), u64>>,
    order: u64,
    blocks: usize,
}

impl<'a> Evictable<'a> {
    /// Creates empty queues for blocks with numbers below `numbers`.
    pub(super) fn new(policy: &'a dyn Policy, numbers: usize) -> Self {
        let queues = vec![BTreeMap::new(); policy.queues()];
        Self { policy, rows: vec![Row::default(); numbers], queues, order: 0, blocks: 0 }
    }

    /// Returns the number of evictable blocks.
    pub(super) fn len(&self) -> usize {
        self.blocks
    }

    /// Tells the policy of a lookup of which the first `found` blocks hit. Returns its context.
    pub(super) fn looked_up(&self, blocks: &[u32], found: usize, now: Millis) -> u64 {
        let mut hashes = blocks.iter().map(|&block| hash(block));
        let mut lookup = Lookup {
            blocks: blocks.len() as u32,
            hits: found as u32,
            state: found.checked_sub(1).map_or(0, |last| self.rows[blocks[last] as usize].state),
            hashes: &mut hashes,
        };
        self.policy.looked_up(&mut lookup, now)
    }

    /// Notes that a block was filled.
    pub(super) fn filled(&mut self, block: u32) {
        self.rows[block as usize] = Row::default();
    }

    /// Counts a hit.
    pub(super) fn hit(&mut self, block: u32) {
        let row = &mut self.rows[block as usize];
        row.hits = row.hits.saturating_add(1);
    }

    /// Removes a block that got an owner.
    pub(super) fn remove(&mut self, block: u32) {
        let row = self.rows[block as usize];
        self.queues[row.queue as usize].remove(&(row.rank, block));
        self.blocks -= 1;
    }

    /// Files a block that lost its last owner.
    pub(super) fn file(&mut self, block: u32, at: Position, now: Millis) {
        let row = &mut self.rows[block as usize];
        let Position { depth, chain, context } = at;
        let released = Released {
            order: self.order,
            hash: hash(block),
            depth,
            chain,
            hits: row.hits,
            context,
            state: row.state,
            priority: CachePriority::Normal,
            keep_until: None,
        };
        let place = self.policy.place(&released, now);
        (row.queue, row.rank, row.state) = (place.queue, place.rank, place.state);
        self.queues[row.queue as usize].insert((row.rank, block), row.state);
        self.order += 1;
        self.blocks += 1;
    }

    /// Evicts the block that the policy chooses; `None` if there is none.
    pub(super) fn evict(&mut self, now: Millis) -> Option<u32> {
        let heads: Vec<_> = self.queues.iter().map(head).collect();
        let queue = self.policy.victim(&heads, now)?;
        let ((_, block), _) = self.queues[queue].pop_first().expect("a queue with a head");
        self.blocks -= 1;
        Some(block)
    }
}

/// Returns the hits of a policy with `capacity` blocks, where a request takes no time.
pub(super) fn hits(prompts: &Prompts, capacity: usize, policy: &dyn Policy) -> usize {
    let mut is_cached = vec![false; prompts.numbers()];
    let mut evictable = Evictable::new(policy, prompts.numbers());
    let mut hits = 0;
    for prompt in &prompts.prompts {
        let (blocks, now) = (&prompt.blocks[..], Millis(prompt.at_ms));
        let found = leading(blocks, |block| is_cached[block]);
        hits += found;
        let context = evictable.looked_up(blocks, found, now);
        for &block in blocks {
            if is_cached[block as usize] {
                evictable.remove(block);
                evictable.hit(block);
            } else {
                is_cached[block as usize] = true;
                evictable.filled(block);
            }
        }
        for (depth, &block) in blocks.iter().enumerate().rev() {
            let at = Position { depth: depth as u32, chain: blocks.len() as u32, context };
            evictable.file(block, at, now);
        }
        while evictable.len() > capacity {
            let block = evictable.evict(now).expect("a cached block is evictable");
            is_cached[block as usize] = false;
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

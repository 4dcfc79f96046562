//! The evictable blocks of a cache that is no pool, in the queues that a policy chose.
//!
//! The queues of a pool are concurrent and approximate; these are exact and used by one thread. A
//! caller numbers its blocks, fills them, and does what a pool does:
//!
//! ```text
//! looked_up, hit     a request looks up its prompt
//! remove             a block gets a user
//! place, file        it loses its last user: the policy places it, and it can be evicted
//! evict              the policy's choice
//! ```

use std::collections::BTreeMap;
use std::ops::Deref;

use kvpool::SessionId;
use kvpool::prefix::policy::{CachePriority, Head, Lookup, Millis, Policy, Released};

/// What a pool notes beside a block.
#[derive(Clone, Copy, Default)]
struct Row {
    hash: u64,
    queue: u8,
    rank: u64,
    state: u64,
    hits: u32,
}

/// Where a released block stood in the request that released it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Position {
    /// Blocks before it.
    pub depth: u32,
    /// Blocks of the request.
    pub chain: u32,
    /// The policy's context of the request.
    pub context: u64,
    /// The session of the request.
    pub session: Option<SessionId>,
    /// When that session is expected to continue, if known.
    pub returns_at: Option<Millis>,
}

/// The evictable blocks of a cache, in the queues that a policy chose. Blocks are small numbers of
/// the caller's, and must have been [filled](Self::fill) before anything else.
pub struct Evictable<P> {
    policy: P,
    rows: Vec<Row>,
    /// Blocks by queue, rank and number, with their states.
    queues: Vec<BTreeMap<(u64, u32), u64>>,
    order: u64,
    blocks: usize,
}

impl<P: Deref<Target: Policy>> Evictable<P> {
    /// Creates empty queues.
    pub fn new(policy: P) -> Self {
        let queues = vec![BTreeMap::new(); policy.queues()];
        Self { policy, rows: Vec::new(), queues, order: 0, blocks: 0 }
    }

    /// Forgets all blocks, and begins with another policy. The order of releases goes on.
    pub fn reset(&mut self, policy: P) {
        *self = Self { order: self.order, ..Self::new(policy) };
    }

    /// Returns the number of evictable blocks.
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Returns whether no block is evictable.
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Returns the next number of the order of releases.
    pub fn next_order(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    /// Notes that a block was filled, with contents of this hash: 64 well-mixed bits.
    pub fn fill(&mut self, block: u32, hash: u64) {
        let rows = self.rows.len().max(block as usize + 1);
        self.rows.resize(rows, Row::default());
        self.rows[block as usize] = Row { hash, ..Row::default() };
    }

    /// Tells the policy of a lookup of these hashes, of which the first `hits` were hits, up to the
    /// block `last` if the caller still has it. Returns the context of the request's releases.
    pub fn looked_up(
        &self,
        hashes: impl ExactSizeIterator<Item = u64>,
        hits: usize,
        last: Option<u32>,
        session: Option<SessionId>,
        now: Millis,
    ) -> u64 {
        let (blocks, mut hashes) = (hashes.len() as u32, hashes);
        let state = last.map_or(0, |last| self.rows[last as usize].state);
        let hits = hits as u32;
        self.policy.looked_up(&mut Lookup { blocks, hits, state, hashes: &mut hashes, session }, now)
    }

    /// Counts a hit.
    pub fn hit(&mut self, block: u32) {
        let row = &mut self.rows[block as usize];
        row.hits = row.hits.saturating_add(1);
    }

    /// Removes a block from its queue: it got a user. Returns whether it was in one.
    pub fn remove(&mut self, block: u32) -> bool {
        let row = self.rows[block as usize];
        let was_there = self.queues[row.queue as usize].remove(&(row.rank, block)).is_some();
        self.blocks -= usize::from(was_there);
        was_there
    }

    /// Has the policy place a block that is in no queue, as released now.
    pub fn place(&mut self, block: u32, at: Position, now: Millis) {
        let order = self.next_order();
        let row = &mut self.rows[block as usize];
        let Position { depth, chain, context, session, returns_at } = at;
        let released = Released {
            order,
            hash: row.hash,
            depth,
            chain,
            hits: row.hits,
            context,
            state: row.state,
            priority: CachePriority::Normal,
            session,
            returns_at,
        };
        let place = self.policy.place(&released, now);
        let last = self.queues.len() - 1;
        (row.queue, row.rank, row.state) = (place.queue.min(last as u8), place.rank, place.state);
    }

    /// Adds a block to the queue that the policy chose when it was placed last.
    pub fn file(&mut self, block: u32) {
        let row = self.rows[block as usize];
        let is_new = self.queues[row.queue as usize].insert((row.rank, block), row.state).is_none();
        self.blocks += usize::from(is_new);
    }

    /// Evicts the block that the policy chooses; `None` if there is none.
    pub fn evict(&mut self, now: Millis) -> Option<u32> {
        let heads: Vec<_> = self.queues.iter().map(head).collect();
        let queue = self.policy.victim(&heads, now)?;
        let ((_, block), _) = self.queues[queue].pop_first().expect("a queue with a head");
        self.blocks -= 1;
        Some(block)
    }
}

fn head(queue: &BTreeMap<(u64, u32), u64>) -> Option<Head> {
    queue.first_key_value().map(|(&(rank, _), &state)| Head { rank, state })
}

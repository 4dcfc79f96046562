//! The evictable blocks of a cache: in the queues of a policy behind the pool's trait, which is
//! called as a pool calls it, or in the order of their next use. The queues are exact, so that only
//! the decisions of the policy count.

use std::collections::BTreeSet;

use kvpool::SessionId;
use kvpool::prefix::policy::{Millis, Policy};

use super::leading;
use super::prompts::Prompts;
use crate::evictable::{Evictable, Position};

/// The evictable blocks, in the order of their eviction.
pub(super) trait Cache {
    /// Returns the number of blocks.
    fn len(&self) -> usize;
    /// Observes the lookup of a request, of which the first `found` blocks hit. Returns a context
    /// for the releases of the request.
    fn looked_up(
        &mut self,
        request: u32,
        session: Option<SessionId>,
        blocks: &[u32],
        found: usize,
        now: Millis,
    ) -> u64;
    /// Notes that a block was filled.
    fn filled(&mut self, block: u32);
    /// Counts a hit on a block.
    fn hit(&mut self, block: u32);
    /// Removes a block that got an owner.
    fn remove(&mut self, block: u32);
    /// Adds a block that lost its last owner.
    fn file(&mut self, block: u32, at: Position, now: Millis);
    /// Removes the block to be evicted.
    fn evict(&mut self, now: Millis) -> Option<u32>;
}

impl Cache for Evictable<&dyn Policy> {
    fn len(&self) -> usize {
        self.len()
    }

    fn looked_up(
        &mut self,
        _request: u32,
        session: Option<SessionId>,
        blocks: &[u32],
        found: usize,
        now: Millis,
    ) -> u64 {
        let last = found.checked_sub(1).map(|last| blocks[last]);
        Evictable::looked_up(self, blocks.iter().map(|&block| hash(block)), found, last, session, now)
    }

    fn filled(&mut self, block: u32) {
        self.fill(block, hash(block));
    }

    fn hit(&mut self, block: u32) {
        self.hit(block);
    }

    fn remove(&mut self, block: u32) {
        self.remove(block);
    }

    fn file(&mut self, block: u32, at: Position, now: Millis) {
        self.place(block, at, now);
        self.file(block);
    }

    fn evict(&mut self, now: Millis) -> Option<u32> {
        self.evict(now)
    }
}

/// The bound: with all future requests known, evicts the block whose next lookup is last, and of
/// one prompt the end first. In sessions, whose order depends on the policy: the block that is
/// never looked up again, or whose session returns last.
pub(super) struct Clairvoyant {
    /// The requests that look up each block.
    uses: Vec<Vec<u32>>,
    started: u32,
    by_return: bool,
    /// The lookups of each block that are left.
    left: Vec<u32>,
    queue: BTreeSet<(u64, u32, u32)>,
    keys: Vec<(u64, u32, u32)>,
}

impl Clairvoyant {
    pub(super) fn new(prompts: &Prompts, by_return: bool) -> Self {
        let mut uses = vec![Vec::new(); prompts.numbers()];
        for (prompt, request) in prompts.prompts.iter().zip(0..) {
            prompt.blocks.iter().for_each(|&block| uses[block as usize].push(request));
        }
        let keys = vec![(0, 0, 0); prompts.numbers()];
        let left = uses.iter().map(|uses| uses.len() as u32).collect();
        Self { uses, started: 0, by_return, left, queue: BTreeSet::new(), keys }
    }
}

impl Cache for Clairvoyant {
    fn len(&self) -> usize {
        self.queue.len()
    }

    fn looked_up(
        &mut self,
        request: u32,
        _session: Option<SessionId>,
        blocks: &[u32],
        _found: usize,
        _now: Millis,
    ) -> u64 {
        self.started = request;
        if self.by_return {
            blocks.iter().for_each(|&block| self.left[block as usize] -= 1);
        }
        0
    }

    fn filled(&mut self, _block: u32) {}

    fn hit(&mut self, _block: u32) {}

    fn remove(&mut self, block: u32) {
        self.queue.remove(&self.keys[block as usize]);
    }

    fn file(&mut self, block: u32, at: Position, _now: Millis) {
        let next = if self.by_return {
            // Without a time, it waits for a subagent.
            let returns_at = at.returns_at.map_or(0, |Millis(at)| at.min(u64::MAX - 1));
            if self.left[block as usize] == 0 { u64::MAX } else { returns_at }
        } else {
            let uses = &self.uses[block as usize];
            let next = uses.get(uses.partition_point(|&request| request <= self.started));
            next.map_or(u64::MAX, |&request| request.into())
        };
        let key = (next, at.depth, block);
        self.keys[block as usize] = key;
        self.queue.insert(key);
    }

    fn evict(&mut self, _now: Millis) -> Option<u32> {
        self.queue.pop_last().map(|(.., block)| block)
    }
}

/// Returns the hits with `capacity` blocks, where a request takes no time.
pub(super) fn hits(prompts: &Prompts, capacity: usize, mut cache: impl Cache) -> usize {
    let mut is_cached = vec![false; prompts.numbers()];
    let mut hits = 0;
    for (prompt, request) in prompts.prompts.iter().zip(0..) {
        let (blocks, now) = (&prompt.blocks[..], Millis(prompt.at_ms));
        let found = leading(blocks, |block| is_cached[block]);
        hits += found;
        let session = prompt.turn.map(|turn| turn.session);
        let context = cache.looked_up(request, session, blocks, found, now);
        for &block in blocks {
            if is_cached[block as usize] {
                cache.remove(block);
                cache.hit(block);
            } else {
                is_cached[block as usize] = true;
                cache.filled(block);
            }
        }
        for (&block, depth) in blocks.iter().zip(0..).collect::<Vec<_>>().into_iter().rev() {
            let (chain, returns_at) = (blocks.len() as u32, None);
            cache.file(block, Position { depth, chain, context, session, returns_at }, now);
        }
        while cache.len() > capacity {
            let block = cache.evict(now).expect("a cached block is evictable");
            is_cached[block as usize] = false;
        }
    }
    hits
}

/// Returns the hash of a block, by any function that mixes well.
fn hash(block: u32) -> u64 {
    let mut hash = u64::from(block).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ hash >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash ^ hash >> 32
}

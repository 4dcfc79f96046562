//! Policies behind the pool's trait, called as a pool calls them.
//!
//! The queues are exact, so that only the decisions of the policy count.

use kvpool::prefix::policy::{Millis, Policy};

use super::leading;
use super::prompts::Prompts;
use crate::evictable::{Evictable, Position};

/// Tells the policy of a lookup of which the first `found` blocks hit. Returns its context.
pub(super) fn looked_up(
    evictable: &Evictable<&dyn Policy>,
    blocks: &[u32],
    found: usize,
    now: Millis,
) -> u64 {
    let last = found.checked_sub(1).map(|last| blocks[last]);
    evictable.looked_up(blocks.iter().map(|&block| hash(block)), found, last, now)
}

/// Notes that a block was filled.
pub(super) fn filled(evictable: &mut Evictable<&dyn Policy>, block: u32) {
    evictable.fill(block, hash(block));
}

/// Returns the hits of a policy with `capacity` blocks, where a request takes no time.
pub(super) fn hits(prompts: &Prompts, capacity: usize, policy: &dyn Policy) -> usize {
    let mut is_cached = vec![false; prompts.numbers()];
    let mut evictable = Evictable::new(policy);
    let mut hits = 0;
    for prompt in &prompts.prompts {
        let (blocks, now) = (&prompt.blocks[..], Millis(prompt.at_ms));
        let found = leading(blocks, |block| is_cached[block]);
        hits += found;
        let context = looked_up(&evictable, blocks, found, now);
        for &block in blocks {
            if is_cached[block as usize] {
                evictable.remove(block);
                evictable.hit(block);
            } else {
                is_cached[block as usize] = true;
                filled(&mut evictable, block);
            }
        }
        for (depth, &block) in blocks.iter().enumerate().rev() {
            let at = Position { depth: depth as u32, chain: blocks.len() as u32, context };
            evictable.place(block, at, now);
            evictable.file(block);
        }
        while evictable.len() > capacity {
            let block = evictable.evict(now).expect("a cached block is evictable");
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

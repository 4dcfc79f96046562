//! The bound: with all future requests known, evicts the block whose next use is farthest away, and
//! of blocks with the same next request, the deepest in its prompt. Blocks without a next use are
//! not kept.

use std::collections::BTreeSet;

use super::leading;
use super::prompts::Prompts;

/// The request of the next use, the depth, and the block; the greatest goes first.
type Key = (u32, u32, u32);

/// Returns the hits with `capacity` blocks.
pub(super) fn hits(prompts: &Prompts, capacity: usize) -> usize {
    let next = next_uses(prompts);
    let mut keys: Vec<Option<Key>> = vec![None; prompts.numbers()];
    let mut queue = BTreeSet::new();
    let mut hits = 0;
    for (prompt, next) in prompts.prompts.iter().zip(&next) {
        hits += leading(&prompt.blocks, |block| keys[block].is_some());
        for ((&block, &next), depth) in prompt.blocks.iter().zip(next).zip(0..) {
            if let Some(key) = keys[block as usize].take() {
                queue.remove(&key);
            }
            let Some(next) = next else { continue };
            let key = (next, depth, block);
            keys[block as usize] = Some(key);
            queue.insert(key);
            if queue.len() > capacity
                && let Some((.., farthest)) = queue.pop_last()
            {
                keys[farthest as usize] = None;
            }
        }
    }
    hits
}

/// Returns for each block of each prompt the request that uses it next.
fn next_uses(prompts: &Prompts) -> Vec<Vec<Option<u32>>> {
    let mut seen: Vec<Option<u32>> = vec![None; prompts.numbers()];
    let mut next: Vec<Vec<Option<u32>>> = (prompts.prompts.iter().enumerate())
        .rev()
        .map(|(request, prompt)| {
            let request = request as u32;
            let next = prompt.blocks.iter().map(|&block| seen[block as usize]).collect();
            prompt.blocks.iter().for_each(|&block| seen[block as usize] = Some(request));
            next
        })
        .collect();
    next.reverse();
    next
}

//! SIEVE, for comparison: a queue in the order of arrival, and a hand that moves from the oldest
//! block to the newest, spares a block once if it was used since the last pass, and evicts the
//! first unused one.

use super::leading;
use super::prompts::Prompts;

/// No block.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Block {
    is_cached: bool,
    was_used: bool,
    newer: u32,
    older: u32,
}

struct Sieve {
    blocks: Vec<Block>,
    newest: u32,
    oldest: u32,
    hand: u32,
    cached: usize,
}

/// Returns the hits with `capacity` blocks.
pub(super) fn hits(prompts: &Prompts, capacity: usize) -> usize {
    let block = Block { is_cached: false, was_used: false, newer: NONE, older: NONE };
    let mut sieve =
        Sieve { blocks: vec![block; prompts.numbers()], newest: NONE, oldest: NONE, hand: NONE, cached: 0 };
    let mut hits = 0;
    for prompt in &prompts.prompts {
        hits += leading(&prompt.blocks, |block| sieve.blocks[block].is_cached);
        for &block in &prompt.blocks {
            if sieve.blocks[block as usize].is_cached {
                sieve.blocks[block as usize].was_used = true;
                continue;
            }
            if sieve.cached == capacity {
                sieve.evict();
            }
            sieve.insert(block);
        }
    }
    hits
}

impl Sieve {
    fn insert(&mut self, number: u32) {
        let older = self.newest;
        self.blocks[number as usize] = Block { is_cached: true, was_used: false, newer: NONE, older };
        match older {
            NONE => self.oldest = number,
            older => self.blocks[older as usize].newer = number,
        }
        self.newest = number;
        self.cached += 1;
    }

    fn evict(&mut self) {
        let mut number = if self.hand == NONE { self.oldest } else { self.hand };
        loop {
            let block = &mut self.blocks[number as usize];
            if !std::mem::take(&mut block.was_used) {
                break;
            }
            number = if block.newer == NONE { self.oldest } else { block.newer };
        }
        let Block { newer, older, .. } = self.blocks[number as usize];
        self.hand = newer;
        match newer {
            NONE => self.newest = older,
            newer => self.blocks[newer as usize].older = older,
        }
        match older {
            NONE => self.oldest = newer,
            older => self.blocks[older as usize].newer = newer,
        }
        self.blocks[number as usize].is_cached = false;
        self.cached -= 1;
    }
}

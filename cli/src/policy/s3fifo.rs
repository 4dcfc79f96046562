//! S3-FIFO, for comparison: a tenth of the blocks are a small queue that new ones go through, the rest is the main queue;
//! who leaves the small one unused is remembered for a while, and comes back into the main one.

use std::collections::VecDeque;

use super::leading;
use super::prompts::Prompts;

/// Uses are counted up to here.
const USES_MAX: u8 = 3;
/// Uses while in the small queue from which on a block goes to the main one.
const USES_PROMOTED: u8 = 2;

#[derive(Clone, Copy, Default)]
struct Block {
    is_cached: bool,
    uses: u8,
    /// Which of the blocks that became ghosts it was, from 1; 0: it is none.
    ghost: u64,
}

/// Hits with so many blocks.
pub(super) fn hits(prompts: &Prompts, capacity: usize) -> usize {
    let small_max = (capacity / 10).max(1);
    let ghosts_max = capacity - small_max.min(capacity);
    let mut blocks = vec![Block::default(); prompts.distinct()];
    let (mut small, mut main) = (VecDeque::<u32>::new(), VecDeque::<u32>::new());
    let mut ghosts = VecDeque::<(u32, u64)>::new();
    let (mut hits, mut ghost_last) = (0, 0);
    for prompt in &prompts.prompts {
        hits += leading(&prompt.blocks, |block| blocks[block].is_cached);
        for &number in &prompt.blocks {
            let block = &mut blocks[number as usize];
            if block.is_cached {
                block.uses = (block.uses + 1).min(USES_MAX);
                continue;
            }
            let was_ghost = std::mem::take(&mut block.ghost) != 0;
            while small.len() + main.len() >= capacity {
                if small.len() < small_max {
                    let oldest = main.pop_front().expect("the small queue is not all there is");
                    let block = &mut blocks[oldest as usize];
                    match block.uses.checked_sub(1) {
                        Some(uses) => {
                            block.uses = uses;
                            main.push_back(oldest);
                        }
                        None => block.is_cached = false,
                    }
                    continue;
                }
                let oldest = small.pop_front().expect("a queue that is not short");
                let block = &mut blocks[oldest as usize];
                if block.uses >= USES_PROMOTED {
                    block.uses = 0;
                    main.push_back(oldest);
                    continue;
                }
                ghost_last += 1;
                *block = Block { is_cached: false, uses: 0, ghost: ghost_last };
                ghosts.push_back((oldest, ghost_last));
                if ghosts.len() > ghosts_max
                    && let Some((oldest, ghost)) = ghosts.pop_front()
                    && blocks[oldest as usize].ghost == ghost
                {
                    blocks[oldest as usize].ghost = 0;
                }
            }
            blocks[number as usize] = Block { is_cached: true, ..Block::default() };
            if was_ghost { &mut main } else { &mut small }.push_back(number);
        }
    }
    hits
}

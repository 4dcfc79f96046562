//! S3-FIFO, for comparison: new blocks enter a small queue of a tenth of the capacity; the rest is
//! the main queue. A block that leaves the small queue unused becomes a ghost for a while, and
//! enters the main queue if it returns.

use std::collections::VecDeque;

use super::leading;
use super::prompts::Prompts;

/// The largest count of uses.
const USES_MAX: u8 = 3;
/// Uses in the small queue after which a block is promoted to the main queue.
const USES_PROMOTED: u8 = 2;

#[derive(Clone, Copy, Default)]
struct Block {
    is_cached: bool,
    uses: u8,
    /// The number of the block as a ghost, from 1; 0: not a ghost.
    ghost: u64,
}

/// Returns the hits with `capacity` blocks.
pub(super) fn hits(prompts: &Prompts, capacity: usize) -> usize {
    let small_max = (capacity / 10).max(1);
    let ghosts_max = capacity - small_max.min(capacity);
    let mut blocks = vec![Block::default(); prompts.numbers()];
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
                    let oldest = main.pop_front().expect("the main queue is not empty");
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
                let oldest = small.pop_front().expect("the small queue is not empty");
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

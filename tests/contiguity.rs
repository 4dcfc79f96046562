//! Contiguity in a pool whose prefix cache is on and full: how many runs of frames the blocks of a
//! sequence lie in when it ends, against a free queue as serving engines have it (freed blocks at
//! the back, the end of a sequence first, and allocations from the front, one block at a time).
#![cfg(not(kvpool_loom))]

use std::collections::VecDeque;

use fastrand::Rng;
use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{BlockTable, Pool, Sequence, SequenceId};

const BLOCKS: usize = 10_000;
/// Tokens per block of the layout.
const BLOCK_TOKENS: usize = 4;
/// Tokens of a prompt that one step takes.
const CHUNK: usize = 400;

/// A request and its blocks, in the pool and in the queue.
struct Running {
    sequence: Sequence,
    prompt: usize,
    answer: usize,
    queued: Vec<u32>,
}

/// A free queue.
struct FreeQueue(VecDeque<u32>);

impl FreeQueue {
    fn grow(&mut self, list: &mut Vec<u32>, blocks: usize) {
        while list.len() < blocks {
            list.push(self.0.pop_front().expect("as many are free as in the pool"));
        }
    }

    fn free(&mut self, list: Vec<u32>) {
        self.0.extend(list.into_iter().rev());
    }
}

fn runs<T: Copy + Into<i64>>(frames: &[T]) -> usize {
    1 + frames.windows(2).filter(|pair| pair[0].into() + 1 != pair[1].into()).count()
}

/// Returns the value below which a share of the values lies.
fn percentile(values: &mut [usize], share: f64) -> usize {
    values.sort_unstable();
    values[((values.len() - 1) as f64 * share) as usize]
}

/// Runs requests with random prompts and answers, many at a time, and returns the runs of each in
/// the pool and in the queue.
fn run(seed: u64, requests: u64) -> (Pool, Vec<usize>, Vec<usize>) {
    let layout = KvLayout::named("tiny").unwrap();
    let pool = Pool::builder(layout).blocks(BLOCKS).prefix_cache(PrefixConfig::new()).build().unwrap();
    let mut queue = FreeQueue((1..=BLOCKS as u32).collect());
    let mut rng = Rng::with_seed(seed);
    let (mut running, mut table) = (Vec::<Running>::new(), BlockTable::default());
    let (mut in_pool, mut in_queue) = (Vec::new(), Vec::new());
    let mut next = 0;
    while next < requests || !running.is_empty() {
        let owned: usize = running.iter().map(|running| running.prompt + running.answer).sum();
        if next < requests && owned / BLOCK_TOKENS < BLOCKS / 2 {
            next += 1;
            let (prompt, answer) = (rng.usize(200..3_000), rng.usize(10..400));
            // Unlike all others, so that both sides allocate as many blocks.
            let tokens: Vec<u32> = std::iter::repeat_with(|| rng.u32(..)).take(prompt).collect();
            let sequence = pool.sequence(SequenceId(next)).tokens(&tokens).unwrap();
            running.push(Running { sequence, prompt, answer, queued: Vec::new() });
        }
        let mut batch = pool.begin_batch();
        for running in &mut running {
            let Running { sequence, prompt, queued, .. } = running;
            if sequence.len() < *prompt {
                batch.append(sequence, CHUNK.min(*prompt - sequence.len())).unwrap();
            } else {
                batch.append(sequence, &[rng.u32(..)]).unwrap();
            }
            queue.grow(queued, sequence.len().div_ceil(BLOCK_TOKENS));
        }
        let mut place = 0;
        while place < running.len() {
            let Running { sequence, prompt, answer, queued } = &running[place];
            if sequence.len() < prompt + answer {
                place += 1;
                continue;
            }
            batch.block_table([sequence], &mut table).unwrap();
            in_pool.push(runs(table.row(0)));
            in_queue.push(runs(queued));
            queue.free(running.swap_remove(place).queued);
        }
        batch.finish();
    }
    (pool, in_pool, in_queue)
}

#[test]
fn sequences_lie_in_few_runs_while_the_cache_is_full() {
    for seed in 0..3 {
        let (pool, mut in_pool, mut in_queue) = run(seed, 400);
        let report = pool.audit().unwrap();
        assert_eq!(report.owned, 0);
        let evicted = pool.prefix_cache().unwrap().stats().evicted_blocks;
        assert!(evicted > 10 * BLOCKS as u64, "the pool was not full: {evicted}");
        // Most of it is cached at any time: contiguity is not bought with free blocks.
        let evictable = pool.stats().evictable;
        assert!(evictable > BLOCKS * 85 / 100, "seed {seed}: {evictable} of {BLOCKS} blocks are cached");
        for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
            let (ours, others) = (percentile(&mut in_pool, share), percentile(&mut in_queue, share));
            println!("seed {seed}: {name} of the runs of a sequence: {ours}, in a free queue {others}");
            assert!(others >= 8 * ours, "seed {seed}, {name}: {ours} runs, {others} in a free queue");
        }
    }
}

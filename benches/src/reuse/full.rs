//! Eviction alone: engines whose every block is evictable.

use std::sync::Mutex;

use super::{Engine, Worker};
use crate::report::mean;
use crate::threads::together;
use crate::undisturbed::{Calls, undisturbed};

/// Tokens per block of a [`Full`] engine.
pub const BLOCK_TOKENS: usize = 16;

/// An engine that is full of evictable blocks.
pub struct Full<E> {
    /// The engine. No block is owned.
    pub engine: E,
    blocks: usize,
    prompt: Vec<u32>,
    next: u32,
    random: fastrand::Rng,
}

impl<E: Engine> Full<E> {
    /// Creates an engine of `blocks` blocks, each cached for a prompt of its own.
    ///
    /// They became evictable in random order, as in a pool that has run for a while. Without a
    /// cache, they are free, and were freed in that order.
    pub fn new(blocks: usize) -> Self {
        Self::of_prompts(blocks, 1)
    }

    /// Creates an engine of `blocks` blocks, cached for prompts of `prompt` blocks that ended in
    /// random order.
    pub fn of_prompts(blocks: usize, prompt: usize) -> Self {
        let (engine, random) = (E::new(blocks, BLOCK_TOKENS), fastrand::Rng::with_seed(3));
        let mut full = Self { engine, blocks, prompt: vec![0; prompt * BLOCK_TOKENS], next: 0, random };
        full.fill(blocks);
        full
    }

    /// Evicts blocks and caches others in the same way.
    fn fill(&mut self, blocks: usize) {
        let mut worker = self.engine.worker(0);
        let mut open = Vec::new();
        let per_prompt = self.prompt.len() / BLOCK_TOKENS;
        let (prompt, prompts) = (&mut self.prompt, blocks.div_ceil(per_prompt));
        for number in 1..=prompts {
            self.next += 1;
            prompt[0] = self.next;
            worker.begin();
            worker.prepare(prompt);
            let mut request = worker.admit(prompt);
            worker.finish(&mut request);
            open.push(request);
            if open.len() * per_prompt >= self.blocks.min(32_768) / 2 || number == prompts {
                self.random.shuffle(&mut open);
                open.drain(..).for_each(|request| worker.end(request));
            }
        }
    }

    /// Allocates what the engine keeps free, 64 blocks at a time. Returns their number too.
    fn take_free(&self) -> (Vec<<E::Worker<'_> as Worker>::Blocks>, usize) {
        let calls = self.engine.kept_free().div_ceil(64);
        let mut worker = self.engine.worker(0);
        ((0..calls).map(|_| worker.allocate(64)).collect(), 64 * calls)
    }

    /// Returns ns per block to allocate 64 of `blocks` blocks, one by one and at once: each evicts
    /// one. Means of the undisturbed groups of 64.
    pub fn evict(&mut self, blocks: usize) -> [f64; 2] {
        let chunks = (blocks / 4).min(8_192) / 64;
        let (free, kept_free) = self.take_free();
        let mut worker = self.engine.worker(0);
        let mut held = Vec::with_capacity(64 * chunks + chunks);
        let times = [(64, 1), (1, 64)].map(|(calls, count)| {
            let mut timed = Calls::with_capacity(chunks);
            for _ in 0..chunks {
                timed.run(|| held.extend((0..calls).map(|_| worker.allocate(count))));
            }
            timed.mean_ns()
        });
        held.into_iter().chain(free).for_each(|blocks| worker.free(blocks));
        drop(worker);
        self.fill(kept_free + 2 * 64 * chunks);
        match times {
            [Some(one), Some(many)] => [one / 64.0, many / 64.0],
            _ => self.evict(blocks),
        }
    }

    /// Returns ns per block and thread when all threads allocate 64 blocks at once, again and
    /// again: the mean of the undisturbed calls of a round in which there are some.
    fn evict_together(&mut self, blocks: usize, threads: usize) -> f64 {
        loop {
            let times = self.evict_round((blocks / 4).min(32_768) / 64 / threads, threads);
            if times.len() >= 32 {
                return mean(times) / 64.0;
            }
        }
    }

    /// Returns the times of the undisturbed calls.
    fn evict_round(&mut self, calls: usize, threads: usize) -> Vec<f64> {
        let all = Mutex::new((Vec::with_capacity(calls * threads), Vec::with_capacity(threads)));
        let (free, kept_free) = self.take_free();
        let engine = &self.engine;
        let prepare = |thread| (engine.worker(thread), Calls::with_capacity(calls));
        together(threads, prepare, |_, (worker, timed)| {
            let mut held = Vec::with_capacity(calls);
            for _ in 0..calls {
                timed.run(|| held.push(worker.allocate(64)));
            }
            let mut all = all.lock().expect("no bench thread panicked");
            all.0.append(&mut held);
            all.1.push(std::mem::take(timed));
        });
        let mut worker = engine.worker(0);
        let (held, timed) = all.into_inner().expect("no bench thread panicked");
        held.into_iter().chain(free).for_each(|blocks| worker.free(blocks));
        drop(worker);
        self.fill(kept_free + 64 * calls * threads);
        undisturbed(timed).into_iter().map(|(ns, ())| ns).collect()
    }

    /// Returns the same for one thread and for two, and the throughput of two threads as a multiple
    /// of that of one.
    pub fn evict_by_two(&mut self, blocks: usize) -> [f64; 3] {
        let [one, two] = [1, 2].map(|threads| self.evict_together(blocks, threads));
        [one, two, 2.0 * one / two]
    }
}

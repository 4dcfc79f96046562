//! Eviction alone: engines whose every block is evictable.

use std::sync::Mutex;
use std::time::Instant;

use super::{Engine, Worker};
use crate::report::median;
use crate::threads::together;

/// An engine that is full of evictable blocks.
pub struct Full<E> {
    /// The engine. No block is owned.
    pub engine: E,
    next: u32,
    random: fastrand::Rng,
}

impl<E: Engine> Full<E> {
    /// Creates an engine of `blocks` blocks of 16 tokens, each cached for a prompt of its own.
    ///
    /// They became evictable in random order, as in a pool that has run for a while. Without a
    /// cache, they are free, and were freed in that order.
    pub fn new(blocks: usize) -> Self {
        let mut full = Self { engine: E::new(blocks, 16), next: 0, random: fastrand::Rng::with_seed(3) };
        full.fill(blocks);
        full
    }

    /// Evicts blocks and caches others in the same way.
    fn fill(&mut self, blocks: usize) {
        let mut worker = self.engine.worker(0);
        let mut open = Vec::new();
        for block in 1..=blocks {
            self.next += 1;
            let mut prompt = [0; 16];
            prompt[0] = self.next;
            worker.begin();
            worker.prepare(&prompt);
            let mut request = worker.admit(&prompt);
            worker.finish(&mut request);
            open.push(request);
            if open.len() == 32_768 || block == blocks {
                self.random.shuffle(&mut open);
                open.drain(..).for_each(|request| worker.end(request));
            }
        }
    }

    /// Returns ns per block to allocate 64 blocks of this many, one by one and at once: each evicts one.
    pub fn evict(&mut self, blocks: usize) -> [f64; 2] {
        let chunks = (blocks / 4).min(8_192) / 64;
        let mut worker = self.engine.worker(0);
        let mut held = Vec::with_capacity(64 * chunks + chunks);
        let times = [(64, 1), (1, 64)].map(|(calls, count)| {
            median((0..chunks).map(|_| {
                let begin = Instant::now();
                held.extend((0..calls).map(|_| worker.allocate(count)));
                begin.elapsed().as_nanos() as f64 / 64.0
            }))
        });
        held.into_iter().for_each(|blocks| worker.free(blocks));
        drop(worker);
        self.fill(2 * 64 * chunks);
        times
    }

    /// Returns the blocks per microsecond that all threads evict, 64 at once.
    fn evict_at_once(&mut self, blocks: usize, threads: usize) -> f64 {
        let count = blocks / 4 / 64 / threads * 64 * threads;
        let all = Mutex::new(Vec::with_capacity(threads));
        let engine = &self.engine;
        let prepare = |thread| (engine.worker(thread), Vec::with_capacity(count / threads / 64));
        let time = together(threads, prepare, |_, (worker, held)| {
            held.extend((0..count / threads / 64).map(|_| worker.allocate(64)));
            all.lock().expect("no bench thread panicked").push(std::mem::take(held));
        });
        let mut worker = engine.worker(0);
        let all = all.into_inner().expect("no bench thread panicked");
        all.into_iter().flatten().for_each(|blocks| worker.free(blocks));
        drop(worker);
        self.fill(count);
        count as f64 / time.as_nanos() as f64 * 1e3
    }

    /// Returns the same of one thread, of two, and their ratio.
    pub fn scaling(&mut self, blocks: usize) -> [f64; 3] {
        let [one, two] = [1, 2].map(|threads| self.evict_at_once(blocks, threads));
        [one, two, two / one]
    }
}

//! Requests in sequence, by one thread or several, timed one by one.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use super::full::BLOCK_TOKENS;
use super::{Engine, Full, Worker};
use crate::report::{mean, median};
use crate::threads::together;
use crate::undisturbed::{Calls, undisturbed};

/// Requests per thread and round.
const REQUESTS: u32 = 100;

/// Kinds of prompts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Prompts {
    /// Each thread has one prompt of its own, which is cached.
    Own,
    /// All threads use the same prompt, which is cached.
    Same,
    /// No prompt occurs twice.
    Fresh,
    /// The first half is always the same, the rest never occurs twice.
    Half,
}

/// A measured case.
#[derive(Clone, Copy)]
pub struct Case {
    /// Kind of prompts.
    pub prompts: Prompts,
    /// Number of threads.
    pub threads: usize,
    /// Tokens per prompt.
    pub tokens: usize,
    /// Blocks in the pool.
    pub blocks: usize,
    /// Tokens per block.
    pub block_tokens: usize,
    /// Whether every block is evictable at first, in random order, so that each allocation evicts
    /// one. Blocks must then have 16 tokens.
    pub is_full: bool,
}

/// Results of a round.
#[derive(Clone, Copy)]
pub struct Figures {
    /// Mean time of an admission with its slots, in microseconds.
    pub admission: f64,
    /// Mean time of a whole request, in microseconds.
    pub request: f64,
    /// Requests of all threads per millisecond, without the begin of their steps.
    pub rate: f64,
}

/// A thread's prompts.
struct Source {
    prompt: Vec<u32>,
    /// Token that distinguishes the prompt.
    differs_at: Option<usize>,
    next: u32,
}

impl Source {
    fn another(&mut self) -> &[u32] {
        if let Some(place) = self.differs_at {
            self.next += 1;
            self.prompt[place] = self.next;
        }
        &self.prompt
    }
}

/// An engine with its case.
pub struct Requests<E> {
    engine: E,
    case: Case,
    sources: Vec<Mutex<Source>>,
    expected: usize,
}

impl<E: Engine> Requests<E> {
    /// Creates an engine in the initial state of the case.
    pub fn new(case: Case) -> Self {
        let Case { prompts, threads, tokens, block_tokens, .. } = case;
        let half = tokens / 2 / block_tokens * block_tokens;
        let (differs_at, expected) = match prompts {
            Prompts::Own | Prompts::Same => (None, (tokens - 1) / block_tokens * block_tokens),
            Prompts::Fresh => (Some(0), 0),
            Prompts::Half => (Some(half), half),
        };
        let source = |thread: usize| {
            let mut random = fastrand::Rng::with_seed(1_000);
            let mut prompt: Vec<u32> = (0..tokens).map(|_| random.u32(..150_000)).collect();
            if prompts == Prompts::Own {
                prompt[0] = thread as u32;
            }
            Mutex::new(Source { prompt, differs_at, next: (1 + thread as u32) << 24 })
        };
        let engine = if case.is_full {
            assert_eq!(block_tokens, BLOCK_TOKENS, "a full engine's");
            Full::of_prompts(case.blocks, tokens / BLOCK_TOKENS).engine
        } else {
            E::new(case.blocks, block_tokens)
        };
        let own = Self { engine, case, sources: (0..threads).map(source).collect(), expected };
        own.warm();
        own
    }

    /// Runs a request of each thread: its prompt, or the beginning of it, is cached from now on.
    fn warm(&self) {
        for (thread, source) in self.sources.iter().enumerate() {
            let (mut worker, mut source) = (self.engine.worker(thread), lock(source));
            let prompt = source.another();
            worker.begin();
            worker.prepare(prompt);
            let mut request = worker.admit(prompt);
            worker.finish(&mut request);
            worker.end(request);
        }
    }

    /// Runs one round in which some requests are undisturbed, and returns the figures of these.
    ///
    /// # Panics
    ///
    /// If more than a few requests found another number of cached tokens than the case expects.
    pub fn round(&self) -> Figures {
        loop {
            if self.case.prompts == Prompts::Fresh && !self.case.is_full {
                self.engine.clear();
            }
            let all = undisturbed(self.run());
            if all.len() >= REQUESTS as usize / 4 {
                let admission = mean(all.iter().map(|&(_, admission)| admission / 1e3));
                let request = mean(all.iter().map(|&(ns, _)| ns / 1e3));
                return Figures { admission, request, rate: self.case.threads as f64 / request * 1e3 };
            }
        }
    }

    /// Runs the requests of a round on all threads. The result of each is the time of its admission
    /// in nanoseconds.
    fn run(&self) -> Vec<Calls<f64>> {
        let Case { threads, tokens, .. } = self.case;
        let all = Mutex::new((Vec::new(), 0));
        let prepare = |thread: usize| {
            let timed = Calls::with_capacity(REQUESTS as usize);
            (self.engine.worker(thread), lock(&self.sources[thread]), timed)
        };
        together(threads, prepare, |_, (worker, source, timed)| {
            let mut slots: Vec<i64> = Vec::with_capacity(tokens);
            let mut odd = 0;
            for _ in 0..REQUESTS {
                let prompt = source.another();
                worker.begin();
                worker.prepare(prompt);
                slots.clear();
                let mut cached = 0;
                timed.run(|| {
                    let begin = Instant::now();
                    let mut request = worker.admit(black_box(prompt));
                    cached = <E::Worker<'_> as Worker>::cached(&request);
                    worker.slots(&request, cached..tokens, &mut slots);
                    let admission = begin.elapsed();
                    worker.finish(&mut request);
                    worker.end(request);
                    admission.as_nanos() as f64
                });
                assert_eq!(black_box(&slots).len(), tokens - cached, "a slot for each token to compute");
                odd += u32::from(cached != self.expected);
            }
            let mut all = lock(&all);
            all.0.push(std::mem::take(timed));
            all.1 += odd;
        });
        let (calls, odd) = all.into_inner().expect("no bench thread panicked");
        // kvpool evicts a block released 65,536 times once, when its generation wraps around.
        assert!(odd <= REQUESTS / 20, "{}: {odd} prompts of another length were cached", E::NAME);
        calls
    }

    /// Looks up a cached prompt, and releases it untimed: returns the median time in microseconds.
    pub fn look_ups(&self) -> f64 {
        let (mut worker, source) = (self.engine.worker(0), lock(&self.sources[0]));
        let one = |_| {
            let begin = Instant::now();
            let request = worker.look_up(black_box(&source.prompt));
            let time = begin.elapsed();
            let cached = <E::Worker<'_> as Worker>::cached(&request);
            assert_eq!(cached, self.expected, "{}: cached tokens", E::NAME);
            worker.end(request);
            time.as_nanos() as f64 / 1e3
        };
        median((0..REQUESTS).map(one))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().expect("no bench thread panicked")
}

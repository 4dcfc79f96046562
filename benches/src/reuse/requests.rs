//! Requests in sequence, by one thread or several, timed one by one.

use std::hint::black_box;
use std::sync::Mutex;
use std::time::Instant;

use super::{Engine, Worker};
use crate::report::median;
use crate::threads::together;

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
    /// Whether every block is evictable at first, so that each allocation evicts one.
    pub is_full: bool,
}

/// Results of a round.
#[derive(Clone, Copy)]
pub struct Figures {
    /// Median time of an admission with its slots, in microseconds.
    pub admission: f64,
    /// Median time of a whole request, in microseconds.
    pub request: f64,
    /// Requests of all threads per millisecond.
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
        let engine = E::new(case.blocks, block_tokens);
        let own = Self { engine, case, sources: (0..threads).map(source).collect(), expected };
        own.warm();
        own
    }

    fn warm(&self) {
        let blocks_of_prompt = self.case.tokens.div_ceil(self.case.block_tokens);
        let requests = if self.case.is_full { 16 + 2 * self.case.blocks / blocks_of_prompt } else { 1 };
        for (thread, source) in self.sources.iter().enumerate() {
            let (mut worker, mut source) = (self.engine.worker(thread), lock(source));
            for _ in 0..requests {
                let prompt = source.another();
                worker.begin();
                worker.prepare(prompt);
                let mut request = worker.admit(prompt);
                worker.finish(&mut request);
                worker.end(request);
            }
        }
    }

    /// Runs one round.
    ///
    /// # Panics
    ///
    /// If more than a few requests found another number of cached tokens than the case expects.
    pub fn round(&self) -> Figures {
        let Case { prompts, threads, tokens, is_full, .. } = self.case;
        if prompts == Prompts::Fresh && !is_full {
            self.engine.clear();
        }
        let all = Mutex::new((Vec::new(), Vec::new(), 0));
        let prepare = |thread: usize| (self.engine.worker(thread), lock(&self.sources[thread]));
        let wall = together(threads, prepare, |_, (worker, source)| {
            let mut slots: Vec<i64> = Vec::with_capacity(tokens);
            let (mut admissions, mut wholes, mut odd) = (Vec::new(), Vec::new(), 0);
            for _ in 0..REQUESTS {
                let prompt = source.another();
                worker.begin();
                worker.prepare(prompt);
                slots.clear();

                let begin = Instant::now();
                let mut request = worker.admit(black_box(prompt));
                let cached = <E::Worker<'_> as Worker>::cached(&request);
                worker.slots(&request, cached..tokens, &mut slots);
                let admission = begin.elapsed();
                worker.finish(&mut request);
                worker.end(request);
                wholes.push(begin.elapsed().as_nanos() as f64 / 1e3);
                admissions.push(admission.as_nanos() as f64 / 1e3);

                assert_eq!(black_box(&slots).len(), tokens - cached, "a slot for each token to compute");
                odd += u32::from(cached != self.expected);
            }
            let mut all = lock(&all);
            all.0.extend(admissions);
            all.1.extend(wholes);
            all.2 += odd;
        });
        let (admissions, wholes, odd) = all.into_inner().expect("no bench thread panicked");
        // kvpool evicts a block released 65,536 times once, when its generation wraps around.
        assert!(odd <= REQUESTS / 20, "{}: {odd} prompts of another length were cached", E::NAME);
        let requests = threads as f64 * f64::from(REQUESTS);
        let rate = requests / wall.as_secs_f64() / 1e3;
        Figures { admission: median(admissions), request: median(wholes), rate }
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

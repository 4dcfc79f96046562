//! Cost of admitting a prompt of 1,000 tokens, in blocks of 16: open its sequence, hash its tokens,
//! look them up, share the cached part, allocate the rest, and compute the slots of the remaining
//! tokens. The end of the batch, which registers blocks, and the end of the sequence are timed
//! separately.
//!
//! The baseline is the same without a prefix cache. Every sample is the median of its requests.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};
use kvpool::prefix::PrefixConfig;
use kvpool::{Pool, Sequence, SequenceId};
use kvpool_benches::measure::medians;
use kvpool_benches::subject::{layout, pool};

const TOKENS: usize = 1_000;
const BLOCKS: usize = 65_536;
const BLOCKS_OF_PROMPT: usize = TOKENS.div_ceil(16);

/// Timed part of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Admission,
    EndOfBatch,
    EndOfSequence,
}

/// An engine with one request at a time.
struct Engine {
    pool: Pool,
    prompt: Vec<u32>,
    slots: Vec<i64>,
    requests: u64,
    reuses_tail: bool,
    /// Number of cached tokens of the last request.
    cached: usize,
}

impl Engine {
    fn new(pool: Pool) -> Self {
        let mut random = fastrand::Rng::with_seed(1_000);
        let prompt = (0..TOKENS).map(|_| random.u32(..150_000)).collect();
        Self { pool, prompt, slots: Vec::with_capacity(TOKENS), requests: 0, reuses_tail: false, cached: 0 }
    }

    fn cached(blocks: usize) -> Self {
        let config = PrefixConfig::new();
        Self::new(
            Pool::builder(layout())
                .blocks(blocks)
                .without_storage()
                .prefix_cache(config)
                .build()
                .expect("a valid pool"),
        )
    }

    /// Sets a next prompt that has nothing in common with earlier ones.
    fn another_prompt(&mut self) {
        self.prompt[0] = 200_000 + self.requests as u32;
    }

    /// Returns a sequence of the first tokens of the prompt, which ends in an unfinished block.
    fn close_at(&mut self, tokens: usize) {
        let mut batch = self.pool.begin_batch();
        let opening = self.pool.sequence(SequenceId(0)).reuse_tail();
        let mut sequence = opening.tokens(&self.prompt[..tokens]).expect("a new id, and room");
        let cached = sequence.len();
        batch.append(&mut sequence, tokens - cached).expect("there is room");
        batch.finish();
    }

    /// Runs a request from admission to end; returns the time of `part`, and the number of cached
    /// tokens.
    fn request(&mut self, part: Part) -> (Duration, usize) {
        self.requests += 1;
        self.slots.clear();
        let id = SequenceId(self.requests);
        let mut batch = self.pool.begin_batch();

        let begin = Instant::now();
        let mut opening = self.pool.sequence(id);
        if self.reuses_tail {
            opening = opening.reuse_tail();
        }
        let mut sequence: Sequence = opening.tokens(black_box(&self.prompt)).expect("a new id, and room");
        let cached = sequence.len();
        self.cached = cached;
        batch.append(&mut sequence, TOKENS - cached).expect("there is room");
        batch.slot_mapping(&sequence, cached..TOKENS, &mut self.slots).expect("its own tokens");
        let admission = begin.elapsed();

        assert_eq!((sequence.block_count(), self.slots.len()), (BLOCKS_OF_PROMPT, TOKENS - cached));
        let begin = Instant::now();
        batch.finish();
        let end_of_batch = begin.elapsed();
        let begin = Instant::now();
        drop(sequence);
        let end_of_sequence = begin.elapsed();
        let took = match part {
            Part::Admission => admission,
            Part::EndOfBatch => end_of_batch,
            Part::EndOfSequence => end_of_sequence,
        };
        (took, cached)
    }
}

/// Times requests with `cached` cached tokens each, with an untimed call of `before` before each.
fn time(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    engine: &mut Engine,
    part: Part,
    finds: usize,
    mut before: impl FnMut(&mut Engine),
) {
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|requests| {
            let mut others = 0;
            medians(requests, || {
                loop {
                    before(engine);
                    let (time, cached) = engine.request(part);
                    if cached == finds {
                        return time;
                    }
                    // A block released 65,536 times is evicted once, when its generation wraps
                    // around.
                    others += 1;
                    assert!(others <= 4 + requests / 1_000, "{name}: {cached} tokens were cached");
                }
            })
        });
    });
    engine.pool.audit().expect("a consistent pool");
}

/// Makes room for the next prompts, without evictions.
fn clear_when_full(engine: &mut Engine) {
    engine.another_prompt();
    if engine.pool.stats().evictable > BLOCKS / 2 {
        engine.pool.clear_prefix_cache();
    }
}

fn admissions(c: &mut Criterion) {
    let mut group = c.benchmark_group("admit 1000 tokens");
    let part = Part::Admission;
    let mut engine = Engine::new(pool(BLOCKS));
    time(&mut group, "without a cache", &mut engine, part, 0, |_| ());

    let mut engine = Engine::cached(BLOCKS);
    engine.request(part);
    time(&mut group, "cached, evictable", &mut engine, part, 992, |_| ());
    let other = engine.pool.sequence(SequenceId(0)).tokens(&engine.prompt).expect("a new id");
    time(&mut group, "cached, shared", &mut engine, part, 992, |_| ());
    drop(other);
    engine.reuses_tail = true;
    time(&mut group, "cached, evictable, four tokens of a tail too", &mut engine, part, 996, |engine| {
        if engine.cached != 996 {
            engine.pool.clear_prefix_cache();
            engine.close_at(996);
        }
    });

    let mut engine = Engine::cached(BLOCKS);
    time(&mut group, "not cached", &mut engine, part, 0, clear_when_full);
    let mut engine = Engine::cached(4096);
    while engine.pool.stats().evictable < 4000 {
        engine.another_prompt();
        engine.request(part);
    }
    time(&mut group, "not cached, all full, evicting", &mut engine, part, 0, Engine::another_prompt);
}

fn ends(c: &mut Criterion) {
    let mut group = c.benchmark_group("after 1000 tokens");
    for (name, part) in [("end of batch", Part::EndOfBatch), ("end of sequence", Part::EndOfSequence)] {
        let mut engine = Engine::new(pool(BLOCKS));
        time(&mut group, &format!("{name}, without a cache"), &mut engine, part, 0, |_| ());
        let mut engine = Engine::cached(BLOCKS);
        engine.request(part);
        time(&mut group, &format!("{name}, cached"), &mut engine, part, 992, |_| ());
        let mut engine = Engine::cached(BLOCKS);
        time(&mut group, &format!("{name}, not cached"), &mut engine, part, 0, clear_when_full);
    }
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = admissions, ends
}
criterion_main!(benches);

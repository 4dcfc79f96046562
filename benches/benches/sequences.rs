//! Fixed costs of sequences and batches, with the prefix cache on and off: one more token for each
//! of 256 sequences, a sequence that is opened and closed, and an empty batch.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main, measurement::WallTime};
use kvpool::prefix::PrefixConfig;
use kvpool::{Pool, Sequence, SequenceId};
use kvpool_benches::subject::layout;

const SEQUENCES: usize = 256;
const BLOCK_TOKENS: usize = 16;
/// Tokens of each sequence before the measured steps, and after them.
const TOKENS: (usize, usize) = (1_000, 2_000);

fn pool(is_cached: bool) -> Pool {
    let builder = Pool::builder(layout()).blocks(65_536).without_storage();
    let builder = if is_cached { builder.prefix_cache(PrefixConfig::new()) } else { builder };
    builder.build().expect("a valid pool")
}

/// Opens sequences with tokens of their own, which grow concurrently.
fn open(pool: &Pool) -> Vec<Sequence> {
    let mut sequences: Vec<Sequence> =
        (0..SEQUENCES as u64).map(|id| pool.sequence(SequenceId(id)).open().expect("a new id")).collect();
    for chunk in 0..TOKENS.0 / 100 {
        let mut batch = pool.begin_batch();
        for (i, sequence) in sequences.iter_mut().enumerate() {
            batch.append(sequence, &[(i + chunk) as u32; 100]).expect("the pool is large enough");
        }
        batch.finish();
    }
    sequences
}

/// Measures one step of decoding: a token for each sequence.
fn decode(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, is_cached: bool) {
    let pool = pool(is_cached);
    let mut sequences = open(&pool);
    let mut length = TOKENS.0;
    group.bench_function(format!("append a token to 256 sequences, {name}"), |bencher| {
        bencher.iter_custom(|steps| {
            let mut total = Duration::ZERO;
            for step in 0..steps {
                if length == TOKENS.1 {
                    length = TOKENS.0 / BLOCK_TOKENS * BLOCK_TOKENS;
                    sequences
                        .iter_mut()
                        .for_each(|sequence| sequence.truncate(length).expect("it is longer"));
                }
                let mut batch = pool.begin_batch();
                let begin = Instant::now();
                for sequence in &mut sequences {
                    batch.append(black_box(sequence), &[step as u32]).expect("there is room");
                }
                total += begin.elapsed();
                batch.finish();
                length += 1;
            }
            total
        });
    });
    assert!(sequences.iter().all(|sequence| sequence.len() == length), "a token is missing");
}

/// Measures the whole life of a sequence of ten blocks.
fn life(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, is_cached: bool) {
    let pool = pool(is_cached);
    let mut id = 0;
    for tokens in [0, 10 * BLOCK_TOKENS] {
        let blocks = tokens / BLOCK_TOKENS;
        group.bench_function(format!("open, {blocks} blocks, close, {name}"), |bencher| {
            bencher.iter(|| {
                id += 1;
                let mut sequence = pool.sequence(SequenceId(id)).open().expect("a new id");
                if tokens > 0 {
                    let mut batch = pool.begin_batch();
                    batch.append(&mut sequence, tokens).expect("there is room");
                    batch.finish();
                }
                assert_eq!(sequence.block_count(), blocks);
            });
        });
    }
    group.bench_function(format!("an empty batch, {name}"), |bencher| {
        bencher.iter(|| pool.begin_batch().finish());
    });
    assert_eq!(pool.sequence_count(), 0);
}

fn sequences(c: &mut Criterion) {
    let mut group = c.benchmark_group("sequences");
    for (name, is_cached) in [("cache off", false), ("cache on", true)] {
        decode(&mut group, name, is_cached);
        life(&mut group, name, is_cached);
    }
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = sequences
}
criterion_main!(benches);

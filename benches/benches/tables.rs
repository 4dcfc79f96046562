//! Inputs of kernels, for 256 sequences of 1 to 2,048 tokens each: the padded block table, the
//! compressed table, and the slots of one decode step, written into reused buffers, so that nothing
//! is allocated (which is checked).
//!
//! Two baselines, first as ratios within each round, then one by one: the copy of a finished table
//! by `memcpy`, the limit set by memory bandwidth, and the table built from a `Vec<Vec<i32>>`, as
//! an engine does that manages frames itself.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvpool::{BlockTable, CsrTable, Pool, Sequence, SequenceId};
use kvpool_benches::report::median;
use kvpool_benches::reuse::Turns;
use kvpool_benches::subject::pool;

const SEQUENCES: usize = 256;
const TOKENS_MAX: usize = 2_048;

/// Counts allocations.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// Sequences grow concurrently, by a chunk each in turn, as in an engine.
fn sequences(pool: &Pool) -> Vec<Sequence> {
    let mut random = fastrand::Rng::with_seed(256);
    let mut sequences: Vec<(Sequence, usize)> = (0..SEQUENCES as u64)
        .map(|id| (pool.sequence(SequenceId(id)).open().expect("a new id"), random.usize(1..=TOKENS_MAX)))
        .collect();
    loop {
        let mut batch = pool.begin_batch();
        let mut all_done = true;
        for (sequence, end) in &mut sequences {
            let tokens = (*end - sequence.len()).min(100);
            if tokens > 0 {
                batch.append(sequence, tokens).expect("the pool is large enough");
                all_done = false;
            }
        }
        if all_done {
            return sequences.into_iter().map(|(sequence, _)| sequence).collect();
        }
        batch.finish();
    }
}

fn tables(c: &mut Criterion) {
    let pool = pool(65_536);
    let sequences = sequences(&pool);
    let batch = pool.begin_batch();
    let mut group = c.benchmark_group("tables of 256 sequences");

    let mut table = BlockTable::new();
    batch.block_table(&sequences, &mut table).expect("sequences of this pool");
    check(&sequences, &table);
    group.throughput(Throughput::Bytes(size_of_val(table.entries()) as u64));

    let finished = table.entries().to_vec();
    let mut copy = vec![0; finished.len()];
    group.bench_function("memcpy of a finished table", |bencher| {
        bencher.iter(|| copy.copy_from_slice(black_box(&finished)));
    });

    let frames: Vec<Vec<i32>> = sequences
        .iter()
        .map(|sequence| sequence.blocks().map(|block| block.get() as i32).collect())
        .collect();
    let width = table.width();
    if std::env::args().any(|argument| argument == "--bench") {
        let (mut copy, mut padded, mut table) = (vec![0; finished.len()], Vec::new(), BlockTable::new());
        ratios(
            &mut || copy.copy_from_slice(black_box(&finished)),
            &mut || batch.block_table(black_box(&sequences), &mut table).expect("sequences of this pool"),
            &mut || pad(black_box(&frames), width, &mut padded),
        );
    }
    let mut padded = Vec::new();
    group.bench_function("padded from Vec<Vec<i32>>", |bencher| {
        bencher.iter(|| pad(black_box(&frames), width, &mut padded));
    });
    assert_eq!(padded, finished, "the baseline builds another table");

    let before = ALLOCATIONS.load(Relaxed);
    for _ in 0..100 {
        batch.block_table(&sequences, &mut table).expect("sequences of this pool");
    }
    assert_eq!(ALLOCATIONS.load(Relaxed), before, "building a table allocates");
    group.bench_function("kvpool, padded", |bencher| {
        bencher.iter(|| {
            batch.block_table(black_box(&sequences), &mut table).expect("sequences of this pool");
        });
    });
    check(&sequences, &table);

    let mut csr = CsrTable::new();
    group.bench_function("kvpool, compressed", |bencher| {
        bencher.iter(|| batch.csr_table(black_box(&sequences), &mut csr).expect("sequences of this pool"));
    });
    assert_eq!(csr.indices.len(), sequences.iter().map(Sequence::block_count).sum::<usize>());

    let mut slots = Vec::new();
    group.throughput(Throughput::Elements(SEQUENCES as u64));
    group.bench_function("kvpool, slots of one decode step", |bencher| {
        bencher.iter(|| {
            slots.clear();
            for sequence in black_box(&sequences) {
                let length = sequence.len();
                batch
                    .slot_mapping(sequence, length - 1..length, &mut slots)
                    .expect("a token of the sequence");
            }
        });
    });
    for (sequence, slot) in sequences.iter().zip(&slots) {
        let last = sequence.blocks().next_back().expect("a sequence with tokens");
        assert_eq!(*slot, i64::from(last.get()) * 16 + (sequence.len() as i64 - 1) % 16);
    }
}

/// Builds a table from frames of sequences.
fn pad(frames: &[Vec<i32>], width: usize, out: &mut Vec<i32>) {
    out.clear();
    for (row, frames) in frames.iter().enumerate() {
        out.extend_from_slice(frames);
        out.resize((row + 1) * width, 0);
    }
}

/// Prints the times of all three in turns, and the ratios to `memcpy`.
fn ratios(memcpy: &mut dyn FnMut(), kvpool: &mut dyn FnMut(), padded: &mut dyn FnMut()) {
    let turns = Turns::new(["memcpy", "kvpool", "Vec<Vec<i32>>"]);
    turns.head("padded table of 256 sequences");
    let us = |build: &mut dyn FnMut()| {
        [median((0..50).map(|_| {
            let begin = Instant::now();
            build();
            begin.elapsed().as_nanos() as f64 / 1e3
        }))]
    };
    turns.measure(101, ["us"], [&mut || us(memcpy), &mut || us(kvpool), &mut || us(padded)]);
}

/// Blocks equal frames as long as no block has moved; rows are padded with frame 0.
fn check(sequences: &[Sequence], table: &BlockTable) {
    for (row, sequence) in sequences.iter().enumerate() {
        let mut expected: Vec<i32> = sequence.blocks().map(|block| block.get() as i32).collect();
        expected.resize(table.width(), 0);
        assert_eq!(table.row(row), expected, "row {row}");
    }
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = tables
}
criterion_main!(benches);

//! A frame pool beside leases of a pool: allocate and free by frame number, against leases.
//!
//! First as ratios within each round, where both take turns, then one by one; then what an engine
//! with its own hashes does per block: derive a key, look up, register, and evict.

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvpool::{AllocRequest, FrameGroup, FrameKey, FramePool, Pool};
use kvpool_benches::report::median;
use kvpool_benches::{BLOCKS, subject};

const SIZES: [usize; 4] = [1, 10, 64, 256];
const ROUNDS: usize = 51;
const CALLS: usize = 2_000;

fn turn(pool: &Pool, blocks: usize) {
    drop(black_box(pool.allocate(AllocRequest::new(blocks)).expect("enough are free")));
}

struct Frames {
    pool: FramePool,
    frames: Vec<u32>,
}

impl Frames {
    fn turn(&mut self, blocks: usize) {
        self.pool.allocate(AllocRequest::new(blocks), &mut self.frames).expect("enough are free");
        self.pool.free(black_box(&self.frames)).expect("allocated just now");
        self.frames.clear();
    }
}

fn both() -> (Pool, Frames) {
    let frames = FramePool::builder(BLOCKS).build().expect("a valid shape");
    (subject::pool(BLOCKS), Frames { pool: frames, frames: Vec::new() })
}

fn nanos(mut turn: impl FnMut()) -> f64 {
    let begin = Instant::now();
    (0..CALLS).for_each(|_| turn());
    begin.elapsed().as_nanos() as f64 / CALLS as f64
}

fn allocate_and_free(c: &mut Criterion) {
    let (pool, mut frames) = both();
    for blocks in SIZES {
        let ratios: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                let base = nanos(|| turn(&pool, blocks));
                nanos(|| frames.turn(blocks)) / base
            })
            .collect();
        println!("{blocks} frames: {:.2} of a lease (median of {ROUNDS} rounds)", median(ratios));
    }
    let mut group = c.benchmark_group("allocate and free");
    for blocks in SIZES {
        group.throughput(Throughput::Elements(blocks as u64));
        group.bench_function(format!("lease/{blocks}"), |bencher| bencher.iter(|| turn(&pool, blocks)));
        group.bench_function(format!("frames/{blocks}"), |bencher| bencher.iter(|| frames.turn(blocks)));
    }
    drop(group);
    assert_eq!((pool.free_blocks(), frames.pool.available()), (BLOCKS, BLOCKS));
    frames.pool.audit().expect("a sound pool");
}

/// The engine's hash of a block.
fn foreign(content: u64) -> [u8; 32] {
    *blake3::hash(&content.to_le_bytes()).as_bytes()
}

fn hashes(c: &mut Criterion) {
    const CHAIN: usize = 64;
    let pool = FramePool::builder(BLOCKS).build().expect("a valid shape");
    let key = |content: u64| pool.key(FrameGroup(0), &foreign(content)).expect("not empty");
    let mut group = c.benchmark_group("64 hashes");
    group.throughput(Throughput::Elements(CHAIN as u64));
    let bytes: Vec<[u8; 32]> = (0..CHAIN as u64).map(foreign).collect();
    group.bench_function("keys", |bencher| {
        bencher.iter(|| {
            bytes.iter().for_each(|hash| {
                let _ = black_box(pool.key(FrameGroup(0), hash));
            });
        });
    });
    let keys: Vec<FrameKey> = (0..CHAIN as u64).map(key).collect();
    let mut frames = Vec::new();
    pool.allocate(AllocRequest::new(CHAIN), &mut frames).expect("enough are free");
    let named: Vec<(u32, FrameKey)> = frames.iter().copied().zip(keys.iter().copied()).collect();
    group.bench_function("register and uncache", |bencher| {
        bencher.iter(|| {
            pool.register(&named).expect("owned");
            assert_eq!(pool.uncache(&frames).expect("frames of this pool"), CHAIN);
        });
    });
    pool.register(&named).expect("owned");
    pool.free(&frames).expect("owned");
    group.bench_function("hit and free", |bencher| {
        let mut hits = Vec::new();
        bencher.iter(|| {
            // A release with which a block's generation wraps around, one of 65,536, uncaches it.
            if pool.hit(&keys, &mut hits) != Ok(CHAIN) {
                pool.free(&hits).expect("hit just now");
                hits.clear();
                pool.allocate(AllocRequest::new(CHAIN), &mut hits).expect("enough are free");
                let named: Vec<_> = hits.iter().copied().zip(keys.iter().copied()).collect();
                pool.register(&named).expect("owned");
            }
            pool.free(&hits).expect("owned");
            hits.clear();
        });
    });
    // A full pool: each allocation evicts what was freed first.
    let mut rest = Vec::new();
    pool.allocate(AllocRequest::new(BLOCKS), &mut rest).expect("nothing is in use");
    let named: Vec<(u32, FrameKey)> =
        rest.iter().map(|&frame| (frame, key(1_000 + u64::from(frame)))).collect();
    pool.register(&named).expect("owned");
    pool.free(&rest).expect("owned");
    let mut next = 10_000_000;
    group.bench_function("evict, register and free", |bencher| {
        let mut frames = Vec::new();
        bencher.iter(|| {
            pool.allocate(AllocRequest::new(CHAIN), &mut frames).expect("evictable");
            next += CHAIN as u64;
            let named: Vec<_> = frames.iter().copied().zip((next..).map(key)).collect();
            pool.register(&named).expect("owned");
            pool.free(&frames).expect("owned");
            frames.clear();
        });
    });
    drop(group);
    pool.audit().expect("a sound pool");
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = allocate_and_free, hashes
}
criterion_main!(benches);

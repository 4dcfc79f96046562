//! One thread: one block, also while a batch is in flight; ten blocks with metadata, bursts, and
//! the explicit handle as the bare magazine.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvpool::AllocRequest;
use kvpool_benches::subject::{Leases, Listed, Parking, Queued, Standard, pool};
use kvpool_benches::{BLOCKS, measure};

fn one_block(c: &mut Criterion) {
    let mut group = c.benchmark_group("one block");
    measure::one_block::<Leases>(&mut group);
    measure::one_block::<Listed<Standard>>(&mut group);
    measure::one_block::<Listed<Parking>>(&mut group);
    measure::one_block::<Listed<Queued>>(&mut group);
}

/// One block, allocated and freed while a batch is in flight. Every 64 blocks it ends, and the next
/// one begins: a freed block is retired until then. The lists do not protect batches.
fn in_flight(c: &mut Criterion) {
    let mut group = c.benchmark_group("one block, a batch in flight");
    let pool = pool(BLOCKS);
    let mut batch = Some(pool.begin_batch());
    let mut left = 64;
    group.throughput(Throughput::Elements(1));
    group.bench_function("kvpool lease", |bencher| {
        bencher.iter(|| {
            left -= 1;
            if left == 0 {
                batch.take().into_iter().for_each(|batch| batch.finish());
                batch = Some(pool.begin_batch());
                left = 64;
            }
            drop(black_box(pool.allocate(AllocRequest::new(1)).expect("enough blocks are free")));
        });
    });
    batch.into_iter().for_each(|batch| batch.finish());
    pool.trim();
    assert_eq!(pool.free_blocks(), BLOCKS, "lost blocks");
    measure::one_block::<Listed<Standard>>(&mut group);
    measure::one_block::<Listed<Parking>>(&mut group);
}

fn ten_blocks(c: &mut Criterion) {
    let mut group = c.benchmark_group("ten blocks with metadata");
    measure::ten_blocks::<Leases>(&mut group);
    measure::ten_blocks::<Listed<Standard>>(&mut group);
    measure::ten_blocks::<Listed<Parking>>(&mut group);
    measure::ten_blocks::<Listed<Queued>>(&mut group);
}

fn bursts(c: &mut Criterion) {
    let mut group = c.benchmark_group("bursts of 64");
    measure::bursts::<Leases>(&mut group);
    measure::bursts::<Listed<Standard>>(&mut group);
    measure::bursts::<Listed<Parking>>(&mut group);
    measure::bursts::<Listed<Queued>>(&mut group);
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = one_block, in_flight, ten_blocks, bursts
}
criterion_main!(benches);

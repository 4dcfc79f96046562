//! kvpool compared with kvbm-logical: the same workloads in one run.

use kvpool_benches::criterion::{Criterion, criterion_group, criterion_main};
use kvpool_benches::measure;
use kvpool_benches::subject::Leases;
use kvpool_peers::{Kvbm, KvbmRegistered};

fn one_thread(c: &mut Criterion) {
    let mut group = c.benchmark_group("one block");
    measure::one_block::<Leases>(&mut group);
    measure::one_block::<Kvbm>(&mut group);
    drop(group);

    let mut group = c.benchmark_group("ten blocks with metadata");
    measure::ten_blocks::<Leases>(&mut group);
    measure::ten_blocks::<Kvbm>(&mut group);
    measure::ten_blocks::<KvbmRegistered>(&mut group);
    drop(group);

    let mut group = c.benchmark_group("bursts of 64");
    measure::bursts::<Leases>(&mut group);
    measure::bursts::<Kvbm>(&mut group);
}

fn two_threads(c: &mut Criterion) {
    let mut group = c.benchmark_group("threads, one block");
    for threads in [1, 2] {
        measure::threads_one_block::<Leases>(&mut group, threads);
        measure::threads_one_block::<Kvbm>(&mut group, threads);
    }
    drop(group);

    let mut group = c.benchmark_group("producer and consumer");
    measure::producer_consumer::<Leases>(&mut group);
    measure::producer_consumer::<Kvbm>(&mut group);
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = one_thread, two_threads
}
criterion_main!(benches);

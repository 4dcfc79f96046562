//! One thread, two, and more where there are cores, each pinned to one: total throughput of each
//! subject, and the hand-over from one thread to another.

use criterion::{Criterion, criterion_group, criterion_main};
use kvpool_benches::subject::{Leases, Listed, Parking, Queued, Standard};
use kvpool_benches::{measure, threads};

/// Threads at most.
const MOST: usize = 64;

fn one_block(c: &mut Criterion) {
    println!("{}", threads::pinning());
    let mut group = c.benchmark_group("threads, one block");
    for threads in threads::counts(MOST) {
        measure::threads_one_block::<Leases>(&mut group, threads);
        measure::threads_one_block::<Listed<Standard>>(&mut group, threads);
        measure::threads_one_block::<Listed<Parking>>(&mut group, threads);
        measure::threads_one_block::<Listed<Queued>>(&mut group, threads);
    }
}

fn bursts(c: &mut Criterion) {
    let mut group = c.benchmark_group("threads, bursts of 64");
    for threads in threads::counts(MOST) {
        measure::threads_bursts::<Leases>(&mut group, threads);
        measure::threads_bursts::<Listed<Standard>>(&mut group, threads);
        measure::threads_bursts::<Listed<Parking>>(&mut group, threads);
        measure::threads_bursts::<Listed<Queued>>(&mut group, threads);
    }
}

fn producer_consumer(c: &mut Criterion) {
    let mut group = c.benchmark_group("producer and consumer");
    measure::ring_alone(&mut group);
    measure::producer_consumer::<Leases>(&mut group);
    measure::producer_consumer::<Listed<Standard>>(&mut group);
    measure::producer_consumer::<Listed<Parking>>(&mut group);
    measure::producer_consumer::<Listed<Queued>>(&mut group);
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = one_block, bursts, producer_consumer
}
criterion_main!(benches);

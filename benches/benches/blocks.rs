//! One thread: one block, ten blocks with metadata, bursts, and the explicit handle as the bare
//! magazine.

use criterion::{Criterion, criterion_group, criterion_main};
use kvpool_benches::measure;
use kvpool_benches::subject::{Handles, Leases, Listed, Parking, Queued, RawHandles, Standard};

fn one_block(c: &mut Criterion) {
    let mut group = c.benchmark_group("one block");
    measure::one_block::<Leases>(&mut group);
    measure::one_block::<RawHandles>(&mut group);
    measure::one_block::<Handles>(&mut group);
    measure::one_block::<Listed<Standard>>(&mut group);
    measure::one_block::<Listed<Parking>>(&mut group);
    measure::one_block::<Listed<Queued>>(&mut group);
}

fn ten_blocks(c: &mut Criterion) {
    let mut group = c.benchmark_group("ten blocks with metadata");
    measure::ten_blocks::<Leases>(&mut group);
    measure::ten_blocks::<RawHandles>(&mut group);
    measure::ten_blocks::<Handles>(&mut group);
    measure::ten_blocks::<Listed<Standard>>(&mut group);
    measure::ten_blocks::<Listed<Parking>>(&mut group);
    measure::ten_blocks::<Listed<Queued>>(&mut group);
}

fn bursts(c: &mut Criterion) {
    let mut group = c.benchmark_group("bursts of 64");
    measure::bursts::<Leases>(&mut group);
    measure::bursts::<RawHandles>(&mut group);
    measure::bursts::<Handles>(&mut group);
    measure::bursts::<Listed<Standard>>(&mut group);
    measure::bursts::<Listed<Parking>>(&mut group);
    measure::bursts::<Listed<Queued>>(&mut group);
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = one_block, ten_blocks, bursts
}
criterion_main!(benches);

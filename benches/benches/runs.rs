//! Exact contiguous runs of 1 to 512 blocks, in a pool of 131,072 blocks that is about half full.

use criterion::{Criterion, criterion_group, criterion_main};
use kvpool_benches::measure;
use kvpool_benches::subject::{Bitmap, OffsetRuns, PoolRuns};

fn runs(c: &mut Criterion) {
    let mut group = c.benchmark_group("exact runs of 1..=512");
    for threads in [1, 2] {
        measure::runs::<PoolRuns>(&mut group, threads);
        measure::runs::<Bitmap>(&mut group, threads);
        measure::runs::<OffsetRuns>(&mut group, threads);
    }
}

criterion_group! {
    name = benches;
    config = kvpool_benches::settings();
    targets = runs
}
criterion_main!(benches);

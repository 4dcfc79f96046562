//! A pool of 1 GiB, half of it in use in random order, is shrunk to half its size and grown back.
//!
//! Reported: time, bytes moved, and the process's resident memory. The baseline is the alternative:
//! a new pool of the right size, into which all blocks in use are copied. Medians; the ratio is
//! that of the medians.

use std::time::{Duration, Instant};

use kvpool::{Lease, Pool};
use kvpool_benches::bytes::{check, place, pool_of_bytes, resident_bytes, singles, write};
use kvpool_benches::report::median;
use tokio::runtime::Builder;

const BYTES: usize = 1 << 30;
const ROUNDS: usize = 5;

/// One change of size.
struct Change {
    time: Duration,
    moved: u64,
    before: usize,
    after: usize,
}

fn main() {
    println!("medians of {ROUNDS} rounds; MiB");
    println!("{:<14} {:<26} {:>8} {:>8} {:>15} {:>7}", "", "", "ms", "moved", "resident", "ratio");
    for model in ["qwen2.5-7b", "qwen2.5-0.5b"] {
        report(model);
    }
}

fn report(model: &str) {
    let (mut shrunk, mut grown, mut copied) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS as u64 {
        let pool = pool_of_bytes(model, BYTES);
        let total = pool.total_blocks();
        let mut random = fastrand::Rng::with_seed(round);
        let mut kept = write(&pool, total);
        random.shuffle(&mut kept);
        let gone = kept.split_off(total / 2);
        drop(gone);
        pool.trim();
        copied.push(copy(&pool, &kept));
        shrunk.push(resize(&pool, total / 2 + 8));
        check(&pool, &kept);
        grown.push(resize(&pool, total));
        check(&pool, &kept);
        pool.audit().expect("a consistent pool");
        assert_eq!(pool.free_blocks(), total - kept.len(), "lost blocks");
    }
    print(model, "shrink to half", &shrunk, &copied);
    print(model, "grow back", &grown, &copied);
    print(model, "a new pool, and a copy", &copied, &copied);
}

fn resize(pool: &Pool, blocks: usize) -> Change {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let before = resident_bytes().unwrap_or(0);
    let report = runtime.block_on(pool.resize(blocks)).expect("all can move");
    let after = resident_bytes().unwrap_or(0);
    Change { time: report.time, moved: report.moved.moved_bytes, before, after }
}

/// Copies the bytes of these blocks into the first frames of a new pool.
fn copy(pool: &Pool, blocks: &[Lease<'_>]) -> Change {
    let before = resident_bytes().unwrap_or(0);
    let start = Instant::now();
    let next =
        Pool::builder(pool.layout().clone()).blocks(blocks.len()).build().expect("memory for the pool");
    let (from, to) = (pool.storage().expect("memory"), next.storage().expect("memory"));
    let mut packed = vec![0; pool.layout().packed_bytes()];
    let targets = singles(&next, blocks.len());
    for (source, target) in blocks.iter().map(place).zip(targets.iter().map(place)) {
        // SAFETY: only this thread uses the two pools.
        unsafe { from.pack(&[source], &mut packed) }.expect("a frame of the pool");
        // SAFETY: as above.
        unsafe { to.unpack(&[target], &packed) }.expect("a frame of the pool");
    }
    let time = start.elapsed();
    let after = resident_bytes().unwrap_or(0);
    Change { time, moved: (blocks.len() * pool.layout().bytes_per_block()) as u64, before, after }
}

fn print(model: &str, name: &str, changes: &[Change], base: &[Change]) {
    let ms = |changes: &[Change]| median(changes.iter().map(|change| change.time.as_secs_f64() * 1e3));
    let mib = |of: fn(&Change) -> u64| median(changes.iter().map(of).map(|bytes| (bytes >> 20) as f64));
    println!(
        "{model:<14} {name:<26} {:>8.2} {:>8.0} {:>6.0} > {:>6.0} {:>7.2}",
        ms(changes),
        mib(|change| change.moved),
        mib(|change| change.before as u64),
        mib(|change| change.after as u64),
        ms(changes) / ms(base),
    );
}

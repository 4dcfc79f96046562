//! Costs that should not depend on a size: of a batch and a lease by the number of batches in
//! flight and after a burst of them, and of a moved block by the size of the pool.
//!
//! Batches: a step begins a batch, leases 64 blocks, and ends the oldest batch in flight. The more
//! are in flight, the rarer are the leases, because each retires its blocks until these have ended.
//!
//! Moves: every other block of a full pool without bytes is freed, and the pool compacted; then it
//! is filled, thinned at random, and shrunk to three quarters. The copies are of no bytes, so that
//! the time is that of the bookkeeping.
//!
//! Medians; each ratio is to the first row of its table.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Lease, Pool};
use kvpool_benches::bytes::{place, singles};
use kvpool_benches::report::median;

const STEPS: usize = 20_000;
const LEASES: usize = 1_000;
const ROUNDS: usize = 5;
const LEASE: usize = 64;

fn main() {
    let only = std::env::args().nth(1).unwrap_or_default();
    if only != "moves" {
        batches();
    }
    if only != "batches" {
        moves();
    }
}

fn batches() {
    println!("batches: ns, medians of {ROUNDS} rounds of {STEPS} steps, {LEASES} leases");
    println!("{:<18} {:>12} {:>7} {:>12} {:>7}", "in flight", "begin + end", "ratio", "64 blocks", "ratio");
    let mut base = None;
    for (name, count, stay) in [
        ("1", 1, 1),
        ("16", 16, 16),
        ("256", 256, 256),
        ("4,096", 4_096, 4_096),
        ("16,000", 16_000, 16_000),
        ("60,000", 60_000, 60_000),
        ("1 after 16,000", 16_000, 1),
        ("100 after 16,000", 16_000, 100),
        ("1 after 60,000", 60_000, 1),
    ] {
        let (alone, leases) = steps(count, stay);
        let &mut (first, first_lease) = base.get_or_insert((alone, leases));
        println!(
            "{name:<18} {alone:>12.1} {:>7.2} {leases:>12.1} {:>7.2}",
            alone / first,
            leases / first_lease
        );
    }
}

/// Returns the time of a step without a lease, and that of a lease in a step.
fn steps(count: usize, stay: usize) -> (f64, f64) {
    let layout = KvLayout::named("tiny").expect("a known model");
    let pool = Pool::builder(layout).blocks(65_536).without_storage().build().expect("a pool");
    let clock = pool.blocks().clock();
    let mut flight: VecDeque<_> = (0..count).map(|_| clock.begin()).collect();
    for batch in flight.drain(..count - stay) {
        let _ = clock.end(batch);
    }
    let (mut alone, mut leases) = (Vec::new(), Vec::new());
    for round in 0..2 * ROUNDS {
        let with_lease = round % 2 == 1;
        let every = stay.div_ceil(256);
        let count = if with_lease { LEASES * every } else { STEPS };
        let start = Instant::now();
        let mut inside = Duration::ZERO;
        for step in 0..count {
            flight.push_back(clock.begin());
            if with_lease && step % every == 0 {
                let start = Instant::now();
                drop(black_box(pool.allocate(AllocRequest::new(LEASE)).expect("most blocks are free")));
                inside += start.elapsed();
            }
            let _ = flight.pop_front().map(|batch| clock.end(batch));
        }
        if with_lease {
            leases.push(inside.as_nanos() as f64 / LEASES as f64);
        } else {
            alone.push(start.elapsed().as_nanos() as f64 / STEPS as f64);
        }
    }
    flight.into_iter().for_each(|batch| assert!(!clock.end(batch)));
    (median(alone), median(leases))
}

fn moves() {
    println!("moves: ns per moved block, median of {ROUNDS}");
    println!(
        "{:<10} {:>10} {:>10} {:>7} {:>10} {:>10} {:>7}",
        "blocks", "defragment", "moved", "ratio", "shrink", "moved", "ratio"
    );
    let mut base = None;
    for blocks in [1 << 16, 1 << 18, 1 << 20, 1 << 22] {
        let mut runs = Vec::new();
        for round in 0..ROUNDS as u64 {
            runs.push(moved(blocks, round));
        }
        let of = |pick: fn(&[f64; 4]) -> f64| median(runs.iter().map(pick));
        let (defragment, shrink) = (of(|run| run[0]), of(|run| run[2]));
        let &mut (first, first_shrink) = base.get_or_insert((defragment, shrink));
        println!(
            "{blocks:<10} {defragment:>10.1} {:>10} {:>7.2} {shrink:>10.1} {:>10} {:>7.2}",
            of(|run| run[1]),
            defragment / first,
            of(|run| run[3]),
            shrink / first_shrink,
        );
    }
}

/// Returns the time per moved block and the number of them, of a compaction and of a shrink.
fn moved(blocks: usize, seed: u64) -> [f64; 4] {
    let layout = KvLayout::named("tiny").expect("a known model");
    let copier: kvpool::compact::FrameCopier = Arc::new(|_, done| done(Ok(())));
    let pool = Pool::builder(layout).blocks(blocks).engine_copies(copier).build().expect("a pool");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut all = fill(&pool, blocks);
    all.sort_unstable_by_key(|lease| place(lease).start);
    let mut keep = false;
    free_unless(&pool, &mut all, |_| {
        keep = !keep;
        keep
    });
    let defragmented = pollster(pool.defragment()).expect("no copy fails");
    all.extend(fill(&pool, pool.free_blocks()));
    free_unless(&pool, &mut all, |_| random.bool());
    let shrunk = pollster(pool.resize(blocks / 4 * 3)).expect("all can move").moved;
    pool.audit().expect("a consistent pool");
    let each = |report: &kvpool::compact::DefragReport| {
        report.time.as_nanos() as f64 / report.moved_blocks.max(1) as f64
    };
    [each(&defragmented), defragmented.moved_blocks as f64, each(&shrunk), shrunk.moved_blocks as f64]
}

fn fill(pool: &Pool, count: usize) -> Vec<Lease<'static>> {
    let mut leases = singles(pool, count);
    leases.iter_mut().for_each(|lease| lease.seal(..));
    leases
}

fn free_unless(pool: &Pool, all: &mut Vec<Lease<'_>>, is_kept: impl FnMut(&Lease<'_>) -> bool) {
    all.retain(is_kept);
    pool.trim();
}

/// Polls a future that needs no other task.
fn pollster<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    loop {
        if let std::task::Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
}

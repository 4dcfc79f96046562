//! Speed of moves: a whole compaction compared with `memcpy` of the same bytes, in the same run.
//!
//! Every other block of a full pool is freed and the pool compacted, so that a quarter of its
//! memory moves, all of it in pieces of minimal size. The figure is the number of moved bytes over
//! the whole time of the run: snapshot, plan, claims, copies, publication. Its parts are measured
//! too: snapshot and plan alone, and the copy of the same moves alone in one call. The baseline is
//! one `memcpy` of as many bytes as moved, between plain pieces of memory. All memory has been
//! written before. Medians; ratios are medians of the ratios of each round.
//!
//! Target: 0.8 of `memcpy`.

use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvpool::compact::{DefragReport, FRAGMENTATION_PENALTY, Goal, plan};
use kvpool::storage::FrameMove;
use kvpool::{Lease, Pool};
use kvpool_benches::bytes::{Plain, check, place, pool_of_bytes, write};
use kvpool_benches::report::median;
use tokio::runtime::{Builder, Runtime};

const ROUNDS: usize = 9;

fn main() {
    println!("moved bytes over time, medians of {ROUNDS} rounds; the ratio is to memcpy of the same bytes");
    println!("{:<34} {:>8} {:>8} {:>8} {:>10} {:>7}", "", "MiB", "ms", "GB/s", "ns/block", "ratio");
    report("qwen2.5-7b", 1 << 30);
    report("qwen2.5-0.5b", 1 << 29);
    report("tiny", 1 << 25);
}

/// Times of one method, by round.
struct Way {
    name: &'static str,
    times: Vec<Duration>,
}

impl Way {
    fn new(name: &'static str) -> Self {
        Self { name, times: Vec::new() }
    }

    fn print(&self, moved: &DefragReport, base: &Self) {
        let ms = median(self.times.iter().map(|time| time.as_secs_f64() * 1e3));
        let ratio = |(time, base): (&Duration, &Duration)| base.as_secs_f64() / time.as_secs_f64();
        println!(
            "{:<34} {:>8.0} {ms:>8.2} {:>8.2} {:>10.0} {:>7.2}",
            self.name,
            moved.moved_bytes as f64 / f64::from(1 << 20),
            moved.moved_bytes as f64 / ms / 1e6,
            ms * 1e6 / moved.moved_blocks as f64,
            median(self.times.iter().zip(&base.times).map(ratio)),
        );
    }
}

fn report(model: &str, bytes: usize) {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let pool = pool_of_bytes(model, bytes);
    println!("{model}: {} blocks of {} bytes", pool.total_blocks(), pool.layout().bytes_per_block());
    let mut plain = Plain::new(bytes / 4 + (bytes >> 6));
    let mut memcpy = Way::new("  memcpy");
    let mut looking = Way::new("  snapshot and plan alone");
    let mut copying = Way::new("  the copy alone, in one call");
    let mut whole = Way::new("  defragment");
    let mut polled = Way::new("  defragment, without a runtime");
    let mut moved = DefragReport::default();
    let mut all = write(&pool, pool.total_blocks());
    for round in 0..ROUNDS {
        for on_runtime in [round % 2 == 0, round % 2 != 0] {
            thin(&pool, &mut all);
            if on_runtime {
                let (look, copy) = parts(&pool);
                looking.times.push(look);
                copying.times.push(copy);
                moved = run(&pool, Some(&runtime));
                whole.times.push(moved.time);
                memcpy.times.push(plain.copy(moved.moved_bytes as usize));
            } else {
                polled.times.push(run(&pool, None).time);
            }
            check(&pool, &all);
            all.extend(write(&pool, pool.free_blocks()));
        }
    }
    for way in [&memcpy, &looking, &copying, &whole, &polled] {
        way.print(&moved, &memcpy);
    }
}

/// Frees every other block, in the order of their frames.
fn thin(pool: &Pool, all: &mut Vec<Lease<'_>>) {
    all.sort_unstable_by_key(|lease| place(lease).start);
    let mut keep = false;
    all.retain(|_| {
        keep = !keep;
        keep
    });
    pool.trim();
}

/// Runs the parts of the coming compaction: snapshot and plan, and the copy.
fn parts(pool: &Pool) -> (Duration, Duration) {
    let start = Instant::now();
    let snapshot = pool.snapshot();
    let planned =
        plan(&snapshot, Goal::Fragmentation { order: snapshot.order() }, usize::MAX, FRAGMENTATION_PENALTY);
    let look = start.elapsed();
    let moves: Vec<_> = planned.moves.iter().map(|step| FrameMove::new(step.from, step.to)).collect();
    let storage = pool.storage().expect("a pool with memory");
    let start = Instant::now();
    // SAFETY: the destinations are free, and only this thread uses the pool.
    unsafe { storage.copy(&moves) }.expect("frames of the pool");
    (look, start.elapsed())
}

fn run(pool: &Pool, runtime: Option<&Runtime>) -> DefragReport {
    let report = match runtime {
        Some(runtime) => runtime.block_on(pool.defragment()),
        None => poll_through(pool.defragment()),
    };
    let report = report.expect("host memory copies");
    assert!(report.fragmentation_after < 0.1 && report.given_up.total() == 0, "{report:?}");
    report
}

/// Polls a future that needs no other task.
fn poll_through<F: Future>(future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
    }
}

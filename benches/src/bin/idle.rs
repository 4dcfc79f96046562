//! Cost of an idle pool: the processor time of a background defragmenter with nothing to do, and of
//! reading statistics.
//!
//! Usage: `cargo run --release -p kvpool-benches --bin idle`

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvpool::storage::KvLayout;
use kvpool::{DefragConfig, Pool};
use kvpool_benches::bytes::singles;

/// Returns the processor time of this process.
fn cpu_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes only the struct passed to it.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) };
    assert_eq!(rc, 0);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn nanoseconds<T>(rounds: u32, f: impl Fn() -> T) -> f64 {
    let start = Instant::now();
    (0..rounds).for_each(|_| drop(black_box(f())));
    start.elapsed().as_nanos() as f64 / f64::from(rounds)
}

fn main() {
    const WATCHED: Duration = Duration::from_secs(5);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    println!("{:>9}  {:<22} {:>9}  {:>12} {:>10}", "blocks", "state", "of a core", "free_blocks", "stats");
    for blocks in [65_535, 1_000_000] {
        let layout = KvLayout::named("tiny").expect("a known name");
        let pool = Pool::builder(layout).blocks(blocks).build().expect("a pool");
        let mut leases = Vec::new();
        for state in ["empty", "half full", "every other one, open"] {
            match state {
                "empty" => {}
                "half full" => leases.append(&mut singles(&pool, blocks / 2)),
                _ => {
                    leases.append(&mut singles(&pool, pool.free_blocks()));
                    leases.retain(|lease| lease.blocks()[0].0 % 2 == 1);
                }
            }
            let share = runtime.block_on(async {
                let task = pool.start_defragmenter(DefragConfig::new()).expect("on a runtime");
                tokio::time::sleep(Duration::from_secs(1)).await;
                let before = cpu_time();
                tokio::time::sleep(WATCHED).await;
                let share = (cpu_time() - before).as_secs_f64() / WATCHED.as_secs_f64();
                task.stop().await;
                share
            });
            let (free, stats) =
                (nanoseconds(1000, || pool.free_blocks()), nanoseconds(1000, || pool.stats()));
            println!("{blocks:>9}  {state:<22} {:>8.3}%  {free:>9.0} ns {stats:>7.0} ns", 100.0 * share);
        }
    }
}

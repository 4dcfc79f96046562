//! Effect of a concurrent compaction on an allocating thread: the times of its calls with and
//! without it, and next to a thread that copies as many bytes by `memcpy`, which separates the
//! effects of the machine from those of the pool.
//!
//! One thread repeatedly allocates and frees a block, and appends a token to a sequence under a
//! batch; each call is timed. Another frees and allocates at random, so that there is always work
//! for the compactor. Next to them runs:
//!
//! - *nothing*;
//! - *a defragmenter* that looks every millisecond and compacts whatever it finds;
//! - *memcpy* of as many bytes per second as the defragmenter moved;
//! - *a defragmenter without bytes*: of a pool whose copier completes at once. The rest is the cost
//!   of the pool itself.
//!
//! Each in turn, in short slices, many times. The timed thread has a core of its own if the system
//! allows it. Target: a 99.9th percentile within 1.2 of that with nothing running.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, DefragTotals};
use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{AllocRequest, Pool, SequenceId};
use kvpool_benches::bytes::{Plain, singles};
use kvpool_benches::quiet::{Quiet, alone_on};
use kvpool_benches::report::{Times, median};
use tokio::runtime::{Builder, Runtime};

const BLOCKS: usize = 4096;
const ROUNDS: usize = 9;
const SLICE: Duration = Duration::from_millis(350);
const PIECE: usize = 1 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    Defragmenter,
    Memcpy,
    WithoutBytes,
}

const ALL: [(Beside, &str); 4] = [
    (Beside::Nothing, "nothing"),
    (Beside::Defragmenter, "a defragmenter"),
    (Beside::Memcpy, "memcpy, as many bytes"),
    (Beside::WithoutBytes, "a defragmenter without bytes"),
];

/// Times of the measured thread in one slice, and the concurrent activity.
struct Slice {
    allocations: Times,
    appends: Times,
    bytes: f64,
    looks: f64,
}

fn main() {
    let layout = || KvLayout::named("qwen2.5-0.5b").expect("a known layout");
    let pool = Pool::builder(layout()).blocks(BLOCKS).build().expect("memory for the pool");
    let copier = Arc::new(|_: &[FrameMove], done: CopyDone| done(Ok(())));
    let bare = Pool::builder(layout()).blocks(BLOCKS).engine_copies(copier).build().expect("a pool");
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let mut plain = Plain::new(256 << 20);
    let frames: Vec<_> = vec![kvpool::Run { start: kvpool::FrameId(0), len: BLOCKS as u32 }];
    // SAFETY: no block has been allocated yet.
    unsafe { pool.storage().expect("a pool with memory").zero(&frames) }.expect("frames of the pool");

    let quiet = thread::scope(|scope| scope.spawn(|| alone_on(last_core())).join().expect("no panic"));
    let mut slices: Vec<Vec<Slice>> = ALL.iter().map(|_| Vec::new()).collect();
    let mut bytes_a_second = 0.0;
    for _ in 0..ROUNDS {
        for ((beside, _), slices) in ALL.iter().zip(&mut slices) {
            let pool = if *beside == Beside::WithoutBytes { &bare } else { &pool };
            let slice = slice(pool, &runtime, *beside, &mut plain, bytes_a_second);
            if *beside == Beside::Defragmenter {
                bytes_a_second = slice.bytes;
            }
            slices.push(slice);
        }
    }
    print("allocate + free", &slices, |slice| &slice.allocations, quiet == Quiet::Alone);
    print("begin a batch, append, finish", &slices, |slice| &slice.appends, quiet == Quiet::Alone);
}

fn print(name: &str, slices: &[Vec<Slice>], times: fn(&Slice) -> &Times, is_alone: bool) {
    println!("\n{name}, ns, medians of {ROUNDS} slices; ratios to \"nothing\" in the same round");
    if !is_alone {
        println!("(without a core of its own)");
    }
    println!(
        "{:<30} {:>7} {:>7} {:>7} {:>9}   {:>6} {:>6} {:>6} {:>8} {:>8}",
        "beside", "median", "p99", "p99.9", "max", "median", "p99", "p99.9", "MB/s", "looks/s"
    );
    for ((_, beside), of) in ALL.iter().zip(slices) {
        let figures: [fn(&Times) -> Duration; 4] =
            [|times| times.median, |times| times.p99, |times| times.p999, |times| times.max];
        let [p50, p99, p999, max] =
            figures.map(|figure| median(of.iter().map(|slice| figure(times(slice)).as_nanos() as f64)));
        let [p50_ratio, p99_ratio, p999_ratio, _] = figures.map(|figure| {
            let ratio = |(slice, base): (&Slice, &Slice)| {
                figure(times(slice)).as_secs_f64() / figure(times(base)).as_secs_f64()
            };
            median(of.iter().zip(&slices[0]).map(ratio))
        });
        println!(
            "{beside:<30} {p50:>7.0} {p99:>7.0} {p999:>7.0} {max:>9.0}   {p50_ratio:>6.2} {p99_ratio:>6.2} \
             {p999_ratio:>6.2} {:>8.0} {:>8.0}",
            median(of.iter().map(|slice| slice.bytes / 1e6)),
            median(of.iter().map(|slice| slice.looks)),
        );
    }
}

fn last_core() -> usize {
    thread::available_parallelism().map_or(0, |cores| cores.get() - 1)
}

/// Runs one slice of time.
fn slice(pool: &Pool, runtime: &Runtime, beside: Beside, plain: &mut Plain, bytes_a_second: f64) -> Slice {
    let stop = &AtomicBool::new(false);
    let defragments = matches!(beside, Beside::Defragmenter | Beside::WithoutBytes);
    let task = defragments.then(|| {
        let _inside = runtime.enter();
        let config = DefragConfig::new().threshold(0.0).interval(Duration::from_millis(1));
        pool.start_defragmenter(config).expect("bytes that can move")
    });
    let started = Instant::now();
    let (allocations, appends, copied) = thread::scope(|scope| {
        let fragmenter = scope.spawn(move || fragment(pool, stop));
        let copier =
            (beside == Beside::Memcpy).then(|| scope.spawn(move || copy(plain, bytes_a_second, stop)));
        let timed = scope.spawn(move || {
            alone_on(last_core());
            timed(pool)
        });
        let (allocations, appends) = timed.join().expect("no bench thread panicked");
        stop.store(true, Relaxed);
        fragmenter.join().expect("no bench thread panicked");
        (allocations, appends, copier.map_or(0, |copier| copier.join().expect("no bench thread panicked")))
    });
    let totals = task.map_or(DefragTotals::default(), |task| runtime.block_on(task.stop()));
    let seconds = started.elapsed().as_secs_f64();
    assert_eq!(pool.audit().expect("a consistent pool").owned, 0);
    assert_eq!(pool.free_blocks(), BLOCKS, "lost blocks");
    let bytes = (totals.moved_bytes + copied) as f64 / seconds;
    Slice {
        allocations: Times::of(allocations),
        appends: Times::of(appends),
        bytes,
        looks: totals.looks as f64 / seconds,
    }
}

/// The timed thread.
fn timed(pool: &Pool) -> (Vec<Duration>, Vec<Duration>) {
    let (mut allocations, mut appends) = (Vec::with_capacity(1 << 22), Vec::with_capacity(1 << 22));
    // The other thread has begun by this point.
    thread::sleep(Duration::from_millis(20));
    let mut sequence = pool.sequence(SequenceId(0)).open().expect("a new id");
    let end = Instant::now() + SLICE;
    loop {
        let start = Instant::now();
        drop(pool.allocate(AllocRequest::new(1)).expect("half of the pool is free"));
        let between = Instant::now();
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, 1).expect("half of the pool is free");
        batch.finish();
        let after = Instant::now();
        allocations.push(between - start);
        appends.push(after - between);
        if sequence.len() == 1024 {
            sequence.truncate(0).expect("a shorter length");
        }
        if after > end {
            return (allocations, appends);
        }
    }
}

/// Keeps half of the pool allocated, in random order, and changes which half.
fn fragment(pool: &Pool, stop: &AtomicBool) {
    let mut random = fastrand::Rng::with_seed(1);
    let mut held = Vec::new();
    let take = |held: &mut Vec<_>, count: usize| {
        let mut taken = singles(pool, count);
        taken.iter_mut().for_each(|lease| lease.seal(..));
        held.append(&mut taken);
    };
    take(&mut held, BLOCKS * 3 / 4);
    random.shuffle(&mut held);
    held.truncate(BLOCKS / 2);
    while !stop.load(Relaxed) {
        for _ in 0..16 {
            drop(held.swap_remove(random.usize(..held.len())));
        }
        take(&mut held, 16);
        thread::sleep(Duration::from_micros(200));
    }
}

/// Copies at this rate, a piece at a time; returns the number of bytes.
fn copy(plain: &mut Plain, bytes_a_second: f64, stop: &AtomicBool) -> u64 {
    let started = Instant::now();
    let mut pieces = 0;
    while !stop.load(Relaxed) {
        if (pieces * PIECE) as f64 > bytes_a_second * started.elapsed().as_secs_f64() {
            thread::sleep(Duration::from_millis(1));
            continue;
        }
        plain.copy_piece(pieces, PIECE);
        pieces += 1;
    }
    (pieces * PIECE) as u64
}

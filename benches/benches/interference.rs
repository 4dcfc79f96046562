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
//! Then the same for a pool of states: the timed thread admits and closes sequences with a state of
//! 65 consecutive frames, while another opens and closes sequences so that nine tenths are in use.
//!
//! Each in turn, in short slices, many times. The timed thread has a core of its own if the system
//! allows it. Target: a 99.9th percentile within 1.2 of that with nothing running.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, DefragTotals, FrameCopier};
use kvpool::storage::{CopyDone, FrameMove, KvLayout};
use kvpool::{AdmitRequest, AllocRequest, GroupedSequence, Pool, SequenceId, Tokens};
use kvpool_benches::bytes::{Plain, singles};
use kvpool_benches::quiet::{Quiet, alone_on};
use kvpool_benches::report::{Times, median};
use tokio::runtime::{Builder, Runtime};

const BLOCKS: usize = 4096;
const ROUNDS: usize = 9;
const SLICE: Duration = Duration::from_millis(350);
const PIECE: usize = 1 << 20;
const STATE_FRAMES: usize = 65;
const STATE_FRAME_BYTES: usize = 64 << 10;

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

/// Times of the measured thread in one slice, of two kinds of calls, and the concurrent activity.
struct Slice {
    times: [Times; 2],
    calls: [f64; 2],
    bytes: f64,
    looks: f64,
}

/// What the threads do with a pool.
#[derive(Clone, Copy)]
struct Work {
    timed: fn(&Pool) -> [Vec<Duration>; 2],
    /// Keeps the pool in use until it is stopped.
    beside: fn(&Pool, &AtomicBool),
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

    let work = Work { timed, beside: fragment };
    let (slices, quiet) = measure([&pool, &bare], &runtime, work, &mut plain);
    print("allocate + free", &slices, 0, quiet);
    print("begin a batch, append, finish", &slices, 1, quiet);
    drop((pool, bare));

    let memory = Mutex::new(vec![0_u8; (BLOCKS + 1) * STATE_FRAME_BYTES]);
    let copier = move |moves: &[FrameMove], done: CopyDone| {
        let at = |frame: kvpool::FrameId| frame.index() * STATE_FRAME_BYTES;
        let mut memory = memory.lock().expect("no bench thread panicked");
        for of in moves {
            memory.copy_within(at(of.src)..at(of.src) + STATE_FRAME_BYTES, at(of.dst));
        }
        done(Ok(()));
    };
    let pool = states(Arc::new(copier));
    let bare = states(Arc::new(|_: &[FrameMove], done: CopyDone| done(Ok(()))));
    let work = Work { timed: admit_states, beside: open_and_close };
    let (slices, quiet) = measure([&pool, &bare], &runtime, work, &mut plain);
    print("admit a state of 65 frames, close", &slices, 0, quiet);
    print("the same, with those refused for lack of a run", &slices, 1, quiet);
}

/// A pool of sequences with a state.
fn states(copier: FrameCopier) -> Pool {
    let layout = KvLayout::named("qwen2.5-0.5b").expect("a known layout");
    let builder = Pool::builder(layout).blocks(BLOCKS).engine_copies(copier);
    builder.states([STATE_FRAMES]).build().expect("a pool")
}

/// Runs all slices, with the pool without bytes where there is nothing to copy.
fn measure(
    [pool, bare]: [&Pool; 2],
    runtime: &Runtime,
    work: Work,
    plain: &mut Plain,
) -> (Vec<Vec<Slice>>, Quiet) {
    let quiet = thread::scope(|scope| scope.spawn(|| alone_on(last_core())).join().expect("no panic"));
    let mut slices: Vec<Vec<Slice>> = ALL.iter().map(|_| Vec::new()).collect();
    let mut bytes_a_second = 0.0;
    for _ in 0..ROUNDS {
        for ((beside, _), slices) in ALL.iter().zip(&mut slices) {
            let pool = if *beside == Beside::WithoutBytes { bare } else { pool };
            let slice = slice(pool, runtime, work, *beside, plain, bytes_a_second);
            if *beside == Beside::Defragmenter {
                bytes_a_second = slice.bytes;
            }
            slices.push(slice);
        }
    }
    (slices, quiet)
}

fn print(name: &str, slices: &[Vec<Slice>], kind: usize, quiet: Quiet) {
    println!("\n{name}, ns, medians of {ROUNDS} slices; ratios to \"nothing\" in the same round");
    if quiet != Quiet::Alone {
        println!("(without a core of its own)");
    }
    println!(
        "{:<30} {:>7} {:>7} {:>7} {:>9}   {:>6} {:>6} {:>6} {:>8} {:>8} {:>8}",
        "beside", "median", "p99", "p99.9", "max", "median", "p99", "p99.9", "MB/s", "looks/s", "calls"
    );
    for ((_, beside), of) in ALL.iter().zip(slices) {
        let figures: [fn(&Times) -> Duration; 4] =
            [|times| times.median, |times| times.p99, |times| times.p999, |times| times.max];
        let [p50, p99, p999, max] =
            figures.map(|figure| median(of.iter().map(|slice| figure(&slice.times[kind]).as_nanos() as f64)));
        let [p50_ratio, p99_ratio, p999_ratio, _] = figures.map(|figure| {
            let ratio = |(slice, base): (&Slice, &Slice)| {
                figure(&slice.times[kind]).as_secs_f64() / figure(&base.times[kind]).as_secs_f64()
            };
            median(of.iter().zip(&slices[0]).map(ratio))
        });
        println!(
            "{beside:<30} {p50:>7.0} {p99:>7.0} {p999:>7.0} {max:>9.0}   {p50_ratio:>6.2} {p99_ratio:>6.2} \
             {p999_ratio:>6.2} {:>8.0} {:>8.0} {:>8.0}",
            median(of.iter().map(|slice| slice.bytes / 1e6)),
            median(of.iter().map(|slice| slice.looks)),
            median(of.iter().map(|slice| slice.calls[kind])),
        );
    }
}

fn last_core() -> usize {
    thread::available_parallelism().map_or(0, |cores| cores.get() - 1)
}

/// Runs one slice of time.
fn slice(
    pool: &Pool,
    runtime: &Runtime,
    work: Work,
    beside: Beside,
    plain: &mut Plain,
    bytes_a_second: f64,
) -> Slice {
    let stop = &AtomicBool::new(false);
    let defragments = matches!(beside, Beside::Defragmenter | Beside::WithoutBytes);
    let task = defragments.then(|| {
        let _inside = runtime.enter();
        let config = DefragConfig::new().threshold(0.0).interval(Duration::from_millis(1));
        pool.start_defragmenter(config).expect("bytes that can move")
    });
    let started = Instant::now();
    let (times, copied) = thread::scope(|scope| {
        let fragmenter = scope.spawn(move || (work.beside)(pool, stop));
        let copier =
            (beside == Beside::Memcpy).then(|| scope.spawn(move || copy(plain, bytes_a_second, stop)));
        let timed = scope.spawn(move || {
            alone_on(last_core());
            (work.timed)(pool)
        });
        let times = timed.join().expect("no bench thread panicked");
        stop.store(true, Relaxed);
        fragmenter.join().expect("no bench thread panicked");
        (times, copier.map_or(0, |copier| copier.join().expect("no bench thread panicked")))
    });
    let totals = task.map_or(DefragTotals::default(), |task| runtime.block_on(task.stop()));
    let seconds = started.elapsed().as_secs_f64();
    assert_eq!(pool.audit().expect("a consistent pool").owned, 0);
    assert_eq!(pool.free_blocks(), BLOCKS, "lost blocks");
    let bytes = (totals.moved_bytes + copied) as f64 / seconds;
    let calls = times.each_ref().map(|times| times.len() as f64);
    Slice { times: times.map(Times::of), calls, bytes, looks: totals.looks as f64 / seconds }
}

/// The timed thread.
fn timed(pool: &Pool) -> [Vec<Duration>; 2] {
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
            return [allocations, appends];
        }
    }
}

/// Admits sequences with a state, one after the other: the times of those that are admitted, and of
/// all.
fn admit_states(pool: &Pool) -> [Vec<Duration>; 2] {
    let (mut admitted, mut tried) = (Vec::with_capacity(1 << 20), Vec::with_capacity(1 << 20));
    thread::sleep(Duration::from_millis(20));
    let end = Instant::now() + SLICE;
    loop {
        let start = Instant::now();
        let sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(0), &[7; 16]));
        let is_admitted = sequence.map(drop).is_ok();
        let after = Instant::now();
        admitted.extend(is_admitted.then(|| after - start));
        tried.push(after - start);
        if after > end {
            return [admitted, tried];
        }
    }
}

/// Keeps nine tenths of a pool of states in use, by sequences of 17 to 640 tokens, of which it
/// closes one at random for each that it opens. At the beginning, two runs of a state are free.
fn open_and_close(pool: &Pool, stop: &AtomicBool) {
    let mut random = fastrand::Rng::with_seed(1);
    let mut open: Vec<GroupedSequence> = Vec::new();
    let mut id = 0;
    let mut fill = |open: &mut Vec<GroupedSequence>, random: &mut fastrand::Rng| {
        id += 1;
        let prompt = vec![7; random.usize(17..=640)];
        let Ok(mut sequence) = pool.admit_grouped(&AdmitRequest::new(SequenceId(id), &prompt)) else {
            return false;
        };
        let mut batch = pool.begin_batch();
        let appended = batch.append_grouped(&mut sequence, Tokens::Final(prompt.len()));
        appended.expect("the blocks are reserved");
        batch.finish();
        open.push(sequence);
        true
    };
    while pool.free_blocks() > BLOCKS / 10 && fill(&mut open, &mut random) {}
    open.truncate(open.len() - 2);
    while !stop.load(Relaxed) {
        for _ in 0..2 {
            if fill(&mut open, &mut random) || open.len() > 20 {
                drop(open.swap_remove(random.usize(..open.len())));
            }
        }
        thread::sleep(Duration::from_micros(200));
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

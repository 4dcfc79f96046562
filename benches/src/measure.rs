//! The workloads, each generic over its subject.

use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Throughput};
use rtrb::RingBuffer;

use crate::check::{Owners, check};
use crate::subject::Contiguous;
use crate::threads::{Backoff, together};
use crate::{BLOCKS, Subject, Worker};

/// Returns `iterations` times the median of the results of `one`, called that often: for
/// `iter_custom`, to exclude the rest of the machine. A call should take microseconds, so that few
/// calls are disturbed.
pub fn medians(iterations: u64, mut one: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<Duration> = (0..iterations).map(|_| one()).collect();
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1 * iterations as u32
}

/// Creates a group of benches.
pub type Group<'a> = BenchmarkGroup<'a, WallTime>;

/// Operations per iteration of a bench with threads: enough to hide their different starting times.
const OPERATIONS: u64 = 4096;

/// Blocks in a burst.
const BURST: usize = 64;

/// One block, allocated and freed.
pub fn one_block<S: Subject>(group: &mut Group) {
    check::<S>(2);
    let subject = S::new(BLOCKS);
    let mut worker = subject.worker();
    group.throughput(Throughput::Elements(1));
    group.bench_function(S::NAME, |bencher| {
        bencher.iter(|| {
            let block = black_box(worker.allocate());
            worker.free(block);
        });
    });
    drop(worker);
    assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
}

/// Ten blocks of one owner in one call, with references, owner and last use noted; freed in one
/// call.
pub fn ten_blocks<S: Subject>(group: &mut Group) {
    check::<S>(2);
    let subject = S::new(BLOCKS);
    let mut worker = subject.worker();
    let mut owner = 0;
    group.throughput(Throughput::Elements(10));
    group.bench_function(S::NAME, |bencher| {
        bencher.iter(|| {
            owner += 1;
            let blocks = black_box(worker.allocate_many(10, owner));
            worker.free_many(blocks);
        });
    });
    drop(worker);
    assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
}

/// 64 single blocks allocated, then freed oldest first.
pub fn bursts<S: Subject>(group: &mut Group) {
    check::<S>(2);
    let subject = S::new(BLOCKS);
    let mut worker = subject.worker();
    let mut held = Vec::with_capacity(BURST);
    group.throughput(Throughput::Elements(BURST as u64));
    group.bench_function(S::NAME, |bencher| {
        bencher.iter(|| {
            held.extend((0..BURST).map(|_| worker.allocate()));
            held.drain(..).for_each(|block| worker.free(black_box(block)));
        });
    });
    drop(worker);
    assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
}

/// `threads` threads, each with one block after another; total throughput.
pub fn threads_one_block<S: Subject>(group: &mut Group, threads: usize) {
    check::<S>(threads);
    let subject = S::new(BLOCKS);
    group.throughput(Throughput::Elements(threads as u64 * OPERATIONS));
    group.bench_function(format!("{}/{threads}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| {
            together(
                threads,
                |_| subject.worker(),
                |_, worker| {
                    for _ in 0..iterations * OPERATIONS {
                        let block = black_box(worker.allocate());
                        worker.free(block);
                    }
                },
            )
        });
    });
    assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
}

/// `threads` threads with bursts of 64; total throughput in blocks.
pub fn threads_bursts<S: Subject>(group: &mut Group, threads: usize) {
    check::<S>(threads);
    let subject = S::new(BLOCKS);
    let prepare = |_| (subject.worker(), Vec::with_capacity(BURST));
    group.throughput(Throughput::Elements(threads as u64 * OPERATIONS));
    group.bench_function(format!("{}/{threads}", S::NAME), |bencher| {
        bencher.iter_custom(|iterations| {
            together(threads, prepare, |_, (worker, held)| {
                for _ in 0..iterations * OPERATIONS / BURST as u64 {
                    held.extend((0..BURST).map(|_| worker.allocate()));
                    held.drain(..).for_each(|block| worker.free(black_box(block)));
                }
            })
        });
    });
    assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
}

/// One thread allocates, another frees, a wait-free ring between them.
pub fn producer_consumer<S: Subject>(group: &mut Group) {
    check::<S>(2);
    let subject = S::new(BLOCKS);
    group.throughput(Throughput::Elements(OPERATIONS));
    group.bench_function(S::NAME, |bencher| {
        bencher.iter_custom(|iterations| {
            hand_over(iterations * OPERATIONS, |_| subject.worker(), Worker::allocate, Worker::free)
        });
    });
    assert_eq!(subject.free_blocks(), BLOCKS, "{} lost blocks", S::NAME);
}

/// The ring of [`producer_consumer`] without allocations: the cost of the hand-over itself.
pub fn ring_alone(group: &mut Group) {
    group.throughput(Throughput::Elements(OPERATIONS));
    group.bench_function("the ring alone", |bencher| {
        bencher.iter_custom(|iterations| {
            hand_over(
                iterations * OPERATIONS,
                |_| 0_u64,
                |next| *next,
                |_, got| {
                    black_box(got);
                },
            )
        });
    });
}

fn hand_over<W, B: Send>(
    count: u64,
    prepare: impl Fn(usize) -> W + Sync,
    produce: impl Fn(&mut W) -> B + Sync,
    consume: impl Fn(&mut W, B) + Sync,
) -> std::time::Duration {
    let (producer, consumer) = RingBuffer::new(1024);
    let ends = Mutex::new((Some(producer), Some(consumer)));
    let take_end = |thread| {
        let mut ends = ends.lock().expect("no bench thread panicked");
        let producer = (thread == 0).then(|| ends.0.take()).flatten();
        let consumer = (thread == 1).then(|| ends.1.take()).flatten();
        (prepare(thread), producer, consumer)
    };
    together(2, take_end, |_, (worker, producer, consumer)| {
        if let Some(producer) = producer {
            for _ in 0..count {
                let mut block = produce(worker);
                let mut backoff = Backoff::default();
                while let Err(rtrb::PushError::Full(back)) = producer.push(block) {
                    block = back;
                    backoff.wait();
                }
            }
        } else if let Some(consumer) = consumer {
            for _ in 0..count {
                let mut backoff = Backoff::default();
                let block = loop {
                    match consumer.pop() {
                        Ok(block) => break block,
                        Err(_) => backoff.wait(),
                    }
                };
                consume(worker, block);
            }
        }
    })
}

/// Exact runs of 1..=512 blocks at about half fill: the oldest of 256 runs is freed, a new one is
/// allocated.
pub fn runs<C: Contiguous>(group: &mut Group, threads: usize) {
    let blocks = 2 * BLOCKS;
    let held_max = 256 / threads;
    check_runs::<C>(blocks);
    let subject = C::new(blocks);
    let fill = |thread| {
        let mut random = fastrand::Rng::with_seed(thread as u64);
        let held = (0..held_max).filter_map(|_| subject.allocate(random.u32(1..=512))).collect();
        Mutex::new((VecDeque::from_iter::<Vec<_>>(held), random))
    };
    // One thread's runs and random numbers, kept between samples; no other thread locks them.
    let states: Vec<_> = (0..threads).map(fill).collect();
    group.throughput(Throughput::Elements(threads as u64 * 64));
    group.bench_function(format!("{}/{threads}", C::NAME), |bencher| {
        bencher.iter_custom(|iterations| {
            let own = |thread: usize| states[thread].lock().expect("no bench thread panicked");
            together(threads, own, |_, state| {
                let (held, random) = &mut **state;
                for _ in 0..iterations * 64 {
                    subject.free(held.pop_front().expect("runs are held"));
                    let run = subject.allocate(random.u32(1..=512)).expect("half of the pool is free");
                    held.push_back(black_box(run));
                }
            })
        });
    });
    for state in states {
        let (held, _) = state.into_inner().expect("no bench thread panicked");
        held.into_iter().for_each(|run| subject.free(run));
    }
    assert_eq!(subject.free_blocks(), blocks, "{} lost blocks", C::NAME);
}

fn check_runs<C: Contiguous>(blocks: usize) {
    let subject = C::new(blocks);
    let owners = Owners::new(blocks + 1);
    together(
        2,
        |thread| fastrand::Rng::with_seed(thread as u64),
        |_, random| {
            let mut held: VecDeque<(u32, C::Run)> = VecDeque::new();
            for _ in 0..5_000 {
                if held.len() >= 128 {
                    let (len, run) = held.pop_front().expect("runs are held");
                    (C::start(&run)..).take(len as usize).for_each(|id| owners.give(id));
                    subject.free(run);
                }
                let len = random.u32(1..=512);
                let run = subject.allocate(len).expect("half of the pool is free");
                (C::start(&run)..).take(len as usize).for_each(|id| owners.take(id));
                held.push_back((len, run));
            }
            for (len, run) in held {
                (C::start(&run)..).take(len as usize).for_each(|id| owners.give(id));
                subject.free(run);
            }
        },
    );
    assert_eq!(subject.free_blocks(), blocks, "{} lost blocks", C::NAME);
}

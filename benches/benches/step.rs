//! Scheduler steps of continuous batching, and the parts of a sequence's life: kvpool compared with
//! an exact LRU behind a mutex, and without a prefix cache with a list of free blocks behind one.
//!
//! ```text
//! step    256 sequences decode, 8 end, 8 with 1,000 tokens begin; one thread and two: see
//!         `kvpool_benches::step`
//! close   sequences of 62, 600 and 6,000 blocks, full and computed
//! open    a sequence, ten blocks, close: 64 of them in a step
//! scale   the same steps shared by one thread, two, and more where there are cores
//! pair    one thread and several, each with work of its own: empty steps, the same sequences, and
//!         closing sequences of 62 cached blocks
//! ```
//!
//! An argument selects one of them. Blocks have 16 tokens. Subjects take turns, round by round;
//! each figure is the minimum and the median over the rounds, each the mean of its undisturbed
//! steps or calls, and in brackets stands the median of the rounds' ratios to kvpool: above 1, the
//! other takes longer. Threads that run at once are pinned to one core each.
//!
//! The same with kvbm-logical: `cargo bench --bench step` in `benches/peers`. Other parts:
//! admission and eviction in `reuse`, tables against `memcpy` in `tables`, bytes per block in
//! `memory`.

use std::hint::black_box;
use std::sync::Mutex;
use std::thread;

use kvpool_benches::report::mean;
use kvpool_benches::reuse::{
    BLOCK_TOKENS, Engine, Full, Kvpool, KvpoolUncached, Locked, LockedList, Turns, Worker, verify,
};
use kvpool_benches::step::{self, BLOCKS, STEP_LINES, Team, Threads};
use kvpool_benches::threads;
use kvpool_benches::undisturbed::{Calls, undisturbed};

const ROUNDS: usize = 31;

/// Compares steps of two engines.
fn step_of<A: Engine, B: Engine>(title: &str) {
    let turns = Turns::new([A::NAME, B::NAME]);
    turns.head(title);
    let (ours, other) = (Threads::<A>::new(), Threads::<B>::new());
    thread::scope(|scope| {
        let (ours, other) = (ours.start(scope), other.start(scope));
        turns.measure(ROUNDS, STEP_LINES, [&mut || ours.round(), &mut || other.round()]);
        ours.end();
        other.end();
    });
}

fn step() {
    step_of::<Kvpool, Locked>("step, prefix cache on, us");
    step_of::<KvpoolUncached, LockedList>("step, prefix cache off, us");
}

/// Compares steps of two engines by the number of threads that share them.
fn scale_of<A: Engine, B: Engine>(title: &str) {
    let turns = Turns::new([A::NAME, B::NAME]);
    turns.head(title);
    for count in threads::counts(step::CHANGES) {
        let (ours, other) = (Team::<A>::new(count), Team::<B>::new(count));
        thread::scope(|scope| {
            let (ours, other) = (ours.start(scope), other.start(scope));
            let line = format!("{count} threads: whole step, each its share");
            let round = |[whole, ..]: step::Times| [whole];
            turns.measure(ROUNDS, [&line], [&mut || round(ours.round()), &mut || round(other.round())]);
            ours.end();
            other.end();
        });
    }
}

fn scale() {
    scale_of::<Kvpool, Locked>("step by threads, prefix cache on, us");
    scale_of::<KvpoolUncached, LockedList>("step by threads, prefix cache off, us");
}

/// A pool in which sequences are opened and closed. With a cache it is full of evictable blocks.
struct Lives<E> {
    engine: E,
    prompt: Vec<u32>,
}

impl<E: Engine> Lives<E> {
    fn new() -> Self {
        Self { engine: Full::new(BLOCKS).engine, prompt: vec![7; 6_000 * BLOCK_TOKENS] }
    }

    /// Returns ns per block to close a sequence of full blocks, the mean of some.
    fn close(&mut self, blocks: usize) -> f64 {
        let mut worker = self.engine.worker(0);
        let prompt = &mut self.prompt[..blocks * BLOCK_TOKENS];
        loop {
            let mut timed = Calls::default();
            for _ in 0..(6_000 / blocks).min(50) {
                prompt[0] += 1;
                worker.begin();
                let mut request = worker.admit(prompt);
                worker.finish(&mut request);
                timed.run(|| worker.end(request));
            }
            if let Some(ns) = timed.mean_ns() {
                return ns / blocks as f64;
            }
        }
    }

    /// Returns ns to open a sequence, allocate ten blocks and close it.
    fn open(&mut self) -> f64 {
        const SEQUENCES: usize = 64;
        let mut worker = self.engine.worker(0);
        let prompt = &self.prompt[..10 * BLOCK_TOKENS];
        loop {
            let mut timed = Calls::default();
            for _ in 0..50 {
                worker.begin();
                timed.run(|| {
                    for _ in 0..SEQUENCES {
                        let request = black_box(worker.admit(black_box(prompt)));
                        worker.end(request);
                    }
                });
                worker.finish_all(std::iter::empty());
            }
            if let Some(ns) = timed.mean_ns() {
                return ns / SEQUENCES as f64;
            }
        }
    }
}

/// Work that two threads do at once, a call of it timed.
type Shared<E> = fn(&mut <E as Engine>::Worker<'_>, &mut [u32], &mut Calls<()>);

/// Begins and ends 64 steps.
fn steps<E: Engine>(worker: &mut E::Worker<'_>, _: &mut [u32], timed: &mut Calls<()>) {
    timed.run(|| {
        for _ in 0..64 {
            worker.begin();
            worker.finish_all(std::iter::empty());
        }
    });
}

/// Opens and closes 64 sequences of ten blocks in a step.
fn sequences<E: Engine>(worker: &mut E::Worker<'_>, prompt: &mut [u32], timed: &mut Calls<()>) {
    worker.begin();
    timed.run(|| {
        for _ in 0..64 {
            let request = black_box(worker.admit(black_box(&prompt[..10 * BLOCK_TOKENS])));
            worker.end(request);
        }
    });
    worker.finish_all(std::iter::empty());
}

/// Closes 64 sequences of 62 full blocks, which a step has computed.
fn closes<E: Engine>(worker: &mut E::Worker<'_>, prompt: &mut [u32], timed: &mut Calls<()>) {
    worker.begin();
    let mut requests: Vec<_> = (0..64)
        .map(|_| {
            prompt[0] += 1;
            worker.admit(&prompt[..62 * BLOCK_TOKENS])
        })
        .collect();
    worker.finish_all(requests.iter_mut());
    timed.run(|| requests.into_iter().for_each(|request| worker.end(request)));
}

/// Returns ns of one of the 64 on one thread and on each of several, and the throughput of these as
/// a multiple of that of one.
fn side_by_side<E: Engine>(engine: &E, work: Shared<E>, threads: usize) -> [f64; 3] {
    let [one, each] = [1, threads].map(|count| {
        loop {
            let all = Mutex::new(Vec::new());
            let prepare = |thread: usize| {
                let mut prompt = vec![7; 62 * BLOCK_TOKENS];
                prompt[0] = (1 + thread as u32) << 24;
                (engine.worker(thread), prompt, Calls::with_capacity(50))
            };
            threads::together(count, prepare, |_, (worker, prompt, timed)| {
                (0..50).for_each(|_| work(worker, prompt, timed));
                all.lock().expect("no bench thread panicked").push(std::mem::take(timed));
            });
            let times = undisturbed(all.into_inner().expect("no bench thread panicked"));
            if times.len() >= 16 {
                break mean(times.into_iter().map(|(ns, ())| ns)) / 64.0;
            }
        }
    });
    [one, each, threads as f64 * one / each]
}

fn pair_of<A: Engine, B: Engine>(title: &str) {
    let turns = Turns::new([A::NAME, B::NAME]);
    turns.head(title);
    let (ours, other) = (Full::<A>::new(BLOCKS).engine, Full::<B>::new(BLOCKS).engine);
    let parts: [(&str, Shared<A>, Shared<B>); 3] = [
        ("begin and end a step", steps::<A>, steps::<B>),
        ("open a sequence, ten blocks, close", sequences::<A>, sequences::<B>),
        ("close 62 computed blocks", closes::<A>, closes::<B>),
    ];
    for (name, our, others) in parts {
        for threads in threads::counts(16).split_off(1) {
            let lines = [
                &*format!("{name}, one thread"),
                &format!("    each of {threads} threads"),
                "    times the throughput of one",
            ];
            turns.measure(
                ROUNDS,
                lines,
                [&mut || side_by_side(&ours, our, threads), &mut || side_by_side(&other, others, threads)],
            );
        }
    }
    assert_eq!((ours.unowned(), other.unowned()), (BLOCKS, BLOCKS), "lost blocks");
}

fn pair() {
    pair_of::<Kvpool, Locked>("one thread and several, prefix cache on, ns");
    pair_of::<KvpoolUncached, LockedList>("one thread and several, prefix cache off, ns");
}

fn close_of<A: Engine, B: Engine>(title: &str) {
    let turns = Turns::new([A::NAME, B::NAME]);
    turns.head(title);
    let (mut ours, mut other) = (Lives::<A>::new(), Lives::<B>::new());
    for blocks in [62, 600, 6_000] {
        let line = format!("{blocks} blocks");
        turns.measure(ROUNDS, [&line], [&mut || [ours.close(blocks)], &mut || [other.close(blocks)]]);
    }
    assert_eq!((ours.engine.unowned(), other.engine.unowned()), (BLOCKS, BLOCKS), "lost blocks");
}

fn close() {
    close_of::<Kvpool, Locked>("close, prefix cache on, evictable then, ns/block");
    close_of::<KvpoolUncached, LockedList>("close, prefix cache off, ns/block");
}

fn open() {
    let turns = Turns::new([KvpoolUncached::NAME, LockedList::NAME]);
    turns.head("prefix cache off, ns/sequence");
    let (mut ours, mut other) = (Lives::<KvpoolUncached>::new(), Lives::<LockedList>::new());
    turns.measure(
        ROUNDS,
        ["open a sequence, ten blocks, close"],
        [&mut || [ours.open()], &mut || [other.open()]],
    );
    assert_eq!((ours.engine.unowned(), other.engine.unowned()), (BLOCKS, BLOCKS), "lost blocks");
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("step: to measure, run `cargo bench -p kvpool-benches --bench step`");
        return;
    }
    println!("{}", threads::pinning());
    verify::<Kvpool>();
    verify::<Locked>();
    let parts: [(&str, fn()); 5] =
        [("step", step), ("close", close), ("open", open), ("scale", scale), ("pair", pair)];
    let is_chosen = |name| std::env::args().any(|argument| argument == name);
    let any_is_chosen = parts.iter().any(|(name, _)| is_chosen(*name));
    for (name, part) in parts {
        if is_chosen(name) || !any_is_chosen {
            part();
        }
    }
}

//! Scheduler steps of continuous batching, and the parts of a sequence's life: kvpool compared with
//! an exact LRU and with a radix tree, each behind a mutex, and without a prefix cache with a list
//! of free blocks behind one.
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

use std::array;
use std::hint::black_box;
use std::sync::Mutex;
use std::thread;

use kvpool_benches::report::mean;
use kvpool_benches::reuse::{
    BLOCK_TOKENS, Engine, Full, Kvpool, KvpoolUncached, Locked, LockedList, Radix, Turns, Worker, verify,
    verify_hits,
};
use kvpool_benches::step::{self, BLOCKS, STEP_LINES, Stepping, Team, Threads};
use kvpool_benches::threads;
use kvpool_benches::undisturbed::{Calls, undisturbed};

const ROUNDS: usize = 31;

const CACHED: Turns<3> = Turns::new([Kvpool::NAME, Locked::NAME, Radix::NAME]);
const UNCACHED: Turns<2> = Turns::new([KvpoolUncached::NAME, LockedList::NAME]);

/// Compares steps of engines: the first figures of each, one for each line.
fn compare_steps<const SUBJECTS: usize, const LINES: usize, const FIGURES: usize>(
    turns: &Turns<SUBJECTS>,
    lines: [&str; LINES],
    engines: [&dyn Stepping<FIGURES>; SUBJECTS],
) {
    thread::scope(|scope| {
        let started = engines.map(|engines| engines.start(scope));
        let mut rounds = started.each_ref().map(|engines| {
            || {
                let figures = engines.round();
                array::from_fn(|line| figures[line])
            }
        });
        turns.measure(ROUNDS, lines, rounds.each_mut().map(|round| round as &mut dyn FnMut() -> _));
        started.into_iter().for_each(|engines| engines.end());
    });
}

fn step() {
    CACHED.head("step, prefix cache on, us");
    let (ours, lru, tree) = (Threads::<Kvpool>::new(), Threads::<Locked>::new(), Threads::<Radix>::new());
    compare_steps(&CACHED, STEP_LINES, [&ours, &lru, &tree]);
    UNCACHED.head("step, prefix cache off, us");
    compare_steps(&UNCACHED, STEP_LINES, [&Threads::<KvpoolUncached>::new(), &Threads::<LockedList>::new()]);
}

fn scale() {
    let counts = threads::counts(step::CHANGES);
    let line = |count| format!("{count} threads: whole step, each its share");
    CACHED.head("step by threads, prefix cache on, us");
    for &count in &counts {
        let (ours, lru) = (Team::<Kvpool>::new(count), Team::<Locked>::new(count));
        compare_steps(&CACHED, [&line(count)], [&ours, &lru, &Team::<Radix>::new(count)]);
    }
    UNCACHED.head("step by threads, prefix cache off, us");
    for &count in &counts {
        let (ours, list) = (Team::<KvpoolUncached>::new(count), Team::<LockedList>::new(count));
        compare_steps(&UNCACHED, [&line(count)], [&ours, &list]);
    }
}

/// A pool in which sequences are opened and closed. With a cache it is full of evictable blocks.
struct Lives<E> {
    engine: E,
    prompt: Vec<u32>,
}

/// The same, whatever the type of the engine.
trait Life {
    /// Returns ns per block to close a sequence of full blocks, the mean of some.
    fn close(&mut self, blocks: usize) -> f64;

    /// Returns ns to open a sequence, allocate ten blocks and close it.
    fn open(&mut self) -> f64;

    /// Returns ns of one of the 64 on one thread and on each of several, and the throughput of
    /// these as a multiple of that of one.
    fn side_by_side(&self, work: Work, threads: usize) -> [f64; 3];

    /// Checks that no block is lost.
    fn check(&self);
}

/// Work that threads do at once.
#[derive(Clone, Copy)]
enum Work {
    Steps,
    Sequences,
    Closes,
}

fn life<E: Engine + 'static>() -> Box<dyn Life> {
    Box::new(Lives::<E> { engine: Full::new(BLOCKS).engine, prompt: vec![7; 6_000 * BLOCK_TOKENS] })
}

fn cached() -> [Box<dyn Life>; 3] {
    [life::<Kvpool>(), life::<Locked>(), life::<Radix>()]
}

fn uncached() -> [Box<dyn Life>; 2] {
    [life::<KvpoolUncached>(), life::<LockedList>()]
}

/// Compares figures of engines.
fn compare<const SUBJECTS: usize, const LINES: usize>(
    turns: &Turns<SUBJECTS>,
    lines: [&str; LINES],
    lives: &mut [Box<dyn Life>; SUBJECTS],
    figures: impl Fn(&mut dyn Life) -> [f64; LINES],
) {
    let mut rounds = lives.each_mut().map(|life| || figures(life.as_mut()));
    turns.measure(ROUNDS, lines, rounds.each_mut().map(|round| round as &mut dyn FnMut() -> _));
}

impl<E: Engine> Life for Lives<E> {
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

    fn side_by_side(&self, work: Work, threads: usize) -> [f64; 3] {
        let work: Shared<E> = match work {
            Work::Steps => steps::<E>,
            Work::Sequences => sequences::<E>,
            Work::Closes => closes::<E>,
        };
        side_by_side(&self.engine, work, threads)
    }

    fn check(&self) {
        assert_eq!(self.engine.unowned(), BLOCKS, "{} lost blocks", E::NAME);
    }
}

/// A thread's part of [`Work`], a call of it timed.
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

fn pair_of<const SUBJECTS: usize>(
    turns: &Turns<SUBJECTS>,
    title: &str,
    mut lives: [Box<dyn Life>; SUBJECTS],
) {
    turns.head(title);
    let parts = [
        ("begin and end a step", Work::Steps),
        ("open a sequence, ten blocks, close", Work::Sequences),
        ("close 62 computed blocks", Work::Closes),
    ];
    for (name, work) in parts {
        for threads in threads::counts(16).split_off(1) {
            let lines = [
                &*format!("{name}, one thread"),
                &format!("    each of {threads} threads"),
                "    times the throughput of one",
            ];
            compare(turns, lines, &mut lives, |life| life.side_by_side(work, threads));
        }
    }
    lives.iter().for_each(|life| life.check());
}

fn pair() {
    pair_of(&CACHED, "one thread and several, prefix cache on, ns", cached());
    pair_of(&UNCACHED, "one thread and several, prefix cache off, ns", uncached());
}

fn close_of<const SUBJECTS: usize>(
    turns: &Turns<SUBJECTS>,
    title: &str,
    mut lives: [Box<dyn Life>; SUBJECTS],
) {
    turns.head(title);
    for blocks in [62, 600, 6_000] {
        compare(turns, [&format!("{blocks} blocks")], &mut lives, |life| [life.close(blocks)]);
    }
    lives.iter().for_each(|life| life.check());
}

fn close() {
    close_of(&CACHED, "close, prefix cache on, evictable then, ns/block", cached());
    close_of(&UNCACHED, "close, prefix cache off, ns/block", uncached());
}

fn open() {
    UNCACHED.head("prefix cache off, ns/sequence");
    let mut lives = uncached();
    compare(&UNCACHED, ["open a sequence, ten blocks, close"], &mut lives, |life| [life.open()]);
    lives.iter().for_each(|life| life.check());
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("step: to measure, run `cargo bench -p kvpool-benches --bench step`");
        return;
    }
    println!("{}", threads::pinning());
    verify::<Kvpool>();
    verify::<Locked>();
    verify::<Radix>();
    verify_hits::<Kvpool, Locked>();
    verify_hits::<Locked, Radix>();
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

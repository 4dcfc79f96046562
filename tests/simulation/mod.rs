//! Simulation: long random schedules of everything that a pool does, in one thread, decided by a
//! seed.
//!
//! Loom explores all executions of a few steps. Here a schedule has some hundreds of steps, and
//! there are thousands of them: sequences, batches that overlap and end out of order, leases,
//! waiting allocations, compaction, waves by hand and resizes, interleaved at every point at which
//! one of them yields: at awaits, in the middle of a copy, and between enqueueing on the device and
//! execution there.
//!
//! | part | contents |
//! |---|---|
//! | [`world`] | the pool, the engine's state, and the steps |
//! | [`device`] | the engine's memory: a stream that lags behind, and a copy engine beside it |
//! | [`sequences`], [`prefix`], [`hinted`], [`leased`], [`waiting`] | steps, by subject |
//! | [`tasks`] | futures, polled by hand after they are woken |
//!
//! # What is checked
//!
//! - Each read of a token returns the value that was written, through tables and slots that were
//!   built under the batch, and through older tables patched by `Batch::moved_since`; until that
//!   batch ends.
//! - No frame is written that a batch in flight reads, that is being copied from or to, or that was
//!   removed.
//! - `audit` reports exactly the owned blocks and references that the engine holds.
//! - Waiting requests are served in order; while none is woken, too little is free for the first in
//!   line.
//! - A look-up returns the longest prefix that is cached according to the words, with the right
//!   tokens.
//! - A pinned block stays in its frame; an error's reason is true.
//! - Hints pin no more blocks than their budget.
//! - In the end every task ends, and all blocks are free.
//!
//! # Running it
//!
//! ```text
//! cargo test --release --test all simulation::                            `SCHEDULES` schedules, from a random seed on
//! KVPOOL_SIM_SEED=17 cargo test --release --test all simulation::         one schedule, step by step
//! KVPOOL_SIM_SCHEDULES=1000000 cargo test --release --test all simulation::
//! KVPOOL_SIM_FIRST=17 cargo test --release --test all simulation::        schedules from this seed on
//! ```
//!
//! Every 32nd seed has a pool of 1,024 blocks or more, which evicts ahead of need and reserves
//! units for the growth of sequences.
//!
//! The seed alone determines the schedule: `a_seed_is_a_schedule` checks that.
#![cfg(not(any(kvpool_loom, miri)))]

mod device;
mod hinted;
mod leased;
mod prefix;
mod sequences;
mod tasks;
mod waiting;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::*};
use std::thread;
use std::time::Instant;

use world::{LARGE_EVERY, Tally, World};

/// Number of schedules in one test run.
const SCHEDULES: u64 = if cfg!(debug_assertions) { 500 } else { 10_000 };

/// Number of schedules of large pools in one test run, besides those among the others.
const LARGE: u64 = if cfg!(debug_assertions) { 20 } else { 100 };

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// Runs one schedule, and returns the counts of its events.
fn schedule(seed: u64, is_told: bool) -> Tally {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = Rc::new(runtime.expect("a runtime without threads"));
    let _entered = runtime.enter();
    let mut world = World::new(seed, runtime.clone(), is_told);
    world.run();
    world.end()
}

#[test]
fn schedules_at_random() {
    if let Some(seed) = number("KVPOOL_SIM_SEED") {
        println!("{:?}", schedule(seed, true));
        return;
    }
    let schedules = number("KVPOOL_SIM_SCHEDULES").unwrap_or(SCHEDULES);
    let first = number("KVPOOL_SIM_FIRST").unwrap_or_else(|| fastrand::u64(..u64::from(u32::MAX)));
    let (next, failed, total) = (AtomicU64::new(0), Mutex::new(Vec::new()), Mutex::new(Tally::default()));
    let begun = Instant::now();
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |threads| threads.get()) {
            scope.spawn(|| {
                while failed.lock().unwrap().is_empty() {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= schedules {
                        return;
                    }
                    let seed = first + number;
                    match catch_unwind(AssertUnwindSafe(|| schedule(seed, false))) {
                        Ok(tally) => total.lock().unwrap().add(&tally),
                        Err(_) => {
                            eprintln!("KVPOOL_SIM_SEED={seed} fails");
                            failed.lock().unwrap().push(seed);
                        }
                    }
                }
            });
        }
    });
    let (failed, total) = (failed.into_inner().unwrap(), total.into_inner().unwrap());
    println!("{schedules} schedules from {first} on in {:.1?}: {total:?}", begun.elapsed());
    assert!(failed.is_empty(), "schedules failed; repeat with KVPOOL_SIM_SEED={}", failed[0]);
    if schedules >= 500 {
        total.is_complete();
    }
}

/// Large pools evict ahead of need, and spare units for the growth of sequences: schedules of small
/// pools reach neither.
#[test]
fn large_pools_reclaim_and_spare() {
    let mut total = Tally::default();
    let begun = Instant::now();
    (0..LARGE).for_each(|number| total.add(&schedule(number * LARGE_EVERY, false)));
    println!("{LARGE} schedules of large pools in {:.1?}: {total:?}", begun.elapsed());
    assert!(total.reclaimed > 0 && total.reserved_for_growth > 0, "{total:?}");
}

/// The same seed gives the same schedule, whatever ran on the thread before.
#[test]
fn a_seed_is_a_schedule() {
    let seeds = || [3, 1, 4, 15, 92, 65, 32].into_iter();
    let first: Vec<u64> = seeds().map(|seed| schedule(seed, false).trace).collect();
    let again: Vec<u64> = seeds().map(|seed| schedule(seed, false).trace).collect();
    assert_eq!(first, again, "on the same thread");
    let elsewhere = thread::spawn(move || {
        let mut traces: Vec<u64> = seeds().rev().map(|seed| schedule(seed, false).trace).collect();
        traces.reverse();
        traces
    });
    assert_eq!(first, elsewhere.join().unwrap(), "on another, in another order");
}

//! Long schedules, at random: everything that a pool can do, in one thread that decides by a seed who goes next.
//!
//! Loom looks at all executions of a few steps. Here a schedule has some hundreds of steps, and there are thousands of
//! them: sequences, batches that overlap and end out of order, raw handles, allocations that wait, compaction, waves by
//! hand and another size, interleaved at every point at which one of them lets go: at the awaits, in mid-copy, and
//! between what is enqueued on the device and what has run there.
//!
//! | part | |
//! |---|---|
//! | [`world`] | the pool, what the engine has of it, and the steps |
//! | [`device`] | the engine's memory: a stream that lags behind, and a copy engine beside it |
//! | [`sequences`], [`prefix`], [`raw`], [`waiting`] | steps, by what they are about |
//! | [`tasks`] | futures, polled by hand when they were woken |
//!
//! # What is checked
//!
//! - Every token read is the one that was written, through tables and slots that were built under the batch, and through
//!   older tables patched by `Batch::moved_since`; and it stays so until that batch ends.
//! - Nobody writes a frame that a batch in flight reads, or that is being copied from or to, or that is gone.
//! - Owned blocks and references are those that the engine holds, by `audit`.
//! - Who waits is served in order; when nobody was woken, what is free is not enough for the first in line.
//! - A look-up gives the longest prefix that is cached by the words, and its tokens are those that it was asked for.
//! - A pinned block stays; an error says why, and is true.
//! - In the end every task ends, and everything is free.
//!
//! # Running it
//!
//! ```text
//! cargo test --release --test simulation                            as many schedules as `SCHEDULES`, from a random seed on
//! KVPOOL_SIM_SEED=17 cargo test --release --test simulation         one schedule, step by step
//! KVPOOL_SIM_SCHEDULES=1000000 cargo test --release --test simulation
//! ```
//!
//! Nothing but the seed decides: `a_seed_is_a_schedule` checks it.
#![cfg(not(any(kvpool_loom, miri)))]

mod device;
mod prefix;
mod raw;
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

use world::{Tally, World};

/// Schedules of one test run.
const SCHEDULES: u64 = if cfg!(debug_assertions) { 500 } else { 10_000 };

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// One schedule; what came about in it.
fn schedule(seed: u64, is_told: bool) -> Tally {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = Rc::new(runtime.expect("a runtime of no threads"));
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
    let first = fastrand::u64(..u64::from(u32::MAX));
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
    assert!(failed.is_empty(), "schedules failed; again: KVPOOL_SIM_SEED={}", failed[0]);
    if schedules >= 500 {
        total.is_complete();
    }
}

/// The same seed gives the same schedule, whatever ran on the thread before.
#[test]
fn a_seed_is_a_schedule() {
    let seeds = || [3, 1, 4, 15, 92, 65, 35].into_iter();
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

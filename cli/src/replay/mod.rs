//! A trace, replayed: many scheduler threads over one pool, as fast as they can, with every byte checked.
//!
//! | file | what |
//! |---|---|
//! | `lane` | who waits, runs and gives way: continuous batching as pure bookkeeping |
//! | `floor` | what the threads share: the line of arrivals, their clocks, the rule that keeps all of them going |
//! | `content`, `transfer` | the bytes of a token, on their way to storage and back |
//! | `engine` | one scheduler thread |
//! | `memory`, `pooled` | what it asks of a pool, and the pool |
//! | `sizing` | how many blocks make a trace interesting |
//! | `tally` | what is counted |
//!
//! What must hold when a replay ends, and is reported: every request is completed or rejected, every block that was
//! allocated has been freed, the pool has as many free blocks as it had and gives all of them out in one request, its
//! audit agrees, and no token was ever read
//! other than it was written.

mod content;
mod engine;
mod floor;
mod lane;
#[cfg(test)]
pub(crate) mod ledger;
mod memory;
mod pooled;
mod sizing;
mod tally;
#[cfg(test)]
mod tests;
mod transfer;

use std::any::Any;
use std::thread;
use std::time::{Duration, Instant};

pub use content::Shape;
pub use floor::StepCost;
pub use memory::{FreeSpace, Memory, Refusal};
pub use pooled::PoolMemory;
pub use sizing::blocks_for;
pub use tally::{Samples, Tally};
pub use transfer::Corrupt;

use crate::trace::Trace;
use engine::Engine;
use floor::Floor;

/// Moments of virtual time at which the pool is looked at.
const SAMPLES: u32 = 2000;

/// How often whoever watches is told.
const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// How to replay.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Scheduler threads, at least one.
    pub threads: usize,
    /// Whether tokens are read back.
    pub verify: bool,
    /// Tokens of prompts that a step takes in at most.
    pub step_tokens: u64,
    /// What a step costs in virtual time.
    pub step_cost: StepCost,
    /// Virtual time between two looks at the pool.
    pub sample_ns: u64,
}

impl Options {
    /// The usual ones for a trace.
    pub fn new(trace: &Trace, threads: usize) -> Self {
        Self {
            threads: threads.max(1),
            verify: true,
            step_tokens: 8192,
            step_cost: StepCost::DEFAULT,
            sample_ns: (trace.span() / SAMPLES).as_nanos() as u64,
        }
    }
}

/// How far a replay is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Requests completed or rejected.
    pub settled: u64,
    /// Tokens appended.
    pub tokens: u64,
    /// Blocks free.
    pub blocks_free: usize,
}

/// What a replay came to.
#[derive(Debug)]
pub struct Outcome {
    /// What the threads counted.
    pub tally: Tally,
    /// How long it took.
    pub wall: Duration,
    /// How full the pool was when it refused blocks for the first time: the share that was not free, and the share
    /// that belonged to sequences (and not to steps in flight).
    pub first_refusal: Option<(f64, f64)>,
    /// Free blocks that are missing at the end.
    pub blocks_leaked: usize,
    /// Fragmentation at the end.
    pub fragmentation_final: f64,
    /// What the pool's own recount says.
    pub audit: Result<(), String>,
}

impl Outcome {
    /// Whether nothing was lost and nothing corrupt.
    pub fn is_sound(&self, requests: usize) -> bool {
        let tally = &self.tally;
        tally.completed + tally.rejected == requests as u64
            && tally.corrupt.is_empty()
            && tally.findings.is_empty()
            && tally.blocks_allocated == tally.blocks_freed
            && self.blocks_leaked == 0
            && self.audit.is_ok()
    }
}

/// Replays a trace. Every [tenth of a second](Progress) `watch` is told how far it is, on the calling thread.
///
/// A thread that panics ends the replay for all, and is a finding.
pub fn replay<M: Memory>(
    memory: &M,
    shape: Shape,
    trace: &Trace,
    options: &Options,
    mut watch: impl FnMut(Progress),
) -> Outcome {
    let floor = Floor::new(&trace.requests, options.threads);
    let free_before = memory.free_blocks();
    let start = Instant::now();
    let mut tally = thread::scope(|scope| {
        let mut sum = Tally::default();
        let mut threads = Vec::with_capacity(options.threads);
        for index in 0..options.threads {
            let floor = &floor;
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                let _stop = StopOnPanic(floor);
                Engine::new(memory, floor, options, shape, index).run()
            });
            match spawned {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    sum.find(format!(
                        "scheduler thread {index} of {} did not start: {error}",
                        options.threads
                    ));
                    floor.stop();
                    break;
                }
            }
        }
        while !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
            let blocks_free = memory.free_blocks();
            watch(Progress { settled: floor.settled(), tokens: floor.tokens(), blocks_free });
            wait_for(&threads);
        }
        for thread in threads {
            match thread.join() {
                Ok(tally) => sum.merge(tally),
                Err(panic) => sum.find(format!("a scheduler thread panicked: {}", panic_text(&*panic))),
            }
        }
        sum
    });
    let wall = start.elapsed();
    let free = memory.free_space();
    if let Err(reason) = memory.take_all() {
        tally.find(format!("not every block is to be had at the end: {reason}"));
    }
    Outcome {
        tally,
        wall,
        first_refusal: floor.first_refusal(),
        blocks_leaked: free_before.saturating_sub(free.blocks),
        fragmentation_final: free.fragmentation,
        audit: memory.audit(),
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("for no reason given")
}

/// Waits until all have finished, and no longer than until the next look.
fn wait_for<T>(threads: &[thread::ScopedJoinHandle<'_, T>]) {
    let until = Instant::now() + WATCH_INTERVAL;
    while Instant::now() < until && !threads.iter().all(thread::ScopedJoinHandle::is_finished) {
        thread::sleep(Duration::from_millis(2));
    }
}

/// A thread that panics must not leave the others waiting for its blocks.
struct StopOnPanic<'a>(&'a Floor<'a>);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
    }
}

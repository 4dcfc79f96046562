//! A trace, replayed: many scheduler threads over one pool, as fast as they can, with every byte checked.
//!
//! | file | what |
//! |---|---|
//! | `lane` | who waits, runs and gives way: continuous batching as pure bookkeeping |
//! | `floor` | what the threads share: the line of arrivals, their clocks, the rule that keeps all of them going |
//! | `text` | what tokens are: which prompts begin alike |
//! | `content`, `transfer` | the bytes of a token, on their way to storage and back |
//! | `engine` | one scheduler thread |
//! | `memory`, `pooled` | what it asks of a pool, and the pool |
//! | `resizer` | the thread that gives the pool other sizes meanwhile |
//! | `sizing` | how many blocks make a trace interesting |
//! | `tally` | what is counted |
//!
//! Meanwhile the pool is compacted in the background and may be given other sizes; no thread is told of either.
//!
//! What must hold when a replay ends, and is reported: every request is completed or rejected, every block that was
//! allocated has been freed, the pool has as many free blocks as it had once it has forgotten its prefixes and gives all of
//! them out in one request, its audit agrees, and no token was ever read other than it was written, by whichever request.

mod content;
mod engine;
mod floor;
mod lane;
#[cfg(test)]
pub(crate) mod ledger;
mod memory;
mod pooled;
mod resizer;
mod sizing;
mod tally;
#[cfg(test)]
mod tests;
mod text;
mod transfer;

use std::any::Any;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

pub use content::Shape;
pub use floor::StepCost;
pub use memory::{Compaction, CompactionTotals, FreeSpace, Memory, PrefixTotals, Refusal, ResizeRefusal};
pub use pooled::PoolMemory;
pub use resizer::{Resize, ResizeOutcome};
pub use sizing::blocks_for;
pub use tally::{Samples, Tally};
pub use text::{Text, Texts};
pub use transfer::Corrupt;

use crate::schedule::{Schedule, Share};
use crate::trace::Trace;
use engine::Engine;
use floor::Floor;
use resizer::Resizer;

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
    /// Compaction in the background.
    pub compaction: Option<Compaction>,
    /// Sizes that the pool is to have.
    pub schedule: Schedule,
    /// When to halt, look, and be done.
    pub halt_at: Option<Share>,
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
            compaction: None,
            schedule: Schedule::default(),
            halt_at: None,
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
    /// Blocks that the pool has.
    pub blocks_total: usize,
    /// Whether all threads have halted, with no batch in flight: they go on when this has been seen.
    pub is_halted: bool,
}

/// What a replay came to.
#[derive(Debug)]
pub struct Outcome {
    /// What the threads counted.
    pub tally: Tally,
    /// Whether it was interrupted before every request was completed or rejected.
    pub interrupted: bool,
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
    /// What the prefix cache found; `None` without one.
    pub prefix: Option<PrefixTotals>,
    /// What compaction did; `None` if there was none.
    pub compaction: Option<CompactionTotals>,
    /// What became of each step of the schedule that was due.
    pub resizes: Vec<Resize>,
}

impl Outcome {
    /// Whether at least one request was completed, all of them were completed or rejected (unless
    /// the replay was [interrupted](Self::interrupted)), nothing was lost and nothing corrupt.
    pub fn is_sound(&self, requests: usize) -> bool {
        let settled = self.tally.completed + self.tally.rejected;
        self.tally.completed > 0 && (self.interrupted || settled == requests as u64) && self.is_intact()
    }

    /// The same of a replay that was not to be finished.
    pub fn is_intact(&self) -> bool {
        let tally = &self.tally;
        tally.corrupt.is_empty()
            && tally.findings.is_empty()
            && tally.blocks_allocated == tally.blocks_freed
            && self.blocks_leaked == 0
            && self.audit.is_ok()
    }
}

/// Replays a trace. Every [tenth of a second](Progress) `watch` is told how far it is, on the
/// calling thread; and once, if so asked, when all have halted: then nothing changes until it
/// returns, and after that the replay is over. If `watch` breaks, the threads halt at once, read
/// back all that they hold, and the replay is over.
///
/// A thread that panics ends the replay for all, and is a finding.
pub fn replay<M: Memory>(
    memory: &M,
    shape: Shape,
    trace: &Trace,
    options: &Options,
    mut watch: impl FnMut(Progress) -> ControlFlow<()>,
) -> Outcome {
    let (requests, blocks) = (trace.requests.len(), memory.blocks());
    let floor = Floor::new(&trace.requests, options.threads, options.halt_at.map(|at| at.of(requests)));
    let texts = memory.prefix().map(|_| Texts::of(&trace.requests));
    let start = Instant::now();
    let started =
        options.compaction.as_ref().map_or(Ok(()), |compaction| memory.start_compaction(compaction));
    let mut interrupted = false;
    let (mut tally, resizes) = thread::scope(|scope| {
        let mut sum = Tally::default();
        let resizer = Resizer::new(memory, &floor, &options.schedule, requests).spawn(scope);
        let mut threads = Vec::with_capacity(options.threads);
        for index in 0..options.threads {
            let (floor, texts) = (&floor, texts.as_ref());
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                let _leave = Leave(floor);
                Engine::new(memory, floor, options, shape, texts, index).run()
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
        loop {
            let is_halted = floor.is_quiet() && !floor.is_stopped();
            let flow = watch(Progress {
                settled: floor.settled(),
                tokens: floor.tokens(),
                blocks_free: memory.free_blocks(),
                blocks_total: memory.blocks(),
                is_halted,
            });
            if flow.is_break() && !interrupted {
                interrupted = true;
                floor.halt_now();
            }
            if is_halted {
                floor.stop();
                floor.release();
            } else if threads.iter().all(thread::ScopedJoinHandle::is_finished) {
                break;
            }
            wait_for(&threads, &floor);
        }
        for thread in threads {
            match thread.join() {
                Ok(tally) => sum.merge(tally),
                Err(panic) => sum.find(format!("a scheduler thread panicked: {}", panic_text(&*panic))),
            }
        }
        floor.stop();
        let resizes = resizer.map(|resizer| resizer.join()).transpose().unwrap_or_else(|panic| {
            sum.find(format!("the thread that resizes panicked: {}", panic_text(&*panic)));
            None
        });
        (sum, resizes.unwrap_or_default())
    });
    let compaction = memory.stop_compaction();
    let wall = start.elapsed();
    if let Err(reason) = started {
        tally.find(format!("compaction did not start: {reason}"));
    }
    for (what, error) in failures(compaction.as_ref(), &resizes) {
        tally.find(format!("{what}: {error}"));
    }
    let prefix = memory.prefix();
    if let Some(difference) = prefix.as_ref().and_then(|prefix| difference(&tally, prefix)) {
        tally.find(difference);
    }
    interrupted &= tally.completed + tally.rejected < requests as u64;
    if let Some(nothing) = nothing(&tally, shape, trace, options, (blocks, interrupted)) {
        tally.find(nothing);
    }
    memory.forget_prefixes();
    let free = memory.free_space();
    if let Err(reason) = memory.take_all() {
        tally.find(format!("not every block is to be had at the end: {reason}"));
    }
    Outcome {
        tally,
        interrupted,
        wall,
        first_refusal: floor.first_refusal(),
        blocks_leaked: memory.blocks().saturating_sub(free.blocks),
        fragmentation_final: free.fragmentation,
        audit: memory.audit(),
        prefix,
        compaction,
        resizes,
    }
}

/// Where the cache counted otherwise than the threads did, if anywhere.
fn difference(tally: &Tally, prefix: &PrefixTotals) -> Option<String> {
    let counted =
        (tally.lookup_blocks + tally.resumed_lookup_blocks, tally.hit_blocks + tally.resumed_hit_blocks);
    let said = (prefix.lookup_blocks, prefix.hit_blocks);
    (counted != said).then(|| {
        format!(
            "the cache says that it looked up {} blocks and found {}, and it was {} and {}",
            said.0, said.1, counted.0, counted.1
        )
    })
}

/// Says why nothing was replayed or verified, if nothing was: such a replay has not shown that
/// anything holds.
fn nothing(
    tally: &Tally,
    shape: Shape,
    trace: &Trace,
    options: &Options,
    (blocks, interrupted): (usize, bool),
) -> Option<String> {
    if interrupted {
        return None;
    }
    if tally.tokens == 0 && tally.rejected > 0 {
        let smallest = trace.requests.iter().map(|request| shape.blocks(request.tokens())).min().unwrap_or(0);
        return Some(format!(
            "nothing was replayed: every request was rejected ({}), the smallest needs {smallest} blocks and the pool had {blocks}",
            tally.rejected
        ));
    }
    // Other findings say by themselves why no request was completed.
    let is_whole = options.halt_at.is_none() && tally.findings.is_empty();
    if is_whole && tally.completed == 0 {
        return Some("nothing was replayed: no request was completed".to_owned());
    }
    let is_unverified = options.verify && tally.tokens_verified == 0;
    is_unverified.then(|| "nothing was verified: no token was read back".to_owned())
}

/// What failed beside the scheduler threads, and how.
fn failures<'a>(
    compaction: Option<&'a CompactionTotals>,
    resizes: &'a [Resize],
) -> impl Iterator<Item = (&'static str, &'a str)> {
    let errors = compaction.into_iter().flat_map(|totals| &totals.errors);
    let resizes = resizes.iter().filter_map(|resize| match &resize.outcome {
        ResizeOutcome::Failed(reason) => Some(("a resize failed", reason.as_str())),
        ResizeOutcome::Done | ResizeOutcome::Blocked(_) => None,
    });
    errors.map(|error| ("compaction", error.as_str())).chain(resizes)
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("for no reason given")
}

/// Waits until all have finished or halted, and no longer than until the next look.
fn wait_for<T>(threads: &[thread::ScopedJoinHandle<'_, T>], floor: &Floor<'_>) {
    let until = Instant::now() + WATCH_INTERVAL;
    let wait = || !floor.is_quiet() && !threads.iter().all(thread::ScopedJoinHandle::is_finished);
    while Instant::now() < until && wait() {
        thread::sleep(Duration::from_millis(2));
    }
}

/// A thread that ends is not waited for. One that panics must not leave the others waiting for its blocks either.
struct Leave<'a>(&'a Floor<'a>);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
        self.0.leave();
    }
}

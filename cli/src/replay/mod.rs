//! Replays a trace: many scheduler threads over one pool, as fast as possible, with every byte
//! checked. Meanwhile the pool is compacted in the background and may be resized.
//!
//! At the end of a replay it must hold, and is reported, that every request is completed or
//! rejected; every allocated block was freed; the pool has as many free blocks as at the start once
//! its prefix cache is cleared, and allocates all of them in one request; its audit agrees; and
//! every token was read as it was written, by any request.

mod costs;
mod cpu;
mod free_list;
mod layers;
mod pool;
mod resizer;
mod scheduler;
mod sequence;
mod sessions;
mod shared_clock;
mod sizing;
mod tally;
#[cfg(test)]
pub(crate) mod tests;
mod usage;
mod worker;

use std::any::Any;
use std::ops::ControlFlow;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use indicatif::HumanCount;
use kvpool::compact::DefragTotals;
use kvpool::prefix::PrefixStats;
use kvpool_load::Texts;

pub use costs::Costs;
pub use layers::{Group, Layers, Lists, probe};
pub use pool::{Compaction, Eviction, ReplayPool};
pub use resizer::{Resize, ResizeRefusal};
pub use sessions::Ended;
pub use shared_clock::Refusal;
pub use sizing::{blocks_for, blocks_for_sessions};
pub use tally::{Distribution, GroupUse, Samples, TableRuns, Tally};

use crate::schedule::{Schedule, Share};
use crate::trace::Trace;
use free_list::SharedList;
use sessions::Sessions;
use shared_clock::SharedClock;
use usage::Usage;
use worker::Worker;

/// Most tokens of prompts in a step of a thread, unless set.
pub const STEP_TOKENS: u64 = 8192;

/// Samples of the pool over the span of a trace.
const SAMPLES: u32 = 2000;

const WATCH_INTERVAL: Duration = Duration::from_millis(100);

/// Options of a replay.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// Scheduler threads, at least one.
    pub threads: usize,
    /// Whether tokens are read back.
    pub verify: bool,
    /// Most tokens of prompts in a step of a thread.
    pub step_tokens: u64,
    /// Virtual time between two samples of the pool.
    pub sample_ns: u64,
    /// Background compaction.
    pub compaction: Option<Compaction>,
    /// Scheduled sizes of the pool.
    pub schedule: Schedule,
    /// The share of the requests at which all threads halt and the replay ends.
    pub halt_at: Option<Share>,
    /// Whether a free list serves the same requests, for comparison.
    pub free_list: bool,
    /// Sessions in a closed loop; without it, requests arrive as recorded.
    pub sessions: Option<SessionOptions>,
    /// The blocks of open sequences below which the next request begins, regardless of its arrival;
    /// without it, requests begin when they arrive.
    pub fill: Option<usize>,
}

/// Options of a replay of sessions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionOptions {
    /// Sessions at a time, at least one.
    pub at_once: usize,
    /// The cost model.
    pub costs: Costs,
    /// Whether the eviction policy is told when each session will return.
    pub tells_returns: bool,
}

impl Options {
    /// Returns the default options for a trace.
    pub fn new(trace: &Trace, threads: usize) -> Self {
        Self {
            threads: threads.max(1),
            verify: true,
            step_tokens: STEP_TOKENS,
            sample_ns: (trace.span() / SAMPLES).as_nanos() as u64,
            compaction: None,
            schedule: Schedule::default(),
            halt_at: None,
            free_list: false,
            sessions: None,
            fill: None,
        }
    }

    /// Replays sessions in a closed loop.
    #[must_use]
    pub fn with_sessions(self, trace: &Trace, sessions: SessionOptions) -> Self {
        let think_ns = trace.requests.iter().filter_map(|request| request.turn).map(|turn| turn.think);
        let think_ns: u128 = think_ns.map(|think| think.as_nanos()).sum();
        let sample_ns = (think_ns / sessions.at_once as u128) as u64 / u64::from(SAMPLES);
        Self { sample_ns, sessions: Some(sessions), ..self }
    }

    fn costs(&self) -> Costs {
        self.sessions.map_or(Costs::USUAL, |sessions| sessions.costs)
    }
}

/// The progress of a replay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Requests completed or rejected.
    pub settled: u64,
    /// Tokens appended.
    pub tokens: u64,
    /// Free blocks.
    pub blocks_free: usize,
    /// Blocks of the pool.
    pub blocks_total: usize,
    /// Whether all threads have halted, without a batch in flight, until this report is handled.
    pub is_halted: bool,
}

/// The result of a replay.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The counters of the threads.
    pub tally: Tally,
    /// Whether it was interrupted before every request was completed or rejected.
    pub interrupted: bool,
    /// Blocks of the pool at the start.
    pub blocks_total: usize,
    /// Its duration.
    pub wall: Duration,
    /// Processor time of the whole process in that duration; `None` without a clock for it.
    pub cpu: Option<Duration>,
    /// The pool's first refusal.
    pub first_refusal: Option<Refusal>,
    /// Most tokens of open sequences at a time, also those for which blocks are reserved.
    pub peak_tokens: u64,
    /// Free blocks missing at the end.
    pub blocks_leaked: usize,
    /// Fragmentation at the end.
    pub fragmentation_final: f64,
    /// The result of the pool's audit.
    pub audit: Result<(), String>,
    /// The eviction policy of the prefix cache and the number of evicted blocks; `None` without
    /// one.
    pub prefix: Option<(String, u64)>,
    /// The number of blocks that the free list lacked; `None` without one.
    pub list_added: Option<usize>,
    /// Sessions, and those that have ended; `None` if requests arrive as recorded.
    pub sessions: Option<(usize, Ended)>,
    /// Virtual time from the first arrival to the end.
    pub virtual_time: Duration,
    /// Totals of compaction; `None` without it.
    pub compaction: Option<DefragTotals>,
    /// The steps of the schedule that were due.
    pub resizes: Vec<Resize>,
}

impl Outcome {
    /// Returns whether at least one request was completed, all were completed or rejected (unless
    /// [interrupted](Self::interrupted)), and the result is [intact](Self::is_intact).
    pub fn is_sound(&self, requests: usize) -> bool {
        let settled = self.tally.completed + self.tally.rejected;
        self.tally.completed > 0 && (self.interrupted || settled == requests as u64) && self.is_intact()
    }

    /// Returns whether nothing was lost or corrupt.
    pub fn is_intact(&self) -> bool {
        let tally = &self.tally;
        tally.corrupt.is_empty()
            && tally.findings.is_empty()
            && tally.blocks_allocated == tally.blocks_freed
            && self.blocks_leaked == 0
            && self.audit.is_ok()
    }
}

#[derive(Clone, Copy)]
struct Replaying<'a> {
    pool: &'a ReplayPool,
    clock: &'a SharedClock<'a>,
    usage: &'a Usage,
    options: &'a Options,
    texts: Option<&'a Texts>,
    list: Option<&'a SharedList>,
}

/// Replays a trace. Calls `watch` with the [progress](Progress) on the calling thread every tenth
/// of a second, and once when all threads have halted at [`Options::halt_at`]: then the pool is not
/// used until it returns, and the replay ends. If `watch` breaks, all threads halt, read back their
/// open sequences, and the replay ends.
///
/// A panic of a thread ends the replay and is a finding.
pub fn replay(
    pool: &ReplayPool,
    trace: &Trace,
    options: &Options,
    watch: impl FnMut(Progress) -> ControlFlow<()>,
) -> Outcome {
    let (requests, blocks) = (trace.requests.len(), pool.total_blocks());
    let sessions = options
        .sessions
        .map(|sessions| Sessions::new(&trace.requests, trace.hash_tokens, sessions.at_once, options.threads));
    let all_sessions = sessions.as_ref().map(Sessions::count);
    let halt_at = options.halt_at.map(|at| at.of(requests));
    let clock = SharedClock::new(&trace.requests, sessions, options.threads, halt_at);
    let texts = pool.prefix_cache().map(|_| Texts::of(&trace.requests, trace.hash_tokens));
    let block_tokens = pool.shape().block_tokens;
    let usage = Usage::new(options.threads, pool.groups().len());
    let list = options.free_list.then(|| SharedList::new(blocks, block_tokens, texts.is_some()));
    let at =
        Replaying { pool, clock: &clock, usage: &usage, options, texts: texts.as_ref(), list: list.as_ref() };
    let (start, cpu_start) = (Instant::now(), cpu::used());
    let compaction = options.compaction.map(|compaction| pool.start_compaction(compaction)).transpose();
    let (mut tally, resizes, interrupted) = at.run(requests, watch);
    let compaction = match compaction {
        Ok(defragmenter) => defragmenter.map(|defragmenter| pool.wait(defragmenter.stop())),
        Err(reason) => {
            tally.find(format!("compaction did not start: {reason}"));
            None
        }
    };
    let wall = start.elapsed();
    let cpu = cpu::used().zip(cpu_start).map(|(end, start)| end.saturating_sub(start));
    failures(compaction.as_ref(), &resizes).for_each(|failure| tally.find(failure));
    let prefix = pool.prefix_cache().map(|cache| {
        let stats = cache.stats();
        if let Some(miscount) = miscounts(&tally, &stats) {
            tally.find(miscount);
        }
        (cache.policy().name().to_owned(), stats.evicted_blocks)
    });
    let interrupted = interrupted && tally.completed + tally.rejected < requests as u64;
    if let Some(nothing) = nothing(&tally, pool, trace, options, (blocks, interrupted)) {
        tally.find(nothing);
    }
    pool.evict_cached(0);
    let (free_blocks, fragmentation_final) = (pool.free_blocks(), pool.fragmentation().rate);
    if let Err(reason) = pool.allocate_all() {
        tally.find(format!("not every block can be allocated at the end: {reason}"));
    }
    Outcome {
        tally,
        interrupted,
        blocks_total: blocks,
        wall,
        cpu,
        first_refusal: clock.first_refusal.get().copied(),
        peak_tokens: usage.peak_tokens(),
        blocks_leaked: pool.total_blocks().saturating_sub(free_blocks),
        fragmentation_final,
        audit: pool.audit().map(drop).map_err(|error| error.to_string()),
        prefix,
        list_added: list.as_ref().map(SharedList::added),
        sessions: all_sessions.zip(clock.ended()),
        virtual_time: Duration::from_nanos(clock.latest_clock_ns()),
        compaction,
        resizes,
    }
}

impl<'a> Replaying<'a> {
    /// Runs the threads until all have ended. Returns their counters, the resizes, and whether
    /// `watch` interrupted them.
    fn run(
        self,
        requests: usize,
        watch: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> (Tally, Vec<Resize>, bool) {
        thread::scope(|scope| {
            let Self { pool, clock, options, .. } = self;
            let mut sum = Tally::default();
            let resizer = (!options.schedule.0.is_empty())
                .then(|| scope.spawn(|| resizer::run(pool, clock, &options.schedule, requests)));
            let threads = self.spawn(scope, &mut sum);
            let interrupted = self.supervise(&threads, watch);
            for thread in threads {
                match thread.join() {
                    Ok(tally) => sum.merge(tally),
                    Err(panic) => sum.find(format!("a scheduler thread panicked: {}", panic_text(&*panic))),
                }
            }
            clock.stop();
            let resizes = resizer.map(|resizer| resizer.join()).transpose().unwrap_or_else(|panic| {
                sum.find(format!("the thread that resizes panicked: {}", panic_text(&*panic)));
                None
            });
            (sum, resizes.unwrap_or_default(), interrupted)
        })
    }

    /// Starts the scheduler threads. One that does not start stops the others, and is a finding.
    fn spawn<'s>(self, scope: &'s Scope<'s, 'a>, sum: &mut Tally) -> Vec<ScopedJoinHandle<'s, Tally>> {
        let mut threads = Vec::with_capacity(self.options.threads);
        for index in 0..self.options.threads {
            let spawned = thread::Builder::new().spawn_scoped(scope, move || {
                let _leave = Leave(self.clock);
                Worker::new(self, index).run()
            });
            match spawned {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    let all = self.options.threads;
                    sum.find(format!("scheduler thread {index} of {all} did not start: {error}"));
                    self.clock.stop();
                    break;
                }
            }
        }
        threads
    }

    /// Reports the progress until all threads have finished. Returns whether `watch` interrupted
    /// them.
    fn supervise<T>(
        self,
        threads: &[ScopedJoinHandle<'_, T>],
        mut watch: impl FnMut(Progress) -> ControlFlow<()>,
    ) -> bool {
        let Self { pool, clock, .. } = self;
        let mut interrupted = false;
        loop {
            let is_halted = clock.is_halted();
            let flow = watch(Progress {
                settled: clock.settled(),
                tokens: clock.tokens.load(Relaxed),
                blocks_free: pool.free_blocks(),
                blocks_total: pool.total_blocks(),
                is_halted,
            });
            if flow.is_break() && !interrupted {
                interrupted = true;
                clock.halt_now();
            }
            if is_halted {
                clock.stop();
            } else if threads.iter().all(ScopedJoinHandle::is_finished) {
                return interrupted;
            }
            wait_for(threads, clock);
        }
    }
}

/// Compares the counters of the prefix cache with those of the threads.
fn miscounts(tally: &Tally, stats: &PrefixStats) -> Option<String> {
    let lookups = tally.lookup_blocks + tally.resumed_lookup_blocks;
    let hits = tally.hit_blocks + tally.resumed_hit_blocks;
    let (all, found) =
        (stats.lookup_blocks + stats.resumed_lookup_blocks, stats.hit_blocks + stats.resumed_hit_blocks);
    ((lookups, hits) != (all, found)).then(|| {
        format!(
            "the cache counted {all} blocks looked up and {found} found; the threads counted {lookups} and {hits}"
        )
    })
}

/// Returns why no request was replayed or no token verified, if so: such a replay proves nothing.
fn nothing(
    tally: &Tally,
    pool: &ReplayPool,
    trace: &Trace,
    options: &Options,
    (blocks, interrupted): (usize, bool),
) -> Option<String> {
    if interrupted {
        return None;
    }
    if tally.tokens == 0 && tally.rejected > 0 {
        let blocks_of = |tokens| pool.lists().blocks_with_states(tokens, options.step_tokens);
        let smallest = trace.requests.iter().map(|request| blocks_of(request.tokens())).min().unwrap_or(0);
        return Some(format!(
            "nothing was replayed: every request was rejected ({}), the smallest needs {} blocks and the pool had {}",
            HumanCount(tally.rejected),
            HumanCount(smallest as u64),
            HumanCount(blocks as u64)
        ));
    }
    // Other findings already explain why no request was completed.
    let is_whole = options.halt_at.is_none() && tally.findings.is_empty();
    if is_whole && tally.completed == 0 {
        return Some("nothing was replayed: no request was completed".to_owned());
    }
    let is_unverified = options.verify && tally.tokens_verified == 0;
    is_unverified.then(|| "nothing was verified: no token was read back".to_owned())
}

fn failures(compaction: Option<&DefragTotals>, resizes: &[Resize]) -> impl Iterator<Item = String> {
    let copies = compaction.and_then(failed_copies).map(|error| format!("compaction: {error}"));
    let resizes = resizes.iter().filter_map(|resize| match &resize.outcome {
        Err(ResizeRefusal::Failed(reason)) => Some(format!("a resize failed: {reason}")),
        Ok(()) | Err(ResizeRefusal::Blocked(_)) => None,
    });
    copies.into_iter().chain(resizes)
}

/// Returns the error of compaction runs that ended early, if any.
pub fn failed_copies(totals: &DefragTotals) -> Option<String> {
    (totals.failed > 0).then(|| format!("{} runs ended because a copy failed", totals.failed))
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("for no reason given")
}

/// Waits until all threads have finished or halted, at most until the next progress report.
fn wait_for<T>(threads: &[ScopedJoinHandle<'_, T>], clock: &SharedClock<'_>) {
    let until = Instant::now() + WATCH_INTERVAL;
    let wait = || !clock.is_halted() && !threads.iter().all(ScopedJoinHandle::is_finished);
    while Instant::now() < until && wait() {
        thread::sleep(Duration::from_millis(2));
    }
}

/// Counts a thread that ends as halted. A panic also stops the others, which may wait for its
/// blocks.
struct Leave<'a>(&'a SharedClock<'a>);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.stop();
        }
        self.0.leave();
    }
}

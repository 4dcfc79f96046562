//! The background task: checks the pool periodically, compacts it when it is fragmented, and evicts
//! ahead of need while no batch begins.
//!
//! ```text
//! every `interval`:  no batch has begun since the last check?  slices of reclaim, as long as any
//!                    are owed and none begins; yields between two
//!                    no change since the last idle check?  double the pause, up to 100 ms
//!                    batches in flight that may read frames vacated by the last run?  not now
//!                    fragmented beyond `threshold`, and not for the growth of lists alone?
//!                    and eviction does not provide as many runs?  a run
//!                    while eviction provides the runs, the planner finds no move that pays, or most
//!                    moves are cancelled: only at every 2nd, 4th ... such check
//! stop:              the current wave ends, no other begins, the totals are returned; also when
//!                    the pool is dropped
//! ```
//!
//! Changes are detected by a counter that the bitmaps keep, and by the clock's word. Events that
//! make a block movable but change neither (a seal or unpin by handle, a free into a magazine) are
//! noticed within [`THOROUGH_EVERY`].
//!
//! It takes turns with explicit runs and with resizes, and like them it blocks no other operation.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::block::Blocks;
use crate::ids::{Order, Ticket};
use crate::sync::runtime::{Task, after, now, spawn, timeout_at, yield_now};

use super::compactor::{Background, Compactor};
use super::options::{COPY_DEADLINE, DefragOptions};
use super::stop::Stop;
use super::{BREAK_PRICE, DefragError, DefragReport, DefragTotals};

/// Maximum number of checks skipped while runs gain nothing.
const PATIENCE_MAX: u32 = 32;

/// Longest pause between two checks while the pool does not change, unless the interval is longer.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Time between two checks that examine the pool even if no counter has changed.
const THOROUGH_EVERY: Duration = Duration::from_secs(1);

/// Time between two runs that empty threads' magazines. It costs a thread a refill, and gives it
/// blocks that it has not touched lately; more often, this would show in the p99.9 of its
/// allocations (`benches`: `interference`).
const TRIM_EVERY: Duration = Duration::from_millis(20);

/// When a background task compacts, and how much at a time.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct DefragConfig {
    /// The task runs while the fragmentation rate is above this share, 0 to 1; see
    /// [`Pool::fragmentation`](crate::pool::Pool::fragmentation). The rate is one minus the number
    /// of free aligned runs of the order, divided by the number that the same free frames would
    /// form under the best placement of all blocks.
    ///
    /// The task does not count the frames that sequences spare for their growth, nor as many others
    /// outside of runs as the ends of sequences may leave: a 64th of the pool, or with a prefix
    /// cache up to a quarter of the frames in use. It rests while eviction can provide as many runs
    /// as the free frames could form.
    pub threshold: f64,
    /// Time between two checks. While the pool does not change, checks are nearly free, and the
    /// time between them grows to 100 ms (or to this value, if larger); the first check that finds
    /// a change resets it to this value.
    pub interval: Duration,
    /// Bytes copied per wave; by default, the storage's choice.
    pub wave_bytes: Option<usize>,
    /// Maximum number of bytes moved per run.
    pub budget_bytes: Option<u64>,
    /// Order of the free runs to gain; by default, the pool's.
    pub order: Option<Order>,
    /// Price of ending a run of a sequence; see [`DefragOptions::break_price`].
    pub break_price: u32,
    /// Time limit for the copy of a wave; see [`DefragOptions::copy_deadline`].
    pub copy_deadline: Duration,
}

impl Default for DefragConfig {
    fn default() -> Self {
        Self {
            threshold: 0.02,
            interval: Duration::from_millis(2),
            wave_bytes: None,
            budget_bytes: None,
            order: None,
            break_price: BREAK_PRICE,
            copy_deadline: COPY_DEADLINE,
        }
    }
}

impl DefragConfig {
    /// Returns the defaults: a threshold of 2 %, an interval of 2 ms, short waves.
    ///
    /// The number of moved blocks is about the same for any threshold up to 10 %, because moves
    /// that are not made early are made later (`benches`: `churn`).
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the fragmentation rate above which the task runs.
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.threshold = threshold;
        self
    }

    /// Sets the time between two checks.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Sets how many bytes to copy per wave.
    pub fn wave_bytes(mut self, bytes: usize) -> Self {
        self.wave_bytes = Some(bytes);
        self
    }

    /// Sets the maximum number of bytes to move per run.
    pub fn budget_bytes(mut self, bytes: u64) -> Self {
        self.budget_bytes = Some(bytes);
        self
    }

    /// Sets the order of the free runs to gain.
    pub fn order(mut self, order: Order) -> Self {
        self.order = Some(order);
        self
    }

    /// Sets the price of ending a run of a sequence, in maximal free runs joined.
    pub fn break_price(mut self, frames: u32) -> Self {
        self.break_price = frames;
        self
    }

    /// Sets the time limit for the copy of a wave.
    pub fn copy_deadline(mut self, deadline: Duration) -> Self {
        self.copy_deadline = deadline;
        self
    }

    fn options(&self) -> DefragOptions {
        let mut options = DefragOptions::new().copy_deadline(self.copy_deadline);
        options.wave_bytes = self.wave_bytes;
        (options.order, options.budget_bytes) = (self.order, self.budget_bytes);
        options.break_price = self.break_price;
        options
    }

    fn check(&self) -> Result<(), DefragError> {
        if !(0.0..=1.0).contains(&self.threshold) {
            return Err(DefragError::Option { option: "threshold", reason: "must be between 0 and 1" });
        }
        if self.interval.is_zero() {
            return Err(DefragError::Option { option: "interval", reason: "must not be zero" });
        }
        self.options().check()
    }
}

/// A background task that compacts a pool.
///
/// The task stops when this is dropped, which does not wait for it, and when the last `Pool` is
/// dropped. It keeps the pool's memory alive until it has stopped.
#[derive(Debug)]
#[must_use = "the task stops when this is dropped"]
pub struct Defragmenter {
    stop: Arc<Stop>,
    totals: Arc<Mutex<DefragTotals>>,
    task: Option<Task>,
}

impl Defragmenter {
    /// Starts the task on the current tokio runtime, which must have its time driver enabled.
    ///
    /// # Errors
    ///
    /// [`DefragError::NoRuntime`], [`DefragError::NoBytes`], [`DefragError::Option`].
    pub fn start(compactor: Compactor, config: DefragConfig) -> Result<Self, DefragError> {
        config.check()?;
        if !compactor.bytes().are_known() {
            return Err(DefragError::NoBytes);
        }
        let stop = Arc::<Stop>::default();
        compactor.stop_at_close(&stop);
        let totals = Arc::<Mutex<DefragTotals>>::default();
        let task = spawn(work(compactor, config, stop.clone(), totals.clone()));
        let task = task.ok_or(DefragError::NoRuntime)?;
        Ok(Self { stop, totals, task: Some(task) })
    }

    /// Returns the totals so far.
    pub fn totals(&self) -> DefragTotals {
        *self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the task, waits for its end, and returns the totals.
    ///
    /// # Panics
    ///
    /// If the task panicked; a copier may be the engine's own code.
    pub async fn stop(mut self) -> DefragTotals {
        self.stop.give();
        if let Some(task) = self.task.take() {
            task.ended().await;
        }
        self.totals()
    }
}

impl Drop for Defragmenter {
    fn drop(&mut self) {
        self.stop.give();
    }
}

async fn work(compactor: Compactor, config: DefragConfig, stop: Arc<Stop>, totals: Arc<Mutex<DefragTotals>>) {
    let order = config.order.unwrap_or(compactor.order());
    let (mut patience, mut skipped, mut left) = (1, 0, Ticket(0));
    let mut trimmed: Option<Instant> = None;
    let (mut pause, mut idle) = (config.interval, None::<Idle>);
    let mut newest = Ticket(0);
    while timeout_at(after(pause), stop.given()).await.is_none() {
        // Even while the pool does not change: a request that does not take its turn delays the
        // others.
        compactor.blocks().look_after_line();
        compactor.look_after_turns();
        // Makes its age known to errors and statistics.
        let _ = compactor.blocks().oldest_batch();
        let before = std::mem::replace(&mut newest, compactor.blocks().clock().newest());
        if before == newest {
            reclaim(compactor.blocks(), newest, &stop).await;
        }
        let is_idle = idle.as_ref().is_some_and(|idle| idle.goes_on(&compactor));
        if is_idle && idle.as_ref().is_some_and(|idle| elapsed(idle.since) < THOROUGH_EVERY) {
            totals.lock().unwrap_or_else(PoisonError::into_inner).looks += 1;
            pause = (2 * pause).min(PAUSE_MAX.max(config.interval));
            continue;
        }
        idle = None;
        if is_idle {
            // It is time for a thorough check.
            skipped = patience;
        } else {
            pause = config.interval;
        }
        skipped += 1;
        if skipped < patience {
            continue;
        }
        skipped = 0;
        let blocks = compactor.blocks();
        if !blocks.clock().ended(left) {
            // The frames vacated by the last run are not free yet: another run would take more free
            // frames from allocations.
            continue;
        }
        blocks.reclaim_due_shared_limbo();
        let before = Idle::now(&compactor);
        if blocks.curable_fragmentation(order) <= config.threshold {
            totals.lock().unwrap_or_else(PoisonError::into_inner).looks += 1;
            patience = 1;
            idle = Some(before);
            continue;
        }
        if blocks.has_runs_to_evict(order) {
            // An allocation gets its runs by eviction. This check reads every block's word, so it
            // is not made at every interval.
            totals.lock().unwrap_or_else(PoisonError::into_inner).looks += 1;
            patience = (2 * patience).min(PATIENCE_MAX);
            idle = Some(before);
            continue;
        }
        let trims_caches = trimmed.is_none_or(|trimmed| elapsed(trimmed) >= TRIM_EVERY);
        if trims_caches {
            trimmed = Some(now());
        }
        let background = Background { stop: stop.clone(), trims_caches };
        let outcome = compactor.defragment_until(config.options(), Some(background)).await;
        let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
        let report = match &outcome {
            Ok(report) => *report,
            Err(error) => {
                totals.failed += 1;
                done_before(error)
            }
        };
        totals.add(&report);
        if report.moved_blocks > 0 {
            left = blocks.clock().newest();
        }
        if report.moved_blocks > report.given_up.total() {
            (patience, pause) = (1, config.interval);
        } else {
            patience = (2 * patience).min(PATIENCE_MAX);
            idle = Some(Idle::now(&compactor));
        }
    }
}

fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}

/// Evicts what is owed to lists, in slices, until a batch begins after `newest`; its end goes on.
async fn reclaim(blocks: &Blocks, newest: Ticket, stop: &Stop) {
    while blocks.clock().newest() == newest && !stop.is_given() && blocks.reclaim_slice() > 0 {
        yield_now().await;
    }
}

/// State of the pool at a check that found no work.
struct Idle {
    changes: u32,
    newest: Ticket,
    in_flight: u64,
    since: Instant,
}

impl Idle {
    fn now(compactor: &Compactor) -> Self {
        let blocks = compactor.blocks();
        let (newest, in_flight) = (blocks.clock().newest(), blocks.clock().in_flight());
        Self { changes: blocks.changes(), newest, in_flight, since: now() }
    }

    /// Returns true if there is still no work, as far as the counters show.
    fn goes_on(&self, compactor: &Compactor) -> bool {
        let now = Self::now(compactor);
        (now.changes, now.newest, now.in_flight) == (self.changes, self.newest, self.in_flight)
    }
}

/// Returns the work done by a run before it failed.
fn done_before(error: &DefragError) -> DefragReport {
    match error {
        DefragError::Copy { report, .. }
        | DefragError::CopyDropped { report }
        | DefragError::CopyOverdue { report, .. } => **report,
        _ => DefragReport::default(),
    }
}

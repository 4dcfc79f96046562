//! The background task: looks at the pool now and then, and compacts it when it is fragmented.
//!
//! ```text
//! every `interval`:  nothing has changed since there was nothing to do?  a pause of twice the length, up to 100 ms
//!                    batches in flight that may read what the last run left?  not now
//!                    fragmented beyond `threshold`?  a run, unless the last ones gained nothing: then every 2nd, 4th ... time
//! stop:              the wave that is under way ends, nothing else begins, and the totals are handed over; also when the pool goes
//! ```
//!
//! Whether something has changed is a count that the bitmaps keep, and the clock's word. What makes
//! a block movable and is in neither (sealed or unpinned by hand, freed into a magazine) is seen
//! within [`THOROUGH_EVERY`].
//!
//! It takes its turn with runs by hand and with changes of size, and like them it holds nobody else up.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

use crate::ids::{Order, Ticket};

use super::compactor::{Background, COPY_DEADLINE, Compactor, DefragOptions, WAVE_BYTES};
use super::{DefragError, DefragReport, DefragTotals};

/// Looks that are skipped, at most, while runs gain nothing.
const PATIENCE_MAX: u32 = 32;

/// The longest pause between two looks at a pool in which nothing changes, unless the interval is
/// longer.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Between two looks that go through the pool although nothing that is counted has changed.
const THOROUGH_EVERY: Duration = Duration::from_secs(1);

/// Between two runs that empty threads' magazines. A thread pays for that with a refill, and with blocks that it has not
/// touched lately; more often it would show among the slowest thousandth of its allocations (`benches`: `interference`).
const TRIM_EVERY: Duration = Duration::from_millis(20);

/// When a background task compacts, and how much at a time.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct DefragConfig {
    /// It runs while the [fragmentation](crate::block::Core::fragmentation) is above this share, 0 to 1.
    pub threshold: f64,
    /// Time between two looks. While nothing changes in the pool the looks cost next to nothing,
    /// and come at up to a tenth of a second, or this time if it is longer; the first of them that
    /// finds a change goes back to this time.
    pub interval: Duration,
    /// Bytes that are copied together.
    pub wave_bytes: usize,
    /// Bytes that one run moves at most.
    pub budget_bytes: Option<u64>,
    /// The order of free runs; the pool's own unless given.
    pub order: Option<Order>,
    /// How long the copy of a wave may take, see [`DefragOptions::copy_deadline`].
    pub copy_deadline: Duration,
}

impl Default for DefragConfig {
    fn default() -> Self {
        Self {
            threshold: 0.02,
            interval: Duration::from_millis(2),
            wave_bytes: WAVE_BYTES,
            budget_bytes: None,
            order: None,
            copy_deadline: COPY_DEADLINE,
        }
    }
}

impl DefragConfig {
    /// Above a fiftieth, every two milliseconds, in short waves. What is moved is about the same for any threshold up to a
    /// tenth: what is not moved soon is moved later (`benches`: `churn`).
    pub fn new() -> Self {
        Self::default()
    }

    /// Runs above this share.
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.threshold = threshold;
        self
    }

    /// Looks so often.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Copies so many bytes together.
    pub fn wave_bytes(mut self, bytes: usize) -> Self {
        self.wave_bytes = bytes;
        self
    }

    /// Moves no more than so many bytes in one run.
    pub fn budget_bytes(mut self, bytes: u64) -> Self {
        self.budget_bytes = Some(bytes);
        self
    }

    /// Gains free runs of this order.
    pub fn order(mut self, order: Order) -> Self {
        self.order = Some(order);
        self
    }

    /// Lets the copy of a wave take so long.
    pub fn copy_deadline(mut self, deadline: Duration) -> Self {
        self.copy_deadline = deadline;
        self
    }

    fn options(&self) -> DefragOptions {
        let mut options = DefragOptions::new().wave_bytes(self.wave_bytes).copy_deadline(self.copy_deadline);
        (options.order, options.budget_bytes) = (self.order, self.budget_bytes);
        options
    }

    fn check(&self) -> Result<(), DefragError> {
        if !(0.0..=1.0).contains(&self.threshold) {
            return Err(DefragError::Option { option: "threshold", reason: "not a share between 0 and 1" });
        }
        if self.interval.is_zero() {
            return Err(DefragError::Option { option: "interval", reason: "no time between two looks" });
        }
        self.options().check()
    }
}

/// A background task that compacts a pool. Dropping it stops the task too, without waiting for it.
/// It stops by itself when the last `Pool` is dropped. The task keeps the pool's memory until it
/// has stopped.
#[derive(Debug)]
#[must_use = "the task stops when this is dropped"]
pub struct Defragmenter {
    stop: Arc<watch::Sender<bool>>,
    totals: Arc<Mutex<DefragTotals>>,
    task: Option<JoinHandle<()>>,
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
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| DefragError::NoRuntime)?;
        let (stop, stopped) = watch::channel(false);
        let stop = Arc::new(stop);
        compactor.stop_at_close(&stop);
        let totals = Arc::<Mutex<DefragTotals>>::default();
        let task = runtime.spawn(work(compactor, config, stopped, totals.clone()));
        Ok(Self { stop, totals, task: Some(task) })
    }

    /// What it has done so far.
    pub fn totals(&self) -> DefragTotals {
        *self.totals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops the task, waits until it has, and says what it did.
    ///
    /// # Panics
    ///
    /// If the task did: who copies frames may be the engine's own code.
    pub async fn stop(mut self) -> DefragTotals {
        self.stop.send_replace(true);
        if let Some(task) = self.task.take() {
            // A task whose runtime went has stopped too.
            if let Err(error) = task.await
                && error.is_panic()
            {
                std::panic::resume_unwind(error.into_panic());
            }
        }
        self.totals()
    }
}

impl Drop for Defragmenter {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

async fn work(
    compactor: Compactor,
    config: DefragConfig,
    mut stopped: watch::Receiver<bool>,
    totals: Arc<Mutex<DefragTotals>>,
) {
    let order = config.order.unwrap_or(compactor.order());
    let (mut patience, mut skipped, mut left) = (1, 0, Ticket(0));
    let mut trimmed: Option<Instant> = None;
    let (mut pause, mut idle) = (config.interval, None::<Idle>);
    // Ends when it is told to, and when there is nobody left to tell it.
    while timeout(pause, stopped.wait_for(|&stop| stop)).await.is_err() {
        // Also while nothing changes: a request that does not come for its turn holds up the others.
        compactor.blocks().look_after_line();
        // So that its age is known to errors and statistics.
        let _ = compactor.blocks().oldest_batch();
        let is_idle = idle.as_ref().is_some_and(|idle| idle.goes_on(&compactor));
        if is_idle && idle.as_ref().is_some_and(|idle| idle.since.elapsed() < THOROUGH_EVERY) {
            totals.lock().unwrap_or_else(PoisonError::into_inner).looks += 1;
            pause = (2 * pause).min(PAUSE_MAX.max(config.interval));
            continue;
        }
        idle = None;
        if is_idle {
            // A thorough look, whose time has come.
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
            // What the last run left is not free yet: another one would take more from those who allocate.
            continue;
        }
        blocks.reclaim_due_shared_limbo();
        let before = Idle::now(&compactor);
        if blocks.fragmentation(order) <= config.threshold {
            totals.lock().unwrap_or_else(PoisonError::into_inner).looks += 1;
            patience = 1;
            idle = Some(before);
            continue;
        }
        let trims_caches = trimmed.is_none_or(|trimmed| trimmed.elapsed() >= TRIM_EVERY);
        if trims_caches {
            trimmed = Some(Instant::now());
        }
        let background = Background { stopped: stopped.clone(), trims_caches };
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
            (patience, pause) = (1, config.interval);
        } else {
            patience = (2 * patience).min(PATIENCE_MAX);
            idle = Some(Idle::now(&compactor));
        }
    }
}

/// The pool when there was nothing to do.
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
        Self { changes: blocks.changes(), newest, in_flight, since: Instant::now() }
    }

    /// Whether there is nothing to do still, as far as can be told without a look through the pool.
    fn goes_on(&self, compactor: &Compactor) -> bool {
        let now = Self::now(compactor);
        (now.changes, now.newest, now.in_flight) == (self.changes, self.newest, self.in_flight)
    }
}

/// What a run had done when it failed.
fn done_before(error: &DefragError) -> DefragReport {
    match error {
        DefragError::Copy { report, .. }
        | DefragError::CopyDropped { report }
        | DefragError::CopyOverdue { report, .. } => **report,
        _ => DefragReport::default(),
    }
}

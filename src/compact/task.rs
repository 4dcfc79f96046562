//! The background task: checks the pool periodically, compacts it when it is fragmented, and evicts
//! ahead of need while no batch begins.
//!
//! ```text
//! every `interval`:  no batch has begun since the last check?  slices of reclaim, while there is
//!                    reclaim debt and none begins; yields between two
//!                    no change since the last idle check?  double the pause, up to 100 ms
//!                    batches in flight that may read frames vacated by the last run?  not now
//!                    no more blocks are free than evictable, and the task has moved its share of
//!                    those allocated?  not now
//!                    are free and evictable frames fragmented beyond `threshold`, and not for the
//!                    growth of lists alone?  a run
//!                    while there are evictable blocks and nothing to do, the planner finds no move
//!                    that pays, or most moves are cancelled: only at every 2nd, 4th ... such check
//! stop:              the current wave ends, no other begins, the totals are returned; also when
//!                    the pool is dropped
//! ```
//!
//! A counter of the bitmaps and the clock's word detect changes. Events that change neither (a
//! lease's seal, the end of a pin, a free into a magazine) are noticed within [`THOROUGH_EVERY`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::block::Blocks;
use crate::ids::Ticket;
use crate::sync::runtime::{Task, after, now, spawn, timeout_at, yield_now};

use super::compactor::{Background, Compactor};
use super::options::DefragOptions;
use super::stop::Stop;
use super::{CompactionState, DefragError, DefragReport, DefragTotals};

const PATIENCE_MAX: u32 = 32;

const PAUSE_MAX: Duration = Duration::from_millis(100);

const THOROUGH_EVERY: Duration = Duration::from_secs(1);

/// Default of [`DefragConfig::share`].
const SHARE: f64 = 0.02;

/// Minimum threshold in a pool with as many evictable blocks as free ones. Below it, evictions
/// provide runs, and moves among evictable blocks of another age keep units from being evicted as a
/// whole (at a rate of 4 %, they shortened the runs of sequences in a replay by 10 %).
const CACHED_THRESHOLD: f64 = 0.25;

/// The task may exceed its share by the pool's size `>> ADVANCE_SHIFT`.
const ADVANCE_SHIFT: u32 = 6;

/// Time between two runs that empty threads' magazines, which costs a thread a refill and cold
/// blocks. A shorter one would show in the p99.9 of allocations (`benches`: `interference`).
const TRIM_EVERY: Duration = Duration::from_millis(20);

/// When a background task compacts, and how much at a time.
#[derive(Clone, Copy, PartialEq, Debug)]
#[non_exhaustive]
pub struct DefragConfig {
    /// The task runs while the fragmentation rate of free and evictable frames is above this share,
    /// 0 to 1; see [`Pool::available_fragmentation`](crate::pool::Pool::available_fragmentation).
    ///
    /// It ignores the frames reserved for growth, and as many others outside of runs as the ends of
    /// sequences may leave: a 64th of the pool, or with a prefix cache an eighth of it up to 1,280
    /// frames, and up to a quarter of the frames in use. While no more blocks are free than
    /// evictable, it pauses below a rate of a quarter, since evictions provide runs.
    pub threshold: f64,
    /// While no more blocks are free than evictable, the task moves at most this share of the
    /// allocated blocks, 0 to 1, and once a 64th of the pool; by default 2 %.
    pub share: f64,
    /// Time between two checks. Grows to 100 ms, unless larger, while the pool does not change.
    pub interval: Duration,
    /// Options of each run: by default, all moves that gain a run of the pool's order.
    pub moves: DefragOptions,
}

impl Default for DefragConfig {
    fn default() -> Self {
        Self {
            threshold: 0.02,
            share: SHARE,
            interval: Duration::from_millis(2),
            moves: DefragOptions::default(),
        }
    }
}

impl DefragConfig {
    /// Returns the defaults: a threshold and a share of 2 %, an interval of 2 ms, short waves. Any
    /// threshold up to 10 % moves about the same number of blocks, because moves that are not made
    /// early are made later (`benches`: `churn`).
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the fragmentation rate above which the task runs.
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.threshold = threshold;
        self
    }

    /// Sets the share of the allocated blocks to move in a pool full of evictable ones.
    pub fn share(mut self, share: f64) -> Self {
        self.share = share;
        self
    }

    /// Sets the time between two checks.
    pub fn interval(mut self, interval: Duration) -> Self {
        self.interval = interval;
        self
    }

    /// Sets the options of each run.
    pub fn moves(mut self, options: DefragOptions) -> Self {
        self.moves = options;
        self
    }

    fn check(&self) -> Result<(), DefragError> {
        if !(0.0..=1.0).contains(&self.threshold) {
            return Err(DefragError::Option { option: "threshold", reason: "must be between 0 and 1" });
        }
        if !(0.0..=1.0).contains(&self.share) {
            return Err(DefragError::Option { option: "share", reason: "must be between 0 and 1" });
        }
        if self.interval.is_zero() {
            return Err(DefragError::Option { option: "interval", reason: "must not be zero" });
        }
        self.moves.check()
    }
}

/// A background task that compacts a pool. It stops when this is dropped, without waiting, and when
/// the last `Pool` is dropped. It keeps the pool's memory alive until it has stopped.
#[derive(Debug)]
#[must_use = "the task stops when this is dropped"]
pub struct Defragmenter {
    stop: Arc<Stop>,
    totals: Arc<Mutex<DefragTotals>>,
    task: Option<Task>,
}

impl Defragmenter {
    /// Starts the task on the current tokio runtime, which must have its time driver enabled. Fails
    /// with [`DefragError::NoRuntime`], [`DefragError::NoBytes`] or [`DefragError::Option`].
    pub(crate) fn start(compactor: Compactor, config: DefragConfig) -> Result<Self, DefragError> {
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
    let order = config.moves.order.unwrap_or(compactor.order());
    let (mut patience, mut skipped, mut left) = (1, 0, Ticket(0));
    let mut trimmed: Option<Instant> = None;
    let (mut pause, mut idle) = (config.interval, None::<Idle>);
    let mut newest = Ticket(0);
    let mut share = MovedShare::new(compactor.blocks(), config.share);
    let _state = StateOf(&compactor);
    while timeout_at(after(pause), stop.given()).await.is_none() {
        // Even while the pool does not change: a request that ignores its turn delays the others.
        compactor.blocks().look_after_queue();
        compactor.look_after_turns();
        // Updates its age for errors and statistics.
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
            // Frames vacated by the last run are not free yet: allocations would lack more frames.
            compactor.set_state(Some(CompactionState::Batches));
            continue;
        }
        blocks.reclaim_due_retired();
        let before = Idle::now(&compactor);
        let is_cached = blocks.evictable() >= blocks.counts().free().max(1);
        let threshold = config.threshold.max(if is_cached { CACHED_THRESHOLD } else { 0.0 });
        let moves_max = if is_cached { share.left(blocks) } else { usize::MAX };
        // Fewer moves than empty a run gain nothing.
        let state = if moves_max < order.frames().min(share.advance(blocks).max(1)) {
            CompactionState::Share
        } else if blocks.curable_fragmentation(order) <= threshold {
            CompactionState::Contiguous
        } else {
            CompactionState::Moving
        };
        compactor.set_state(Some(state));
        if state != CompactionState::Moving {
            totals.lock().unwrap_or_else(PoisonError::into_inner).looks += 1;
            // With evictable blocks, the check reads every block's word: not at every interval.
            let reads_words = is_cached && state == CompactionState::Contiguous;
            patience = if reads_words { (2 * patience).min(PATIENCE_MAX) } else { 1 };
            idle = Some(before);
            continue;
        }
        let trims_caches = trimmed.is_none_or(|trimmed| elapsed(trimmed) >= TRIM_EVERY);
        if trims_caches {
            trimmed = Some(now());
        }
        let background = Background { stop: stop.clone(), trims_caches, moves_max };
        let outcome = compactor.defragment_for(config.moves, Some(background)).await;
        let mut totals = totals.lock().unwrap_or_else(PoisonError::into_inner);
        let report = match &outcome {
            Ok(report) => *report,
            Err(error) => {
                totals.failed += 1;
                done_before(error)
            }
        };
        totals.add(&report);
        share.moved += if is_cached { report.moved_blocks as u64 } else { 0 };
        if report.moved_blocks > 0 {
            left = blocks.clock().newest();
        }
        if report.moved_blocks > report.given_up.total() {
            (patience, pause) = (1, config.interval);
        } else {
            if outcome.is_ok() {
                compactor.set_state(Some(CompactionState::NoGain));
            }
            patience = (2 * patience).min(PATIENCE_MAX);
            idle = Some(Idle::now(&compactor));
        }
    }
}

struct MovedShare {
    share: f64,
    before: u64,
    moved: u64,
}

impl MovedShare {
    fn new(blocks: &Blocks, share: f64) -> Self {
        Self { share, before: blocks.allocation_counts().blocks, moved: 0 }
    }

    fn left(&self, blocks: &Blocks) -> usize {
        let allocated = blocks.allocation_counts().blocks.saturating_sub(self.before);
        let may = (allocated as f64 * self.share) as u64 + self.advance(blocks) as u64;
        may.saturating_sub(self.moved) as usize
    }

    fn advance(&self, blocks: &Blocks) -> usize {
        if self.share > 0.0 { blocks.total() >> ADVANCE_SHIFT } else { 0 }
    }
}

struct StateOf<'a>(&'a Compactor);

impl Drop for StateOf<'_> {
    fn drop(&mut self) {
        self.0.set_state(None);
    }
}

fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}

/// Evicts the reclaim debt in slices until a batch begins, whose end continues.
async fn reclaim(blocks: &Blocks, newest: Ticket, stop: &Stop) {
    while blocks.clock().newest() == newest && !stop.is_given() && blocks.reclaim_slice() > 0 {
        yield_now().await;
    }
}

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

    fn goes_on(&self, compactor: &Compactor) -> bool {
        let now = Self::now(compactor);
        (now.changes, now.newest, now.in_flight) == (self.changes, self.newest, self.in_flight)
    }
}

fn done_before(error: &DefragError) -> DefragReport {
    match error {
        DefragError::Copy { report, .. }
        | DefragError::CopyDropped { report }
        | DefragError::CopyOverdue { report, .. } => **report,
        _ => DefragReport::default(),
    }
}

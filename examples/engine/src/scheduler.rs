//! What workers share: the waiting jobs, and the order in which jobs get blocks.
//!
//! # State
//!
//! ```text
//! waiting     jobs that no worker has, by rank: new ones, and preempted ones
//! active      number of jobs that workers have
//! admitting   a worker is admitting the first waiting job
//! starved     rank of the first job that lacks blocks and whose worker has nothing left to preempt
//! changes     number of events after which a job may find room that did not find it before
//! ```
//!
//! # Protocol
//!
//! A worker reads `changes` ([`look`](Scheduler::look)) before it tries anything. If nothing
//! succeeds, it [waits](Scheduler::wait) until `changes` is another. Every worker counts a change
//! after it has freed blocks: at the end of a step, of a job, of a preemption. A worker can
//! therefore not sleep beside blocks that were freed after it had tried. Its own changes do not
//! wake it, and an attempt in vain counts a change only if others have: workers that cannot proceed
//! do not wake each other for good.
//!
//! Jobs are admitted in the order of their ranks, by one worker at a time. While a job is
//! *starved*, workers preempt the jobs behind it, one at a time, and admit none of them. The first
//! of all jobs therefore gets its blocks in the end, since every request fits into the pool: there
//! is no deadlock, and no livelock in which jobs preempt each other in turns.
//!
//! Blocks also become available by events that workers do not see, such as the end of a move. A
//! wait therefore lasts a few milliseconds at most. The line of the pool's own waiting requests
//! would tell of these, but a worker has running jobs to attend to, and other workers' jobs behind
//! its own to preempt, while an admission waits. In the model of `tests/scheduler_model.rs` it
//! lasts until a change, so that the model finds lost wake-ups.

use std::collections::BTreeMap;

use kvpool::testing::sync::{Condvar, Mutex, MutexGuard};

use crate::request::{Job, Rank};

/// Longest time for which a worker waits without looking at the pool.
#[cfg(not(kvpool_loom))]
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_millis(5);

/// A job that no worker has, and what a preemption has parked of its sequence.
pub struct Waiting<P> {
    /// The job.
    pub job: Job,
    /// What was parked.
    pub parked: Option<P>,
}

/// Counts of what workers did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Jobs that were admitted, including those that had been preempted.
    pub admitted: u64,
    /// Admitted jobs that lacked room in the step after their admission.
    pub first_append_failures: u64,
    /// Preemptions.
    pub preempted: u64,
    /// Jobs that were forked off others.
    pub forks: u64,
    /// Forks that found no room, and began with their prompt.
    pub fork_failures: u64,
    /// Tokens that were drafted.
    pub drafted: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Jobs whose stream was closed before their end.
    pub cancelled: u64,
    /// Steps of all workers.
    pub steps: u64,
    /// Jobs in all steps.
    pub step_jobs: u64,
    /// Maximum number of jobs that workers had at once.
    pub concurrency_peak: u64,
}

struct State<P> {
    waiting: BTreeMap<Rank, Waiting<P>>,
    active: usize,
    admitting: bool,
    starved: Option<Rank>,
    changes: u64,
    is_closed: bool,
    has_failed: bool,
    counts: Counts,
}

/// What a worker knows before it tries anything.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    changes: u64,
    /// The first starved job.
    pub starved: Option<Rank>,
    /// Whether a worker has failed, so that all shall stop.
    pub has_failed: bool,
}

/// The state that workers share.
pub struct Scheduler<P> {
    state: Mutex<State<P>>,
    changed: Condvar,
}

impl<P> Default for Scheduler<P> {
    fn default() -> Self {
        let state = State {
            waiting: BTreeMap::new(),
            active: 0,
            admitting: false,
            starved: None,
            changes: 0,
            is_closed: false,
            has_failed: false,
            counts: Counts::default(),
        };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }
}

impl<P> Scheduler<P> {
    fn lock(&self) -> MutexGuard<'_, State<P>> {
        self.state.lock().expect("a worker panicked inside of the scheduler")
    }

    /// Changes the state, and wakes all workers.
    fn change<R>(&self, change: impl FnOnce(&mut State<P>) -> R) -> R {
        let mut state = self.lock();
        let result = change(&mut state);
        state.changes += 1;
        self.changed.notify_all();
        result
    }

    /// Changes the state for the worker whose look this is, which does not wake itself.
    fn change_by(&self, look: &mut Look, change: impl FnOnce(&mut State<P>)) {
        self.change(change);
        look.changes += 1;
    }

    /// Adds a new job. Returns false if the scheduler is closed.
    pub fn submit(&self, job: Job) -> bool {
        self.change(|state| {
            if state.is_closed || state.has_failed {
                return false;
            }
            state.waiting.insert(job.rank, Waiting { job, parked: None });
            true
        })
    }

    /// Refuses new jobs. Workers end when there are no jobs left.
    pub fn close(&self) {
        self.change(|state| state.is_closed = true);
    }

    /// Makes all workers end, and drops the waiting jobs.
    pub fn fail(&self) {
        let dropped = self.change(|state| {
            state.has_failed = true;
            std::mem::take(&mut state.waiting)
        });
        drop(dropped); // Sequences close outside of the lock.
    }

    /// Returns the state at the begin of a worker's turn.
    pub fn look(&self) -> Look {
        let state = self.lock();
        Look { changes: state.changes, starved: state.starved, has_failed: state.has_failed }
    }

    /// Takes the first waiting job, to admit it.
    ///
    /// None if there is none, if it is behind a starved one, or while another worker admits.
    /// [`admitted`](Self::admitted), [`refused`](Self::refused) or [`left`](Self::left) ends the
    /// admission.
    pub fn take(&self) -> Option<Waiting<P>> {
        let mut state = self.lock();
        if state.admitting || state.has_failed {
            return None;
        }
        let (&first, _) = state.waiting.first_key_value()?;
        if state.starved.is_some_and(|starved| starved < first) {
            return None;
        }
        let waiting = state.waiting.pop_first().map(|(_, waiting)| waiting)?;
        state.admitting = true;
        state.active += 1;
        state.counts.concurrency_peak = state.counts.concurrency_peak.max(state.active as u64);
        Some(waiting)
    }

    /// Ends an admission that was granted.
    pub fn admitted(&self, look: &mut Look) {
        self.change_by(look, |state| {
            state.admitting = false;
            state.counts.admitted += 1;
        });
    }

    /// Ends an admission that found no room.
    pub fn refused(&self, look: &Look, waiting: Waiting<P>) {
        let mut state = self.lock();
        state.admitting = false;
        state.active -= 1;
        state.waiting.insert(waiting.job.rank, waiting);
        self.tried_in_vain(&mut state, look);
    }

    /// Ends a step in which no job had room.
    pub fn stalled(&self, look: &Look) {
        self.tried_in_vain(&mut self.lock(), look);
    }

    /// Counts a change if another worker has counted one since the look: what it freed may have
    /// been retired until the end of this worker's batch, and a third one may have tried in
    /// between.
    fn tried_in_vain(&self, state: &mut State<P>, look: &Look) {
        if state.changes != look.changes {
            state.changes += 1;
            self.changed.notify_all();
        }
    }

    /// Ends an admission of a job whose stream is closed.
    pub fn left(&self, look: &mut Look) {
        self.change_by(look, |state| {
            state.admitting = false;
            state.active -= 1;
            state.counts.cancelled += 1;
        });
    }

    /// Counts a job that a worker has forked off, and returns to the waiting ones if it has no
    /// room.
    pub fn forked(&self, look: &mut Look, homeless: Option<Job>) {
        self.change_by(look, |state| {
            state.counts.forks += 1;
            match homeless {
                None => state.active += 1,
                Some(job) => {
                    state.counts.fork_failures += 1;
                    state.waiting.insert(job.rank, Waiting { job, parked: None });
                }
            }
            state.counts.concurrency_peak = state.counts.concurrency_peak.max(state.active as u64);
        });
    }

    /// Returns a preempted job, whose blocks are free, to the waiting ones.
    pub fn preempted(&self, look: &mut Look, waiting: Waiting<P>) {
        self.change_by(look, |state| {
            state.active -= 1;
            state.counts.preempted += 1;
            if !state.has_failed {
                state.waiting.insert(waiting.job.rank, waiting);
            }
        });
    }

    /// Removes a job whose blocks are free.
    pub fn ended(&self, look: &mut Look, was_cancelled: bool) {
        self.change_by(look, |state| {
            state.active -= 1;
            state.counts.cancelled += u64::from(was_cancelled);
        });
    }

    /// Notes that a job lacks blocks, and that its worker has nothing to preempt for it.
    pub fn starve(&self, look: &mut Look, rank: Rank) {
        let mut state = self.lock();
        if state.starved.is_none_or(|starved| rank < starved) {
            state.starved = Some(rank);
            state.changes += 1;
            look.changes += 1;
            self.changed.notify_all();
        }
    }

    /// Notes that a starved job has its blocks, or has ended.
    pub fn fed(&self, look: &mut Look, rank: Rank) {
        self.change_by(look, |state| {
            if state.starved == Some(rank) {
                state.starved = None;
            }
        });
    }

    /// Notes that blocks may have become available, and counts.
    pub fn stepped(&self, look: &mut Look, count: impl FnOnce(&mut Counts)) {
        self.change_by(look, |state| count(&mut state.counts));
    }

    /// Waits for a change since the look. Returns false if the worker shall end.
    pub fn wait(&self, look: &Look, has_jobs: bool) -> bool {
        let state = self.lock();
        if state.has_failed || (!has_jobs && state.is_closed && state.active == 0 && state.waiting.is_empty())
        {
            // The others may wait for the same.
            self.changed.notify_all();
            return false;
        }
        if state.changes == look.changes {
            #[cfg(kvpool_loom)]
            drop(self.changed.wait(state).unwrap());
            #[cfg(not(kvpool_loom))]
            drop(self.changed.wait_timeout(state, LOOK_AGAIN));
        }
        true
    }

    /// Returns the counts so far.
    pub fn counts(&self) -> Counts {
        self.lock().counts
    }
}

//! A worker: admits jobs, computes steps of continuous batches, and preempts.
//!
//! One turn of a worker:
//!
//! ```text
//! 1  drop the jobs whose streams were closed
//! 2  if another worker's job is starved, preempt the last job behind it
//! 3  admit waiting jobs, up to the worker's share
//! 4  plan a chunk of each prompt, or a decoded token and drafts, and grow all sequences by these; if
//!    one lacks blocks, none has grown: preempt the last job, and leave out those that still lack
//! 5  one forward pass; choose tokens; keep what was computed; fork; end jobs
//! 6  if there is but one job, and it lacks blocks, it is starved
//! 7  if nothing could be done, wait for a change
//! ```

use kvpool::testing::sync::Arc;

use crate::cache::{Admission, Candidate, Growth, KvCache};
use crate::error::EngineError;
use crate::model::{Network, Segment};
use crate::request::{Event, Job, Rank};
use crate::scheduler::{Look, Scheduler, Waiting};

/// Limits of a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Maximum number of jobs; forks may exceed it.
    pub jobs: usize,
    /// Maximum number of tokens computed per step, apart from drafts.
    pub step_tokens: usize,
}

/// A job that has a sequence.
struct Running<S> {
    job: Job,
    cache: S,
    plan: Option<Plan>,
    /// Whether it has not been in a step since its admission.
    is_new: bool,
}

/// The tokens of one job in a step.
struct Plan {
    first: usize,
    /// Known tokens, then drafts.
    tokens: Vec<u32>,
    known: usize,
    /// Whether logits are needed, from the last known token on: not within a prompt.
    has_logits: bool,
}

impl Plan {
    fn logits(&self) -> usize {
        if self.has_logits { self.tokens.len() - self.known + 1 } else { 0 }
    }
}

/// One thread of the engine.
pub struct Worker<C: KvCache, N> {
    cache: Arc<C>,
    network: Arc<N>,
    scheduler: Arc<Scheduler<C::Parked>>,
    limits: Limits,
    /// What it knew at the begin of its turn.
    look: Look,
    /// In the order of their ranks.
    running: Vec<Running<C::Sequence>>,
    /// Its starved job.
    starved: Option<Rank>,
    /// Whether a job lacked blocks in the last step, so that no other is admitted.
    is_pressed: bool,
}

impl<C: KvCache, N: Network> Worker<C, N> {
    /// Creates a worker.
    pub fn new(cache: Arc<C>, network: Arc<N>, scheduler: Arc<Scheduler<C::Parked>>, limits: Limits) -> Self {
        let (look, running) = (scheduler.look(), Vec::new());
        Self { cache, network, scheduler, limits, look, running, starved: None, is_pressed: false }
    }

    /// Works until the scheduler is closed and no job is left.
    ///
    /// # Errors
    ///
    /// The first error; all other workers then stop too.
    pub fn run(mut self) -> Result<(), EngineError> {
        /// Makes the other workers stop if this one panics or fails.
        struct Fail<'a, P>(&'a Scheduler<P>);
        impl<P> Drop for Fail<'_, P> {
            fn drop(&mut self) {
                self.0.fail();
            }
        }
        let scheduler = self.scheduler.clone();
        let fail = Fail(&scheduler);
        while self.turn()? {}
        std::mem::forget(fail);
        Ok(())
    }

    /// Takes one turn. Returns false if the worker shall end.
    fn turn(&mut self) -> Result<bool, EngineError> {
        self.look = self.scheduler.look();
        if self.look.has_failed {
            return Ok(false);
        }
        self.drop_cancelled();
        self.give_way()?;
        self.admit()?;
        if !self.running.is_empty() && self.step()? {
            return Ok(true);
        }
        Ok(self.scheduler.wait(&self.look, !self.running.is_empty()))
    }

    fn drop_cancelled(&mut self) {
        for running in self.running.extract_if(.., |running| running.job.events.is_closed()) {
            drop(running.cache);
            self.scheduler.ended(&mut self.look, true);
        }
        self.note_fed();
    }

    /// Ends the starvation of a job that this worker no longer has.
    fn note_fed(&mut self) {
        if let Some(rank) =
            self.starved.take_if(|rank| self.running.iter().all(|running| running.job.rank != *rank))
        {
            self.scheduler.fed(&mut self.look, rank);
        }
    }

    /// Preempts the last job if it is behind a starved one.
    fn give_way(&mut self) -> Result<(), EngineError> {
        let last = self.running.last().map(|last| last.job.rank);
        if self.look.starved.is_some() && last > self.look.starved {
            self.preempt_last()?;
        }
        Ok(())
    }

    fn preempt_last(&mut self) -> Result<(), EngineError> {
        if let Some(Running { job, cache, .. }) = self.running.pop() {
            let parked = self.cache.preempt(cache)?;
            self.scheduler.preempted(&mut self.look, Waiting { job, parked });
            self.note_fed();
        }
        Ok(())
    }

    fn admit(&mut self) -> Result<(), EngineError> {
        self.is_pressed &= !self.running.is_empty();
        while !self.is_pressed && self.running.len() < self.limits.jobs {
            let Some(Waiting { job, parked }) = self.scheduler.take() else { break };
            if job.events.is_closed() {
                drop(parked);
                self.scheduler.left(&mut self.look);
                continue;
            }
            let Rank { can_wait, .. } = job.rank;
            let candidate = Candidate {
                id: job.rank.sequence(),
                is_urgent: !can_wait,
                tokens: &job.tokens,
                tokens_max: job.tokens_max,
            };
            match self.cache.admit(candidate, parked)? {
                Admission::Granted(cache) => {
                    self.insert(Running { job, cache, plan: None, is_new: true });
                    self.scheduler.admitted(&mut self.look);
                }
                Admission::Lacking(parked) => {
                    self.scheduler.refused(&self.look, Waiting { job, parked });
                    break;
                }
            }
        }
        Ok(())
    }

    fn insert(&mut self, running: Running<C::Sequence>) {
        let at = self.running.partition_point(|other| other.job.rank < running.job.rank);
        self.running.insert(at, running);
    }

    /// Computes a step. Returns false if the only job lacks room.
    fn step(&mut self) -> Result<bool, EngineError> {
        let mut step = self.cache.begin();
        self.plan();
        let mut lacking = self.grow(&mut step)?;
        self.is_pressed = !lacking.is_empty();
        let preempts = self.is_pressed && self.running.len() > 1;
        if preempts {
            // Before a block is taken. The victim's are free when no batch may read them any more.
            self.cache.finish(step);
            self.preempt_last()?;
            step = self.cache.begin();
            self.plan();
            lacking = self.grow(&mut step)?;
        }
        let first_lacking = lacking.first().copied();
        while !lacking.is_empty() {
            let is_left_out = |running: &&mut Running<_>| lacking.contains(&running.job.rank);
            self.running.iter_mut().filter(is_left_out).for_each(|running| running.plan = None);
            lacking = self.grow(&mut step)?;
        }
        let jobs = self.running.iter().filter(|running| running.plan.is_some()).count();
        if jobs > 0 {
            let mut segments: Vec<_> = self.running.iter_mut().filter_map(Running::segment).collect();
            let logits = self.network.forward(&*self.cache, &mut step, &mut segments);
            if logits.is_err() {
                self.running.clear(); // Before the step, so that nothing of it is cached.
            }
            let logits = logits?;
            self.cache.finish(step);
            self.proceed(&logits)?;
            self.scheduler.stepped(&mut self.look, |counts| {
                counts.steps += 1;
                counts.step_jobs += jobs as u64;
            });
        } else {
            self.cache.finish(step);
            self.scheduler.stalled(&self.look);
        }
        match first_lacking {
            Some(rank) if jobs == 0 && !preempts => {
                self.starved = Some(rank);
                self.scheduler.starve(&mut self.look, rank);
                Ok(false)
            }
            Some(_) => Ok(true),
            None => {
                if let Some(rank) = self.starved.take() {
                    self.scheduler.fed(&mut self.look, rank);
                }
                Ok(true)
            }
        }
    }

    /// Plans the tokens of each job, in the order of ranks.
    fn plan(&mut self) {
        let (mut budget, jobs) = (self.limits.step_tokens, self.running.len());
        for (index, running) in self.running.iter_mut().enumerate() {
            let (job, first) = (&running.job, self.cache.computed(&running.cache));
            let unknown = job.tokens.len() - first;
            // At least one token for each of the jobs behind.
            let known = unknown.min(budget.saturating_sub(jobs - index - 1).max(1));
            budget = budget.saturating_sub(known);
            let (mut tokens, has_logits) = (job.tokens[first..first + known].to_vec(), known == unknown);
            if has_logits {
                tokens.extend_from_slice(job.draft());
            }
            running.plan = Some(Plan { first, tokens, known, has_logits });
        }
    }

    /// Provides room for the planned tokens of all jobs. If some lack it, none got any; returns
    /// these.
    fn grow(&mut self, step: &mut C::Step) -> Result<Vec<Rank>, EngineError> {
        let mut growths: Vec<_> = self.running.iter_mut().filter_map(Running::growth).collect();
        let lacking = self.cache.grow(step, &mut growths)?;
        let mut planned: Vec<_> = self.running.iter_mut().filter(|running| running.plan.is_some()).collect();
        if lacking.is_empty() {
            planned.iter_mut().for_each(|running| running.is_new = false);
        }
        let is_first = |&&place: &&usize| std::mem::take(&mut planned[place].is_new);
        let failures = lacking.iter().filter(is_first).count() as u64;
        let ranks = lacking.iter().map(|&place| planned[place].job.rank).collect();
        if failures > 0 {
            self.scheduler.stepped(&mut self.look, |counts| counts.first_append_failures += failures);
        }
        Ok(ranks)
    }

    /// Chooses tokens by the logits of a step, keeps what was computed, and ends jobs.
    fn proceed(&mut self, logits: &[f32]) -> Result<(), EngineError> {
        let mut logits = logits.chunks_exact(self.network.vocab());
        let (end, mut forks, mut drafted, mut accepted) = (self.network.end(), Vec::new(), 0, 0);
        for running in &mut self.running {
            let Some(plan) = running.plan.take() else { continue };
            let Running { job, cache, .. } = running;
            let rows: Vec<&[f32]> = logits.by_ref().take(plan.logits()).collect();
            let Some(&first) = rows.first() else {
                self.cache.keep(cache, &job.tokens, plan.first + plan.tokens.len())?;
                continue;
            };
            let prompt = job.tokens.len();
            let drafts = &plan.tokens[plan.known..];
            for (index, row) in rows.into_iter().enumerate() {
                let token = job.push(row);
                if drafts.get(index) != Some(&token) || job.is_done(end) {
                    break;
                }
            }
            drafted += drafts.len() as u64;
            accepted += (job.tokens.len() - prompt - 1) as u64;
            // The last token is not computed yet.
            self.cache.keep(cache, &job.tokens, job.tokens.len() - 1)?;
            for answer in 1..=std::mem::take(&mut job.forks) {
                let mut fork = job.forked(answer);
                fork.tokens.truncate(prompt);
                let shared = self.cache.fork(cache, fork.rank.sequence())?;
                if shared.is_some() {
                    fork.push(first);
                }
                forks.push((fork, shared));
            }
        }
        self.scheduler.stepped(&mut self.look, |counts| {
            counts.drafted += drafted;
            counts.accepted += accepted;
        });
        for (job, cache) in forks {
            match cache {
                Some(cache) => {
                    self.insert(Running { job, cache, plan: None, is_new: false });
                    self.scheduler.forked(&mut self.look, None);
                }
                None => self.scheduler.forked(&mut self.look, Some(job)),
            }
        }
        for Running { job, cache, .. } in self.running.extract_if(.., |running| running.job.is_done(end)) {
            drop(cache);
            let _ = job.events.send(Event::Finished { answer: job.rank.answer });
            self.scheduler.ended(&mut self.look, false);
        }
        Ok(())
    }
}

impl<S> Running<S> {
    fn growth(&mut self) -> Option<Growth<'_, S>> {
        let Plan { tokens, known, .. } = self.plan.as_mut()?;
        Some(Growth { sequence: &mut self.cache, tokens, known: *known })
    }

    fn segment(&mut self) -> Option<Segment<'_, S>> {
        let plan = self.plan.as_ref()?;
        let (tokens, first, logits) = (&plan.tokens, plan.first, plan.logits());
        Some(Segment { cache: &mut self.cache, tokens, first, logits })
    }
}

//! One scheduler thread: continuous batching over a shared pool.
//!
//! A step begins a batch, appends to every running sequence, writes the new tokens through their
//! slots, reads the last token of each back, and only then ends the batch of the previous step, as
//! an engine does that prepares a step while the device executes the last one. So two batches of
//! each thread are always in flight, and frames that one thread frees stay retired for a while.
//!
//! Before a sequence is closed or preempted, all of its tokens are read back through its block
//! table. No address is kept between steps.
//!
//! With a prefix cache a sequence begins with the cached part of its prompt. Those tokens cost no
//! time and are not written, but read back at the end like the others, and must have the bytes of
//! this prompt.
//!
//! In a pool of several groups of layers, all of this is done in each list of a sequence. Tokens
//! that were given up are not read back; the next token must not see any of them. [States](states)
//! are overwritten as it grows, and kept at the cuts of a prompt.

mod check;
mod closed_loop;
mod samples;
mod stall;
mod states;

use std::mem;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use kvpool::{Batch, BlockTable, SequenceId};
use kvpool_load::{Access, Shape, Text, Transfer, full, slots};

use super::Replaying;
use super::free_list::Listed;
use super::layers::Group;
use super::scheduler::{Job, Running, Scheduler};
use super::sequence::ReplaySequence;
use super::sessions::Next;
use super::shared_clock::{Refusal, Taken};
use super::tally::{GroupUse, Tally};
use stall::Stall;

/// Time without progress of any thread after which the replay fails: blocks were lost.
const STUCK: Duration = Duration::from_secs(10);

const RUNNING_MAX: usize = 256;

/// A scheduler thread. See the [module](self).
pub struct Worker<'a> {
    at: Replaying<'a>,
    shape: Shape,
    /// In a closed loop, whether the pool has been filled.
    is_filled: bool,
    thread: usize,
    scheduler: Scheduler<Open>,
    clock_ns: u64,
    /// The batch of the previous step.
    previous: Option<Batch>,
    transfer: Transfer<'a>,
    table: BlockTable,
    /// The frames of a sequence in all lists, in a reused buffer.
    frames: Vec<i32>,
    /// The ids of a prompt, in a reused buffer.
    prompt: Vec<u32>,
    /// The running jobs with new tokens in this step, by index in the scheduler.
    advanced: Vec<usize>,
    next_sample_ns: u64,
    stalled: Option<Stall>,
    /// The request and attempt that was refused last when it was opened.
    refused: Option<(u32, u32)>,
    tally: Tally,
}

struct Open {
    sequence: ReplaySequence,
    text: Text,
    found: u64,
    /// Tokens that had blocks when it was opened: cached, or reserved for.
    admitted: u64,
    /// The blocks in a list of each group that the cached prefix does without.
    skipped: Vec<usize>,
    listed: Listed,
    /// The tokens of which its states are.
    computed: usize,
    /// The tokens at which its states are to be kept.
    cut: Option<u64>,
    /// Whether its runs count: in a closed loop, not if it began while the pool was being filled.
    counts: bool,
}

enum Turn {
    Advanced,
    /// Blocks will be free soon: no tokens in this step.
    Skipped,
    /// The job was preempted, which shortens the list of running jobs.
    Preempted,
}

#[derive(Default)]
struct StepTokens {
    prompt: u64,
    decode: u64,
    /// Those for which no blocks had been reserved.
    held: u64,
    /// Whether a job was preempted: at most one per step, because its blocks are retired until the
    /// step has ended.
    preempted: bool,
}

impl<'a> Worker<'a> {
    pub fn new(at: Replaying<'a>, thread: usize) -> Self {
        let fill = at.options.fill;
        let running_max = if fill.is_some() { usize::MAX } else { RUNNING_MAX };
        Self {
            at,
            shape: at.pool.shape(),
            is_filled: fill.is_none(),
            thread,
            scheduler: Scheduler::new(running_max),
            clock_ns: 0,
            previous: None,
            transfer: Transfer::new(at.pool.rows(), &at.clock.transfers),
            table: BlockTable::default(),
            frames: Vec::new(),
            prompt: Vec::new(),
            advanced: Vec::new(),
            next_sample_ns: 0,
            stalled: None,
            refused: None,
            tally: Tally { groups: vec![GroupUse::default(); at.pool.groups().len()], ..Tally::default() },
        }
    }

    /// Returns the most blocks that a sequence has held by the time that it has this many tokens.
    fn blocks(&self, tokens: u64) -> usize {
        self.at.pool.lists().blocks_with_states(tokens, self.at.options.step_tokens)
    }

    /// Runs until no request is left. An error ends the replay and becomes a finding.
    pub fn run(mut self) -> Tally {
        if let Err(finding) = self.serve() {
            self.tally.find(finding);
            self.at.clock.stop();
        }
        self.at.clock.set_idle(self.thread);
        self.scheduler.running().clear();
        self.at.pool.trim();
        self.tally.corrupt = self.transfer.corrupt;
        self.tally.tokens_verified = self.transfer.tokens_verified;
        self.tally
    }

    fn serve(&mut self) -> Result<(), String> {
        while !self.at.clock.is_stopped() {
            if self.at.clock.must_halt() {
                return self.halt();
            }
            self.admit()?;
            self.at.clock.publish(self.thread, self.clock_ns, self.scheduler.oldest());
            self.at.pool.set_time(Duration::from_nanos(self.clock_ns));
            if !self.scheduler.running().is_empty() {
                if self.at.clock.may_step(self.thread, self.clock_ns) {
                    self.step()?;
                } else {
                    self.give_turn()?;
                }
                continue;
            }
            self.at.clock.set_idle(self.thread);
            if self.scheduler.has_waiting() {
                self.wait_for_others()?;
                continue;
            }
            self.end_previous();
            match self.at.clock.next_arrival(self.thread) {
                Next::At(arrival_ns) => self.clock_ns = self.clock_ns.max(arrival_ns),
                Next::Undecided => self.give_turn()?,
                Next::Never => break,
            }
        }
        self.end_previous();
        Ok(())
    }

    /// Halts without a batch in flight until the end of the replay; then reads back and closes all
    /// open sequences.
    fn halt(&mut self) -> Result<(), String> {
        self.at.clock.set_idle(self.thread);
        self.end_previous();
        self.at.clock.halt();
        let batch = self.at.pool.begin_step(self.thread);
        for running in mem::take(self.scheduler.running()) {
            self.check_all(&batch, &running)?;
            self.release(running);
        }
        Ok(())
    }

    /// Rejects waiting requests that no longer fit into the shrunken pool.
    fn reject_oversized(&mut self) {
        let Replaying { pool, options, .. } = self.at;
        let blocks = |job: &Job| pool.lists().blocks_with_states(job.total, options.step_tokens);
        let fits = |job: &Job| blocks(job) <= pool.total_blocks();
        for job in self.scheduler.reject(fits) {
            self.reject(job.request);
        }
    }

    fn reject(&mut self, request: u32) {
        self.tally.rejected += 1;
        self.at.clock.settle(self.thread, request, self.clock_ns);
    }

    /// Takes the arrived requests, and starts those that fit.
    fn admit(&mut self) -> Result<(), String> {
        loop {
            self.reject_oversized();
            let now = self.at.options.fill.map_or(Duration::from_nanos(self.clock_ns), |_| Duration::MAX);
            while self.scheduler.wants_request() {
                let Some(taken) = self.at.clock.take_due(self.thread, now) else {
                    break;
                };
                if self.scheduler.running().is_empty() {
                    self.stalled = None;
                }
                let Taken { index, order, arrival_ns, request } = taken;
                if self.blocks(request.tokens()) > self.at.pool.total_blocks() {
                    self.reject(index);
                } else {
                    self.scheduler.enqueue(Job::new(index, order, arrival_ns, request));
                }
            }
            // Not every free block can be allocated: a shrinking pool keeps the blocks that it
            // empties. So a preempted job is admitted only after another job got a token.
            let is_short = self.stalled.is_some() && !self.scheduler.running().is_empty();
            if !self.scheduler.has_waiting() || self.at.clock.is_admission_paused() || is_short {
                return Ok(());
            }
            let (Replaying { pool, options, .. }, free) = (self.at, self.at.pool.free_blocks());
            let blocks = |tokens| pool.lists().blocks(tokens, options.step_tokens);
            let lacks = |running: &Running<Open>| {
                let rest = blocks(running.job.prompt.saturating_sub(running.held));
                pool.lists().count() + rest.saturating_sub(running.sequence.sequence.reserved_blocks())
            };
            let used = || pool.total_blocks().saturating_sub(free) + self.scheduler.owed(lacks);
            let is_full = self.at.options.fill.is_some_and(|fill| used() >= fill)
                && !self.scheduler.running().is_empty();
            // A cached prompt needs memory for a copy of its states too, where it is cut.
            let states = pool.lists().state_frames() * if self.at.texts.is_some() { 2 } else { 1 };
            let whole = |tokens| (blocks(tokens) + states).min(pool.total_blocks());
            let Some(job) = (!is_full).then(|| self.scheduler.admit(free, whole, lacks)).flatten() else {
                self.is_filled = true;
                return Ok(());
            };
            if !self.start(job)? {
                return Ok(());
            }
        }
    }

    /// Opens a job's sequence with the cached part of its prompt; false if the pool has no room for
    /// it.
    fn start(&mut self, mut job: Job) -> Result<bool, String> {
        let Job { request, attempt, prompt, .. } = job;
        self.prompt.clear();
        let text = match self.at.texts {
            Some(texts) => {
                let text = texts.text(request, self.at.clock.request(request));
                text.ids(prompt as usize, &mut self.prompt);
                text
            }
            None => {
                // An admission has the blocks of a prompt, whatever its tokens.
                let tokens = if self.at.pool.is_grouped() { prompt as usize } else { 0 };
                self.prompt.resize(tokens, 0);
                Text::of_attempt(request, attempt)
            }
        };
        let id = SequenceId(u64::from(attempt) << 32 | u64::from(request));
        let step_tokens = self.at.options.step_tokens;
        let session = self.at.clock.request(request).turn.map(|turn| turn.session);
        let sequence = loop {
            match ReplaySequence::open(self.at.pool, (id, session), &self.prompt, step_tokens).map_err(full) {
                Ok(sequence) => break sequence,
                Err(Ok(_)) if self.end_previous() => {}
                Err(Ok(space)) => {
                    // While others proceed, it is refused again in each step.
                    if self.refused.replace((request, attempt)) != Some((request, attempt)) {
                        self.count_refusal(space, 0);
                    }
                    self.scheduler.enqueue(job);
                    return Ok(false);
                }
                Err(Err(reason)) => return Err(format!("request {request}: opening it: {reason}")),
            }
        };
        let cached = sequence.len();
        self.count_recomputed(&mut job, cached as u64);
        let admitted = if self.at.pool.is_grouped() { prompt } else { cached as u64 };
        self.at.usage.grow(admitted);
        let groups = self.at.pool.groups().iter();
        let skipped = groups.map(|group| given_up(&sequence, group)).collect();
        self.tally.blocks_allocated += self.check_run(request, &sequence)?;
        let open = Open {
            sequence,
            text,
            found: cached as u64,
            admitted,
            skipped,
            listed: Listed::default(),
            computed: 0,
            cut: None,
            counts: self.is_filled,
        };
        self.scheduler.start(job, cached as u64, open);
        Ok(true)
    }

    fn step(&mut self) -> Result<(), String> {
        let mut batch = self.at.pool.begin_step(self.thread);
        let mut tokens = StepTokens::default();
        self.advanced.clear();
        let mut place = 0;
        while place < self.scheduler.running().len() {
            match self.turn(&mut batch, place, &mut tokens)? {
                Turn::Advanced => {
                    self.advanced.push(place);
                    place += 1;
                }
                Turn::Skipped => place += 1,
                Turn::Preempted => {}
            }
        }
        self.at.usage.grow(tokens.held);
        self.transfer.flush(Access::Write)?;
        self.checkpoint(&mut batch)?;
        self.check_last(&batch)?;
        self.end_previous();
        self.previous = Some(batch);
        let end_ns = self.clock_ns + self.at.options.costs().of_step(tokens.prompt, tokens.decode);
        self.note_first_tokens(end_ns);
        self.retire_done(end_ns)?;
        self.publish_frames();

        if self.advanced.is_empty() {
            // No job got a token: other threads have the blocks.
            return self.wait_for_others();
        }
        self.stalled = None;
        self.clock_ns = end_ns;
        self.at.clock.tokens.fetch_add(tokens.prompt + tokens.decode, Relaxed);
        self.sample();
        Ok(())
    }

    /// Executes one sequence's part of a step: appends tokens and gathers them for writing.
    fn turn(&mut self, batch: &mut Batch, place: usize, step: &mut StepTokens) -> Result<Turn, String> {
        let running = &mut self.scheduler.running()[place];
        let budget = self.at.options.step_tokens.saturating_sub(step.prompt);
        let (tokens, in_prompt) = (running.next_tokens(budget), running.in_prompt());
        if tokens == 0 {
            return Ok(Turn::Skipped);
        }
        let cut = if in_prompt { self.next_cut(place) } else { None };
        let mut tokens = cut.map_or(tokens, |cut| tokens.min(cut - self.scheduler.running()[place].held));
        let mut refused = self.append(batch, place, tokens)?;
        if let Some((free, _)) = refused {
            // A piece of a prompt is truncated to the free blocks.
            let held = self.scheduler.running()[place].held;
            let fitting = self.at.pool.lists().fitting(held, free);
            if in_prompt && (1..tokens).contains(&fitting) {
                tokens = fitting;
                refused = self.append(batch, place, tokens)?;
            }
        }
        if let Some(space) = refused {
            return self.refused(batch, place, tokens, space, step);
        }
        let running = &mut self.scheduler.running()[place];
        let Running { job, held, sequence: Open { sequence, text, admitted, listed, .. } } = running;
        let new = *held as usize..(*held + tokens) as usize;
        step.held += (*held + tokens).max(*admitted) - (*held).max(*admitted);
        *held += tokens;
        if let Some(list) = self.at.list {
            let hits = list.grow(listed, text, new.end, job.prompt as usize);
            self.tally.listed_hits += if job.attempt == 0 { hits } else { 0 };
        }
        *(if in_prompt { &mut step.prompt } else { &mut step.decode }) += tokens;
        self.tally.tokens += tokens;
        self.at.clock.resume_admission(job.order);
        for list in 0..sequence.lists() {
            let (of, slots) =
                ((job.request, job.attempt, list), slots(batch, sequence.list(list), self.shape));
            self.transfer.add(Access::Write, of, text, new.clone(), slots)?;
        }
        running.sequence.cut = cut;
        self.overwrite_states(place, new.end, in_prompt)?;
        Ok(Turn::Advanced)
    }

    /// Appends; after a refusal, ends the previous step's batch and retries. If that is refused
    /// too, returns the free and the retired blocks.
    fn append(
        &mut self,
        batch: &mut Batch,
        place: usize,
        tokens: u64,
    ) -> Result<Option<(usize, usize)>, String> {
        loop {
            let running = &mut self.scheduler.running()[place];
            let in_prompt = running.in_prompt();
            let Running { held, sequence: Open { sequence, text, found, .. }, job } = running;
            let blocks = self.at.pool.lists().added(*held..*held + tokens);
            let start = (blocks > 0).then(Instant::now);
            // The cache finds decoded tokens by their ids: for the next request of a conversation,
            // or for this one after a preemption.
            let appended = if self.at.texts.is_some() && !in_prompt {
                sequence.append(batch, &[text.id(*held as usize)])
            } else {
                sequence.append(batch, tokens as usize)
            };
            let error = match appended {
                Err(error) => error,
                Ok(restored) => {
                    if let Some(start) = start {
                        self.tally.allocate.record_time(start.elapsed());
                    }
                    self.tally.blocks_allocated += blocks as u64;
                    // As the cache does, at the first append.
                    if self.at.texts.is_some() && *held == *found {
                        let blocks = |tokens: u64| tokens as usize / sequence.list(0).block_tokens();
                        self.tally.count_lookup(job.attempt, blocks(job.prompt), blocks(*found));
                    }
                    self.restore(place, &restored)?;
                    return Ok(None);
                }
            };
            let space = full(error).map_err(|reason| {
                format!("request {}: appending {tokens} to {held} tokens: {reason}", job.request)
            })?;
            if !self.end_previous() {
                return Ok(Some(space));
            }
        }
    }

    /// Handles a full pool: waits for retired blocks, or preempts the job that arrived last.
    fn refused(
        &mut self,
        batch: &Batch,
        place: usize,
        tokens: u64,
        (free, retired): (usize, usize),
        step: &mut StepTokens,
    ) -> Result<Turn, String> {
        self.count_refusal((free, retired), step.held);
        let total = self.at.pool.total_blocks();
        let running = &self.scheduler.running()[place];
        let (order, all) = (running.job.order, running.job.total);
        let wanted = running.sequence.sequence.lacks(running.held..running.held + tokens);
        if step.preempted || free + retired >= wanted {
            return Ok(Turn::Skipped);
        }
        let fits = self.blocks(all) <= total;
        if fits && self.scheduler.running().len() == 1 && self.at.clock.is_oldest(order) {
            self.at.clock.pause_admission(order);
            return Ok(Turn::Skipped);
        }
        step.preempted = true;
        self.tally.preempted += 1;
        // The tokens of this step are written first, so that they can be read back.
        self.transfer.flush(Access::Write)?;
        let last = self.scheduler.running().len() - 1;
        self.advanced.retain(|&other| other != last);
        if let Some(gone) = self.scheduler.preempt() {
            self.at.clock.resume_admission(gone.job.order);
            self.check_all(batch, &gone)?;
            self.release(gone);
        }
        Ok(if last == place { Turn::Preempted } else { Turn::Skipped })
    }

    /// Counts a refusal, in a step that has added `tokens` tokens to those held.
    fn count_refusal(&mut self, (free, retired): (usize, usize), tokens: u64) {
        // A waiting job retries in every step, and counts as refused once.
        self.tally.refused += u64::from(self.stalled.is_none());
        let total = self.at.pool.total_blocks() as f64;
        let (used, owned) = (1.0 - free as f64 / total, 1.0 - (free + retired) as f64 / total);
        let usage = self.at.usage;
        let refusal = || Refusal { used, owned, tokens: usage.tokens() + tokens };
        self.at.clock.first_refusal.get_or_init(refusal);
        self.tally.utilization.max = self.tally.utilization.max.max(used);
    }

    /// Closes the sequences whose last token was written in the step that ends at `end_ns`.
    fn retire_done(&mut self, end_ns: u64) -> Result<(), String> {
        if !self.scheduler.running().iter().any(Running::is_done) {
            return Ok(());
        }
        let all = mem::take(self.scheduler.running());
        let (done, on): (Vec<_>, Vec<_>) = all.into_iter().partition(Running::is_done);
        *self.scheduler.running() = on;
        let batch = self.previous.take();
        for mut running in done {
            if let Some(batch) = &batch {
                self.check_all(batch, &running)?;
            }
            self.expect_return(&mut running, end_ns);
            let request = running.job.request;
            self.release(running);
            self.tally.completed += 1;
            self.at.clock.settle(self.thread, request, end_ns);
        }
        self.previous = batch;
        Ok(())
    }

    fn release(&mut self, gone: Running<Open>) {
        let Open { sequence, found, admitted, skipped, .. } = &gone.sequence;
        let blocks = self.at.pool.lists().added(*found..gone.held);
        self.tally.blocks_freed += (blocks + self.at.pool.lists().state_frames()) as u64;
        self.at.usage.close(gone.held.max(*admitted));
        for ((group, skipped), used) in self.at.pool.groups().iter().zip(skipped).zip(&mut self.tally.groups)
        {
            let given_up = given_up(sequence, group) - skipped;
            used.given_up += (given_up * group.lists.len()) as u64;
        }
        let start = Instant::now();
        drop(gone.sequence.sequence);
        self.tally.free.record_time(start.elapsed());
        if let Some(list) = self.at.list {
            list.free(gone.sequence.listed);
        }
    }

    fn wait_for_others(&mut self) -> Result<(), String> {
        self.at.clock.set_idle(self.thread);
        self.clock_ns = self.clock_ns.max(self.at.clock.latest_clock_ns());
        self.give_turn()
    }

    /// Ends the batch of the previous step, if it is in flight. Its bytes have been written.
    fn end_previous(&mut self) -> bool {
        self.previous.take().map(Batch::finish).is_some()
    }

    /// Yields to the other threads; fails when none of them makes progress.
    fn give_turn(&mut self) -> Result<(), String> {
        // An idle thread must not keep a batch in flight.
        self.end_previous();
        let transfers = self.at.clock.transfers.load(Relaxed);
        match &mut self.stalled {
            Some(stall) if stall.transfers == transfers => {
                if stall.check() > STUCK {
                    let (free, total) = (self.at.pool.free_blocks(), self.at.pool.total_blocks());
                    return Err(format!(
                        "stuck: no thread made progress in {STUCK:?}, with {free} of {total} blocks free"
                    ));
                }
            }
            _ => self.stalled = Some(Stall::new(transfers)),
        }
        thread::yield_now();
        Ok(())
    }
}

/// Returns the blocks that a sequence has given up in each list of a group.
fn given_up(sequence: &ReplaySequence, group: &Group) -> usize {
    if group.lists.is_empty() { 0 } else { sequence.list(group.lists.start).blocks_given_up() }
}

//! One scheduler thread: continuous batching over a pool that it shares with the others.
//!
//! A step begins a batch, appends to every sequence that runs, writes the new tokens through their slots, reads the
//! last of each back, and only then ends the batch of the step before, as an engine does that prepares a step while
//! the device is at work on the last one. So two batches of each thread are always in flight, and what one thread frees
//! stays retired for a while.
//!
//! When a sequence ends, and when one gives way, all of its tokens are read back through its block table before its
//! blocks go. No address is remembered from one step to the next.
//!
//! Where prefixes are cached, a sequence begins with what is there of its prompt. Those tokens cost no time and are not
//! written, and are read back at the end like all others: they must be what this prompt is made of.

use std::mem;
use std::thread;
use std::time::{Duration, Instant};

use super::Options;
use super::content::Shape;
use super::floor::Floor;
use super::lane::{Job, Lane, Running};
use super::memory::{Memory, Refusal};
use super::tally::{Tally, record};
use super::text::{Text, Texts};
use super::transfer::Transfer;

/// How long all threads may wait for each other before the replay is given up: blocks must have been lost.
const STUCK: Duration = Duration::from_secs(10);

/// What counts as waited between two looks at most.
const LOOK: Duration = Duration::from_millis(100);

/// Sequences that a thread runs at a time.
const RUNNING_MAX: usize = 256;

/// See the [module](self).
pub struct Engine<'a, M: Memory> {
    memory: &'a M,
    floor: &'a Floor<'a>,
    options: &'a Options,
    shape: Shape,
    /// What tokens are, where prefixes are cached.
    texts: Option<&'a Texts>,
    thread: usize,
    lane: Lane<Held<M::Sequence>>,
    clock_ns: u64,
    previous: Option<M::Batch>,
    transfer: Transfer,
    table: M::Table,
    /// The ids of a prompt.
    prompt: Vec<u32>,
    /// The places in the lane of those who got tokens in this step.
    advanced: Vec<usize>,
    next_sample_ns: u64,
    stalled: Option<Stall>,
    tally: Tally,
}

/// What a job that runs holds.
struct Held<S> {
    sequence: S,
    text: Text,
    /// Blocks that it found in the cache.
    found: usize,
}

/// A thread that waits, since the pulse of all threads was last seen to change.
struct Stall {
    pulse: u64,
    seen: Instant,
    waited: Duration,
}

impl Stall {
    fn new(pulse: u64) -> Self {
        Self { pulse, seen: Instant::now(), waited: Duration::ZERO }
    }

    /// One more look. A long time between two looks is one in which the whole process may have been stopped, and says
    /// little about the others.
    fn look(&mut self) -> Duration {
        let before = mem::replace(&mut self.seen, Instant::now());
        self.waited += self.seen.duration_since(before).min(LOOK);
        self.waited
    }
}

/// What became of one sequence's part of a step.
enum Turn {
    Advanced,
    /// Blocks will be free soon; its turn is left out.
    LeftOut,
    /// It gave way, and the lane is shorter.
    GaveWay,
}

/// Tokens of a step, for its cost.
#[derive(Default)]
struct StepTokens {
    prompt: u64,
    decode: u64,
    /// One gives way in a step at most: its blocks come only when the step has ended.
    gave_way: bool,
}

impl<'a, M: Memory> Engine<'a, M> {
    /// A thread with nothing to do yet.
    pub fn new(
        memory: &'a M,
        floor: &'a Floor<'a>,
        options: &'a Options,
        shape: Shape,
        texts: Option<&'a Texts>,
        thread: usize,
    ) -> Self {
        Self {
            memory,
            floor,
            options,
            shape,
            texts,
            thread,
            lane: Lane::new(RUNNING_MAX),
            clock_ns: 0,
            previous: None,
            transfer: Transfer::new(shape),
            table: M::Table::default(),
            prompt: Vec::new(),
            advanced: Vec::new(),
            next_sample_ns: 0,
            stalled: None,
            tally: Tally::default(),
        }
    }

    /// Runs until no request is left. What goes wrong ends the replay, and stands in the tally.
    pub fn run(mut self) -> Tally {
        if let Err(finding) = self.serve() {
            self.tally.find(finding);
            self.floor.stop();
        }
        self.floor.rest(self.thread);
        self.lane.running().clear();
        self.memory.leave();
        self.tally
    }

    fn serve(&mut self) -> Result<(), String> {
        while !self.floor.is_stopped() {
            if self.floor.must_halt() {
                self.halt()?;
                continue;
            }
            self.admit()?;
            self.floor.publish(self.thread, self.clock_ns, self.lane.oldest());
            self.memory.set_time(Duration::from_nanos(self.clock_ns));
            if !self.lane.running().is_empty() {
                if self.floor.may_step(self.thread, self.clock_ns) {
                    self.step()?;
                } else {
                    self.give_turn()?;
                }
                continue;
            }
            self.floor.rest(self.thread);
            if self.lane.has_waiting() {
                self.wait_for_others()?;
                continue;
            }
            self.previous = None;
            if let Some(arrival) = self.floor.next_arrival() {
                self.clock_ns = self.clock_ns.max(arrival.as_nanos() as u64);
            } else {
                break;
            }
        }
        self.previous = None;
        Ok(())
    }

    /// Stands still, with nothing in flight, while the pool is looked at. If that was all that was wanted, everything that
    /// this thread holds is read back before it goes.
    fn halt(&mut self) -> Result<(), String> {
        self.floor.rest(self.thread);
        self.previous = None;
        self.floor.halt();
        self.stalled = None;
        if self.floor.is_stopped() {
            let batch = self.memory.begin();
            for running in mem::take(self.lane.running()) {
                self.check_all(&batch, &running)?;
                self.release(running);
            }
        }
        Ok(())
    }

    /// Rejects whoever waits for more blocks than the pool has since it shrank.
    fn reject_oversized(&mut self) {
        let (shape, total) = (self.shape, self.memory.blocks());
        for _ in 0..self.lane.reject(|job| shape.blocks(job.total) <= total) {
            self.reject();
        }
    }

    fn reject(&mut self) {
        self.tally.rejected += 1;
        self.floor.settle();
    }

    /// Deals itself what has arrived, and starts what fits.
    fn admit(&mut self) -> Result<(), String> {
        loop {
            self.reject_oversized();
            while self.lane.wants_request() {
                let Some((index, request)) = self.floor.take_due(Duration::from_nanos(self.clock_ns)) else {
                    break;
                };
                if self.shape.blocks(request.tokens()) > self.memory.blocks() {
                    self.reject();
                } else {
                    self.lane.wait(Job::new(index, request));
                }
            }
            // Free is not always to be had: a pool that shrinks keeps what it empties. So whoever has just given way does not
            // come back before somebody has got a token.
            let is_short = self.stalled.is_some() && !self.lane.running().is_empty();
            if !self.lane.has_waiting() || self.floor.anybody_starves() || is_short {
                return Ok(());
            }
            let shape = self.shape;
            let Some(job) = self.lane.admit(self.memory.free_blocks(), |tokens| shape.blocks(tokens)) else {
                return Ok(());
            };
            if !self.start(job)? {
                return Ok(());
            }
        }
    }

    /// Opens a job's sequence, with what is cached of its prompt; false if the pool has become too small for it.
    fn start(&mut self, job: Job) -> Result<bool, String> {
        let Job { request, attempt, prompt, .. } = job;
        self.prompt.clear();
        let text = match self.texts {
            Some(texts) => {
                let text = texts.text(request, self.floor.request(request));
                text.ids(prompt as usize, &mut self.prompt);
                text
            }
            None => Text::of_attempt(request, attempt),
        };
        let id = u64::from(attempt) << 32 | u64::from(request);
        let (sequence, cached) = match self.memory.open(id, &self.prompt) {
            Ok(opened) => opened,
            Err(Refusal::Full { .. }) => {
                self.lane.wait(job);
                return Ok(false);
            }
            Err(Refusal::Failed(reason)) => return Err(format!("request {request}: opening it: {reason}")),
        };
        let block_tokens = self.shape.block_tokens;
        let found = cached / block_tokens;
        if self.texts.is_some() {
            self.tally.count_lookup(attempt, prompt as usize / block_tokens, found);
        }
        self.lane.start(job, cached as u64, Held { sequence, text, found });
        Ok(true)
    }

    fn step(&mut self) -> Result<(), String> {
        let mut batch = self.memory.begin();
        let mut tokens = StepTokens::default();
        self.advanced.clear();
        let mut place = 0;
        while place < self.lane.running().len() {
            match self.turn(&mut batch, place, &mut tokens)? {
                Turn::Advanced => {
                    self.advanced.push(place);
                    place += 1;
                }
                Turn::LeftOut => place += 1,
                Turn::GaveWay => {}
            }
        }
        self.write()?;
        self.check_last(&batch)?;
        self.previous = Some(batch);
        self.retire_done()?;

        if self.advanced.is_empty() {
            // Nobody got a token: no step has been made, and the blocks to wait for are other threads'.
            return self.wait_for_others();
        }
        self.stalled = None;
        self.clock_ns += self.options.step_cost.of(tokens.prompt, tokens.decode);
        self.floor.count(tokens.prompt + tokens.decode);
        self.sample();
        Ok(())
    }

    fn write(&mut self) -> Result<(), String> {
        if !self.transfer.is_empty() {
            self.floor.beat();
        }
        self.transfer.write(self.memory)
    }

    /// One sequence's part of a step: appended, staged to be written, or refused.
    fn turn(&mut self, batch: &mut M::Batch, place: usize, step: &mut StepTokens) -> Result<Turn, String> {
        let running = &mut self.lane.running()[place];
        let budget = self.options.step_tokens.saturating_sub(step.prompt);
        let (tokens, in_prompt) = (running.next_tokens(budget), running.in_prompt());
        if tokens == 0 {
            return Ok(Turn::LeftOut);
        }
        let mut tokens = tokens;
        let mut refused = self.append(batch, place, tokens)?;
        if let Some((free, _)) = refused {
            // A piece of a prompt is cut to what is free.
            let held = self.lane.running()[place].held;
            let block_tokens = self.shape.block_tokens as u64;
            let fitting = (held.div_ceil(block_tokens) + free as u64) * block_tokens - held;
            if in_prompt && (1..tokens).contains(&fitting) {
                tokens = fitting;
                refused = self.append(batch, place, tokens)?;
            }
        }
        if let Some(space) = refused {
            return self.refused(batch, place, tokens, space, step);
        }
        let Running { job, held, sequence: Held { sequence, text, .. } } = &mut self.lane.running()[place];
        let (from, until) = (*held as usize, (*held + tokens) as usize);
        *held += tokens;
        *(if in_prompt { &mut step.prompt } else { &mut step.decode }) += tokens;
        self.tally.tokens += tokens;
        self.floor.fed(job.request);

        let mut at = from;
        while at < until {
            let next = until.min(at + self.transfer.room());
            let slots = |out: &mut Vec<i64>| self.memory.slots(batch, sequence, at..next, out);
            self.transfer.gather((job.request, job.attempt), text, at..next, slots)?;
            if self.transfer.room() == 0 {
                self.floor.beat();
                self.transfer.write(self.memory)?;
            }
            at = next;
        }
        Ok(Turn::Advanced)
    }

    /// Appends; when refused, tries again without this thread's last step in flight. Returns what was free and what
    /// was retired when refused for good.
    fn append(
        &mut self,
        batch: &mut M::Batch,
        place: usize,
        tokens: u64,
    ) -> Result<Option<(usize, usize)>, String> {
        let running = &mut self.lane.running()[place];
        let in_prompt = running.in_prompt();
        let Running { held, sequence: Held { sequence, text, .. }, job } = running;
        // What is decoded is known from now on: it is found again by the next turn, or by this one if it gives way.
        let said = (self.texts.is_some() && !in_prompt).then(|| text.id(*held as usize));
        let blocks = (self.shape.blocks(*held + tokens) - self.shape.blocks(*held)) as u64;
        loop {
            let start = (blocks > 0).then(Instant::now);
            match self.memory.append(batch, sequence, tokens as usize, said.as_slice()) {
                Ok(()) => {
                    if let Some(start) = start {
                        record(&mut self.tally.allocate_ns, start.elapsed());
                    }
                    self.tally.blocks_allocated += blocks;
                    return Ok(None);
                }
                Err(Refusal::Full { .. }) if self.previous.is_some() => self.previous = None,
                Err(Refusal::Full { free, retired }) => return Ok(Some((free, retired))),
                Err(Refusal::Failed(reason)) => {
                    return Err(format!(
                        "request {}: appending {tokens} to {held} tokens: {reason}",
                        job.request
                    ));
                }
            }
        }
    }

    /// The pool is full: waits for what is retired, or lets the last to arrive give way.
    fn refused(
        &mut self,
        batch: &M::Batch,
        place: usize,
        tokens: u64,
        (free, retired): (usize, usize),
        step: &mut StepTokens,
    ) -> Result<Turn, String> {
        // One that waits asks in every step, and is refused once.
        self.tally.refused += u64::from(self.stalled.is_none());
        let total = self.memory.blocks();
        let used = 1.0 - free as f64 / total as f64;
        let owned = 1.0 - (free + retired) as f64 / total as f64;
        self.floor.note_refusal(used, owned);
        self.tally.utilization.max = self.tally.utilization.max.max(used);
        let running = &self.lane.running()[place];
        let request = running.job.request;
        let wanted = self.shape.blocks(running.held + tokens) - self.shape.blocks(running.held);
        if step.gave_way || free + retired >= wanted {
            return Ok(Turn::LeftOut);
        }
        let fits = self.shape.blocks(running.job.total) <= total;
        if fits && self.lane.running().len() == 1 && self.floor.is_oldest(request) {
            self.floor.starve(request);
            return Ok(Turn::LeftOut);
        }
        step.gave_way = true;
        self.tally.preempted += 1;
        // What was appended in this step is written first, so that it is there to be read back.
        self.write()?;
        let last = self.lane.running().len() - 1;
        self.advanced.retain(|&other| other != last);
        if let Some(gone) = self.lane.give_way() {
            self.floor.fed(gone.job.request);
            self.check_all(batch, &gone)?;
            self.release(gone);
        }
        Ok(if last == place { Turn::GaveWay } else { Turn::LeftOut })
    }

    /// Ends the sequences that have all their tokens.
    fn retire_done(&mut self) -> Result<(), String> {
        if !self.lane.running().iter().any(Running::is_done) {
            return Ok(());
        }
        let all = mem::take(self.lane.running());
        let (done, on): (Vec<_>, Vec<_>) = all.into_iter().partition(Running::is_done);
        *self.lane.running() = on;
        let batch = self.previous.take();
        for running in done {
            if let Some(batch) = &batch {
                self.check_all(batch, &running)?;
            }
            self.release(running);
            self.tally.completed += 1;
            self.floor.settle();
        }
        self.previous = batch;
        Ok(())
    }

    fn release(&mut self, gone: Running<Held<M::Sequence>>) {
        self.tally.blocks_freed += (self.shape.blocks(gone.held) - gone.sequence.found) as u64;
        let start = Instant::now();
        drop(gone.sequence.sequence);
        record(&mut self.tally.free_ns, start.elapsed());
    }

    /// Reads back the last token of every sequence that got one, by its slot.
    fn check_last(&mut self, batch: &M::Batch) -> Result<(), String> {
        if !self.options.verify {
            return Ok(());
        }
        for index in 0..self.advanced.len() {
            let Running { job, held, sequence: Held { sequence, text, .. } } =
                &self.lane.running()[self.advanced[index]];
            let last = *held as usize - 1..*held as usize;
            let slots = |out: &mut Vec<i64>| self.memory.slots(batch, sequence, last.clone(), out);
            self.transfer.gather((job.request, job.attempt), text, last.clone(), slots)?;
            if self.transfer.room() == 0 {
                check(&mut self.transfer, self.memory, self.floor, &mut self.tally)?;
            }
        }
        check(&mut self.transfer, self.memory, self.floor, &mut self.tally)
    }

    /// Reads back every token of a sequence, by its block table.
    fn check_all(&mut self, batch: &M::Batch, running: &Running<Held<M::Sequence>>) -> Result<(), String> {
        let Running { job, held, sequence: Held { sequence, text, .. } } = running;
        let (held, block_tokens) = (*held as usize, self.shape.block_tokens);
        let table = self.memory.block_table(batch, sequence, &mut self.table)?;
        let blocks = self.shape.blocks(held as u64);
        if table.len() != blocks {
            let found = table.len();
            return Err(format!("request {}: a table of {found} blocks for {held} tokens", job.request));
        }
        self.tally.count_runs(table);
        if !self.options.verify {
            return Ok(());
        }
        let mut at = 0;
        while at < held {
            let next = held.min(at + self.transfer.room());
            self.transfer.gather((job.request, job.attempt), text, at..next, |out| {
                let mut token = at;
                while token < next {
                    let (block, offset) = (token / block_tokens, token % block_tokens);
                    let count = (block_tokens - offset).min(next - token);
                    let slot = i64::from(table[block]) * block_tokens as i64 + offset as i64;
                    out.extend(slot..slot + count as i64);
                    token += count;
                }
                Ok(())
            })?;
            check(&mut self.transfer, self.memory, self.floor, &mut self.tally)?;
            at = next;
        }
        Ok(())
    }

    /// The first thread looks at the pool now and then.
    fn sample(&mut self) {
        if self.thread != 0 || self.clock_ns < self.next_sample_ns {
            return;
        }
        self.next_sample_ns = self.clock_ns + self.options.sample_ns;
        let free = self.memory.free_space();
        self.tally.utilization.add(1.0 - free.blocks as f64 / self.memory.blocks() as f64);
        self.tally.fragmentation.add(free.fragmentation);
    }

    /// Waits for blocks that the other threads have.
    fn wait_for_others(&mut self) -> Result<(), String> {
        self.floor.rest(self.thread);
        self.clock_ns = self.clock_ns.max(self.floor.latest_clock_ns());
        self.give_turn()
    }

    /// Lets the other threads go on; gives up when nobody does.
    fn give_turn(&mut self) -> Result<(), String> {
        // Whoever does nothing must not hold anything back either.
        self.previous = None;
        let pulse = self.floor.pulse();
        match &mut self.stalled {
            Some(stall) if stall.pulse == pulse => {
                if stall.look() > STUCK {
                    let (free, total) = (self.memory.free_blocks(), self.memory.blocks());
                    return Err(format!(
                        "stuck: nobody got on in {STUCK:?}, with {free} of {total} blocks free"
                    ));
                }
            }
            _ => self.stalled = Some(Stall::new(pulse)),
        }
        thread::yield_now();
        Ok(())
    }
}

fn check(
    transfer: &mut Transfer,
    memory: &impl Memory,
    floor: &Floor<'_>,
    tally: &mut Tally,
) -> Result<(), String> {
    if !transfer.is_empty() {
        floor.beat();
    }
    let corrupt = &mut tally.corrupt;
    tally.tokens_verified += transfer.check(memory, &mut |found| {
        corrupt.insert(found);
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that was stopped for a minute (by a terminal, a debugger, a snapshot) has lost no block.
    #[test]
    fn a_stopped_process_is_not_stuck() {
        let Some(then) = Instant::now().checked_sub(Duration::from_secs(60)) else { return };
        let mut stall = Stall { seen: then, ..Stall::new(7) };
        assert_eq!(stall.look(), LOOK);
        assert!(stall.look() < 2 * LOOK);
    }
}

//! Scheduler steps of continuous batching: many running sequences, a few of which end and are
//! replaced in each step.
//!
//! ```text
//! decode   begin a step, and append a token to each of the 256 running sequences
//! table    write the block table of all of them
//! slots    write the slot of each new token
//! finish   end the step: blocks that it has filled can be hit from now on
//! close    close the 8 oldest sequences
//! admit    a step with 8 new prompts of 1,000 tokens, none of them cached: hash, look up, allocate,
//!          slots, finish
//! ```
//!
//! The pool of 65,536 blocks is at steady state. With a cache, all blocks that belong to no
//! sequence have been released by one and can be hit: every admission evicts. Blocks were first
//! released in random order, so that those of a sequence are not neighbours unless the engine sees
//! to it. Several threads share the sequences of a step among them.

use std::array;
use std::hint::black_box;
use std::sync::Barrier;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Instant;

use crate::check::Owners;
use crate::report::mean;
use crate::reuse::{BLOCK_TOKENS, Engine, Full, Worker};
use crate::threads::pin;
use crate::undisturbed::{Calls, undisturbed};

/// Blocks of a pool.
pub const BLOCKS: usize = 65_536;

/// Running sequences of all threads.
const SEQUENCES: usize = 256;

/// Sequences of all threads that end in a step. At most as many threads share one.
pub const CHANGES: usize = 8;

/// Tokens per prompt.
const PROMPT: usize = 1_000;

/// Steps per round.
const STEPS: usize = 50;

/// Names of the figures: of a step of one thread, of a step of each of two threads (each with half
/// of the sequences), and their relation.
pub const STEP_LINES: [&str; 15] = [
    "whole step",
    "    decode 256",
    "    table of 256",
    "    slots of 256",
    "    finish",
    "    close 8",
    "    admit 8",
    "two threads: whole step, half of the sequences each",
    "    decode 128",
    "    table of 128",
    "    slots of 128",
    "    finish",
    "    close 4",
    "    admit 4",
    "two threads: times the throughput of one",
];

/// The whole step and its parts.
const PARTS: usize = 7;

/// Place of the last figure.
const LAST: usize = STEP_LINES.len() - 1;

/// Times of one step: the whole, then its parts in their order, in microseconds.
pub type Times = [f64; PARTS];

/// Running sequences that were admitted together, each of as many tokens.
struct Group<R> {
    requests: Vec<R>,
    tokens: usize,
}

/// One thread: a worker with its running sequences.
struct Scheduler<W: Worker> {
    worker: W,
    groups: Vec<Group<W::Request>>,
    /// Place of the oldest group.
    oldest: usize,
    prompt: Vec<u32>,
    slots: Vec<i64>,
}

impl<W: Worker> Scheduler<W> {
    /// Creates a thread's share of the sequences, and runs it until the pool is at steady state.
    fn new(worker: W, thread: usize, threads: usize) -> Self {
        let mut random = fastrand::Rng::with_seed(thread as u64);
        let mut prompt: Vec<u32> = (0..PROMPT).map(|_| random.u32(..150_000)).collect();
        prompt[0] = (1 + thread as u32) << 24;
        let groups = (0..SEQUENCES / CHANGES)
            .map(|_| Group { requests: Vec::with_capacity(CHANGES / threads), tokens: 0 })
            .collect();
        let mut own = Self { worker, groups, oldest: 0, prompt, slots: Vec::with_capacity(PROMPT) };
        let blocks_per_step = CHANGES * PROMPT / BLOCK_TOKENS;
        // The first steps close nothing: no sequence runs yet.
        for _ in 0..SEQUENCES / CHANGES + 2 * BLOCKS / blocks_per_step {
            own.step(CHANGES / threads);
        }
        own
    }

    /// Runs a step.
    fn step(&mut self, changes: usize) -> Times {
        let mut times = [Instant::now(); PARTS];
        self.decode();
        times[1] = Instant::now();
        self.table();
        times[2] = Instant::now();
        self.last_slots();
        times[3] = Instant::now();
        self.worker.finish_all(self.groups.iter_mut().flat_map(|group| &mut group.requests));
        times[4] = Instant::now();
        self.close();
        times[5] = Instant::now();
        self.admit(changes);
        times[6] = Instant::now();
        let us = |from: Instant, to: Instant| (to - from).as_nanos() as f64 / 1e3;
        array::from_fn(|part| match part {
            0 => us(times[0], times[6]),
            part => us(times[part - 1], times[part]),
        })
    }

    fn decode(&mut self) {
        self.worker.begin();
        for group in &mut self.groups {
            for request in &mut group.requests {
                self.worker.append(request, black_box(group.tokens as u32));
            }
            group.tokens += 1;
        }
    }

    fn table(&mut self) {
        black_box(self.worker.table(self.groups.iter().flat_map(|group| &group.requests)));
    }

    fn last_slots(&mut self) {
        self.slots.clear();
        for group in &self.groups {
            let last = group.tokens.saturating_sub(1)..group.tokens;
            for request in &group.requests {
                self.worker.slots(request, last.clone(), &mut self.slots);
            }
        }
        black_box(&self.slots);
    }

    fn close(&mut self) {
        let requests = self.groups[self.oldest].requests.drain(..);
        requests.for_each(|request| self.worker.end(request));
    }

    /// Replaces the oldest group, which is empty.
    fn admit(&mut self, changes: usize) {
        let Self { worker, groups, oldest, prompt, slots } = self;
        let group = &mut groups[*oldest];
        worker.begin();
        slots.clear();
        for _ in 0..changes {
            prompt[0] += 1;
            let request = worker.admit(prompt);
            worker.slots(&request, W::cached(&request)..PROMPT, slots);
            group.requests.push(request);
        }
        assert_eq!(black_box(slots).len(), changes * PROMPT, "no prompt is cached");
        worker.finish_all(group.requests.iter_mut());
        group.tokens = PROMPT;
        *oldest = (*oldest + 1) % groups.len();
    }

    /// Checks that the table and the slots agree, and that no block has two owners.
    fn check(&mut self, owners: &Owners) {
        self.worker.begin();
        self.last_slots();
        let lens: Vec<usize> =
            self.groups.iter().flat_map(|group| group.requests.iter().map(|_| group.tokens)).collect();
        let table = self.worker.table(self.groups.iter().flat_map(|group| &group.requests));
        let width = table.len() / lens.len();
        assert_eq!((self.slots.len(), lens.len()), (table.len() / width, table.len() / width));
        for ((row, tokens), &slot) in table.chunks(width).zip(lens).zip(&self.slots) {
            let (last, offset) = ((tokens - 1) / BLOCK_TOKENS, (tokens - 1) % BLOCK_TOKENS);
            assert_eq!(slot, i64::from(row[last]) * BLOCK_TOKENS as i64 + offset as i64);
            row[..=last].iter().for_each(|&frame| owners.take(frame as u32));
        }
        self.worker.finish_all(self.groups.iter_mut().flat_map(|group| &mut group.requests));
    }

    /// Closes all sequences.
    fn end(&mut self) {
        let all = self.groups.iter_mut().flat_map(|group| group.requests.drain(..));
        all.for_each(|request| self.worker.end(request));
    }
}

/// The threads of an engine that run its steps together.
pub struct Team<E> {
    engine: E,
    threads: usize,
    barrier: Barrier,
    owners: Owners,
}

impl<E: Engine> Team<E> {
    /// Creates an engine for a number of threads that divides [`CHANGES`].
    pub fn new(threads: usize) -> Self {
        let engine = Full::new(BLOCKS).engine;
        Self { engine, threads, barrier: Barrier::new(threads), owners: Owners::new(BLOCKS + 1) }
    }

    /// One thread's part: brings the engine to steady state, checks it, and runs a round of steps
    /// for each order.
    fn serve(&self, thread: usize, orders: &Receiver<()>, results: &Sender<Calls<Times>>) {
        // The bench prints whether it is refused.
        let _ = pin(thread);
        let mut scheduler = Scheduler::new(self.engine.worker(thread), thread, self.threads);
        self.barrier.wait();
        scheduler.check(&self.owners);
        let mut steps = Calls::default();
        while results.send(steps).is_ok() && orders.recv().is_ok() {
            self.barrier.wait();
            steps = Calls::with_capacity(STEPS);
            (0..STEPS).for_each(|_| steps.run(|| scheduler.step(CHANGES / self.threads)));
        }
        scheduler.end();
    }

    /// Starts the threads, pinned to one core each if the system allows it, and waits until the
    /// engine is at steady state. The threads wait between rounds, and end with the result.
    ///
    /// # Panics
    ///
    /// If a block has two owners.
    pub fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Session<'scope, E> {
        let (mut orders, mut results, mut threads) = (Vec::new(), Vec::new(), Vec::new());
        for thread in 0..self.threads {
            let (order, ordered) = channel();
            let (result, resulting) = channel();
            orders.push(order);
            results.push(resulting);
            threads.push(scope.spawn(move || self.serve(thread, &ordered, &result)));
        }
        let session = Session { team: self, orders, results, threads };
        session.collect();
        session
    }
}

/// Work loop of a team: runs its orders until their channel is closed.
pub struct Session<'scope, E> {
    team: &'scope Team<E>,
    orders: Vec<Sender<()>>,
    results: Vec<Receiver<Calls<Times>>>,
    threads: Vec<ScopedJoinHandle<'scope, ()>>,
}

impl<E: Engine> Session<'_, E> {
    fn collect(&self) -> Vec<Calls<Times>> {
        self.results.iter().map(|result| result.recv().expect("no bench thread panicked")).collect()
    }

    /// Runs a round in which some steps are undisturbed, and returns the means of these.
    pub fn round(&self) -> Times {
        loop {
            self.orders.iter().for_each(|order| order.send(()).expect("no bench thread panicked"));
            let steps = undisturbed(self.collect());
            if steps.len() >= STEPS / 4 {
                return array::from_fn(|part| mean(steps.iter().map(|(_, times)| times[part])));
            }
        }
    }

    /// Closes all sequences and ends the threads.
    ///
    /// # Panics
    ///
    /// If blocks are lost.
    pub fn end(self) {
        drop(self.orders);
        // A thread is only joined when its thread-local caches are gone.
        self.threads.into_iter().for_each(|thread| thread.join().expect("no bench thread panicked"));
        assert_eq!(self.team.engine.unowned(), BLOCKS, "{} lost blocks", E::NAME);
    }
}

/// An engine twice: under one thread, and under two that share the sequences.
pub struct Threads<E> {
    one: Team<E>,
    two: Team<E>,
}

impl<E: Engine> Threads<E> {
    /// Creates both engines.
    pub fn new() -> Self {
        Self { one: Team::new(1), two: Team::new(2) }
    }

    /// Starts the threads, pinned to one core each if the system allows it, and waits until the
    /// engines are at steady state. The threads wait between rounds, and end with the result.
    ///
    /// # Panics
    ///
    /// If a block has two owners.
    pub fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Steps<'scope, E> {
        Steps { one: self.one.start(scope), two: self.two.start(scope) }
    }
}

impl<E: Engine> Default for Threads<E> {
    fn default() -> Self {
        Self::new()
    }
}

/// Both engines at steady state.
pub struct Steps<'scope, E> {
    one: Session<'scope, E>,
    two: Session<'scope, E>,
}

impl<E: Engine> Steps<'_, E> {
    /// Closes all sequences and ends the threads.
    ///
    /// # Panics
    ///
    /// If blocks are lost.
    pub fn end(self) {
        self.one.end();
        self.two.end();
    }

    /// Runs a round of both. Returns a figure for each of [`STEP_LINES`].
    pub fn round(&self) -> [f64; STEP_LINES.len()] {
        let (one, two) = (self.one.round(), self.two.round());
        array::from_fn(|line| match line {
            0..PARTS => one[line],
            // Each of the two threads does half of the work.
            LAST => one[0] / two[0],
            _ => two[line - PARTS],
        })
    }
}

/// The engines of one subject before a measurement, whatever its type.
pub trait Stepping<const FIGURES: usize> {
    /// Starts the threads: see [`Team::start`].
    fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Box<dyn Rounds<FIGURES> + 'scope>;
}

/// The engines of one subject at steady state.
pub trait Rounds<const FIGURES: usize> {
    /// Runs a round, and returns its figures.
    fn round(&self) -> [f64; FIGURES];

    /// Closes all sequences, ends the threads, and checks that no block is lost.
    fn end(self: Box<Self>);
}

impl<E: Engine> Stepping<PARTS> for Team<E> {
    fn start<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>) -> Box<dyn Rounds<PARTS> + 'scope> {
        Box::new(self.start(scope))
    }
}

impl<E: Engine> Rounds<PARTS> for Session<'_, E> {
    fn round(&self) -> Times {
        self.round()
    }

    fn end(self: Box<Self>) {
        (*self).end();
    }
}

impl<E: Engine> Stepping<{ STEP_LINES.len() }> for Threads<E> {
    fn start<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Box<dyn Rounds<{ STEP_LINES.len() }> + 'scope> {
        Box::new(self.start(scope))
    }
}

impl<E: Engine> Rounds<{ STEP_LINES.len() }> for Steps<'_, E> {
    fn round(&self) -> [f64; STEP_LINES.len()] {
        self.round()
    }

    fn end(self: Box<Self>) {
        (*self).end();
    }
}

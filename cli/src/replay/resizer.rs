//! The thread that gives the pool other sizes while it is in use, as a schedule says.
//!
//! A step is due when its share of the requests is settled. What is in the way of a size (a block that is open just now) is
//! gone a moment later, so a step that is blocked is tried again until it is done, the next one is due, or the
//! replay ends. That a step was blocked to its end is reported, and is no failure: a pool that cannot shrink has lost
//! nothing. That it failed otherwise, or says that it is done and has another size, is one.

use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use super::floor::Floor;
use super::memory::{Memory, ResizeRefusal};
use crate::schedule::{Schedule, Step};

/// How often this thread looks whether a step is due.
const LOOK: Duration = Duration::from_millis(1);

/// How soon a blocked step is tried again.
const AGAIN: Duration = Duration::from_millis(10);

/// How a step ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ResizeOutcome {
    /// The pool has that size.
    Done,
    /// Something was in the way to the last try.
    Blocked(String),
    /// Something that should not happen.
    Failed(String),
}

/// What became of a step.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Resize {
    /// Requests settled when it was begun.
    pub at_request: u64,
    /// Blocks before.
    pub from: usize,
    /// Blocks that the pool was to have.
    pub to: usize,
    /// How often it was tried.
    pub attempts: u32,
    /// From the first try to the end of the last.
    pub time: Duration,
    /// How it ended.
    pub outcome: ResizeOutcome,
}

/// See the [module](self).
pub struct Resizer<'a, M> {
    memory: &'a M,
    floor: &'a Floor<'a>,
    schedule: &'a Schedule,
    requests: usize,
}

impl<'a, M: Memory> Resizer<'a, M> {
    /// Of a replay of so many requests.
    pub fn new(memory: &'a M, floor: &'a Floor<'a>, schedule: &'a Schedule, requests: usize) -> Self {
        Self { memory, floor, schedule, requests }
    }

    /// Starts the thread, if there is anything to do.
    pub fn spawn<'scope>(
        self,
        scope: &'scope Scope<'scope, '_>,
    ) -> Option<ScopedJoinHandle<'scope, Vec<Resize>>>
    where
        'a: 'scope,
    {
        (!self.schedule.steps().is_empty()).then(|| scope.spawn(move || self.run()))
    }

    fn run(&self) -> Vec<Resize> {
        let mut done = Vec::new();
        let mut steps = self.schedule.steps().iter().peekable();
        while let Some(step) = steps.next() {
            while !self.is_due(step) {
                if self.floor.is_stopped() {
                    return done;
                }
                thread::sleep(LOOK);
            }
            let next = steps.peek().copied();
            done.push(self.resize(step, &|| next.is_some_and(|next| self.is_due(next))));
        }
        done
    }

    fn is_due(&self, step: &Step) -> bool {
        self.floor.settled() >= step.at.of(self.requests)
    }

    fn resize(&self, step: &Step, is_next_due: &dyn Fn() -> bool) -> Resize {
        let (at_request, from, start) = (self.floor.settled(), self.memory.blocks(), Instant::now());
        let mut attempts = 0;
        let outcome = loop {
            attempts += 1;
            // Known before the last try: when nobody uses the pool any more, nothing can be in the way.
            let is_last = self.floor.is_stopped() || is_next_due();
            match self.memory.resize(step.blocks) {
                Ok(()) => break self.confirm(step.blocks),
                Err(ResizeRefusal::Failed(reason)) => break ResizeOutcome::Failed(reason),
                Err(ResizeRefusal::Blocked(reason)) if is_last => break ResizeOutcome::Blocked(reason),
                Err(ResizeRefusal::Blocked(_)) => thread::sleep(AGAIN),
            }
        };
        Resize { at_request, from, to: step.blocks, attempts, time: start.elapsed(), outcome }
    }

    fn confirm(&self, blocks: usize) -> ResizeOutcome {
        match self.memory.blocks() {
            found if found == blocks => ResizeOutcome::Done,
            found => ResizeOutcome::Failed(format!("{blocks} blocks were to be there, and {found} are")),
        }
    }
}

//! Continuous batching as pure bookkeeping: who waits, who runs, what a step does, who gives way. No pool, no time,
//! no thread; the [engine](super::engine) brings them together.
//!
//! A job waits until the free blocks hold its whole prompt, what is missing of the prompts of those who run already, and
//! one block more for each of them, so that admitting it does not drive somebody out at once. A step appends one token to each job that decodes and up to a
//! budget of prompt tokens to the others, the earliest first. When the pool is full the job that arrived last gives
//! way: its blocks go, and it starts over later with a prompt that holds what it had already said.

use std::collections::VecDeque;

use crate::trace::Request;

/// A request, or what is left of it after it gave way.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Job {
    /// Its place in the order of arrival.
    pub request: u32,
    /// How often it has given way.
    pub attempt: u32,
    /// Tokens to append before it decodes: the prompt, and what it had said before it gave way.
    pub prompt: u64,
    /// Tokens when it is done.
    pub total: u64,
}

impl Job {
    /// A request that has just arrived.
    pub const fn new(index: u32, request: &Request) -> Self {
        Self { request: index, attempt: 0, prompt: request.input_tokens as u64, total: request.tokens() }
    }
}

/// A job that runs, with whatever it holds.
#[derive(Debug)]
pub struct Running<S> {
    /// The job.
    pub job: Job,
    /// Tokens that it has in this attempt: found in a cache, or appended.
    pub held: u64,
    /// What it holds: its sequence.
    pub sequence: S,
}

impl<S> Running<S> {
    /// Tokens that the next step appends: the next piece of the prompt, out of `budget`, or one.
    pub fn next_tokens(&self, budget: u64) -> u64 {
        if self.is_done() {
            0
        } else if self.held < self.job.prompt {
            (self.job.prompt - self.held).min(budget)
        } else {
            1
        }
    }

    /// Whether the next tokens are of the prompt, and count against the budget.
    pub const fn in_prompt(&self) -> bool {
        self.held < self.job.prompt
    }

    /// Whether every token has been appended.
    pub const fn is_done(&self) -> bool {
        self.held >= self.job.total
    }

    /// What is left to do when it gives way now.
    pub fn given_way(&self) -> Job {
        Job { attempt: self.job.attempt + 1, prompt: self.job.prompt.max(self.held), ..self.job }
    }
}

/// The jobs of one scheduler thread, in the order of their arrival.
#[derive(Debug)]
pub struct Lane<S> {
    waiting: VecDeque<Job>,
    running: Vec<Running<S>>,
    running_max: usize,
}

impl<S> Lane<S> {
    /// No jobs; at most `running_max` at a time.
    pub fn new(running_max: usize) -> Self {
        Self { waiting: VecDeque::new(), running: Vec::new(), running_max: running_max.max(1) }
    }

    /// Whether a new request would be first in the line: none waits, and there is room for one.
    pub fn wants_request(&self) -> bool {
        self.waiting.is_empty() && self.running.len() < self.running_max
    }

    /// Puts a job in the line; earlier arrivals stand before later ones.
    pub fn wait(&mut self, job: Job) {
        let place = self.waiting.partition_point(|other| other.request < job.request);
        self.waiting.insert(place, job);
    }

    /// Whether somebody waits.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes out of the line whoever will not fit any more, and says how many.
    pub fn reject(&mut self, fits: impl Fn(&Job) -> bool) -> usize {
        let before = self.waiting.len();
        self.waiting.retain(fits);
        before - self.waiting.len()
    }

    /// The first in the line, if it may run now: `free` blocks hold its prompt, and for each who runs the rest of
    /// theirs and a block.
    pub fn admit(&mut self, free: usize, blocks: impl Fn(u64) -> usize) -> Option<Job> {
        let job = self.waiting.front()?;
        let owed: usize =
            self.running.iter().map(|other| 1 + blocks(other.job.prompt.saturating_sub(other.held))).sum();
        // The first token of the answer is to fit too.
        let wanted = blocks(job.total.min(job.prompt + 1)) + owed;
        (self.running.len() < self.running_max && wanted <= free).then(|| self.waiting.pop_front()).flatten()
    }

    /// Starts a job with what it holds: so many tokens already.
    pub fn start(&mut self, job: Job, held: u64, sequence: S) {
        let place = self.running.partition_point(|other| other.job.request < job.request);
        self.running.insert(place, Running { job, held, sequence });
    }

    /// Those who run.
    pub fn running(&mut self) -> &mut Vec<Running<S>> {
        &mut self.running
    }

    /// The one that gives way when the pool is full: the last to arrive. `None` when nobody runs.
    pub fn give_way(&mut self) -> Option<Running<S>> {
        let last = self.running.pop()?;
        self.wait(last.given_way());
        Some(last)
    }

    /// The earliest arrival here, running or not.
    pub fn oldest(&self) -> Option<u32> {
        let waiting = self.waiting.front().map(|job| job.request);
        let running = self.running.first().map(|running| running.job.request);
        waiting.into_iter().chain(running).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(request: u32, prompt: u64, total: u64) -> Job {
        Job { request, attempt: 0, prompt, total }
    }

    fn blocks(tokens: u64) -> usize {
        tokens.div_ceil(16) as usize
    }

    #[test]
    fn a_prompt_goes_in_pieces_and_an_answer_token_by_token() {
        let mut running = Running { job: job(0, 20, 22), held: 0, sequence: () };
        let mut pieces = Vec::new();
        while !running.is_done() {
            pieces.push(running.next_tokens(8));
            running.held += running.next_tokens(8);
        }
        assert_eq!(pieces, [8, 8, 4, 1, 1]);
        assert_eq!(running.next_tokens(8), 0);
        assert_eq!(Running { held: 3, ..running }.next_tokens(0), 0, "no budget, no tokens");
    }

    #[test]
    fn who_gives_way_keeps_what_was_said() {
        let running = Running { job: job(4, 20, 30), held: 25, sequence: () };
        assert_eq!(running.given_way(), Job { request: 4, attempt: 1, prompt: 25, total: 30 });
        let early = Running { held: 7, ..running };
        assert_eq!(early.given_way().prompt, 20, "midway through the prompt, all of it is still to do");
    }

    #[test]
    fn admission_leaves_a_block_for_everybody_who_runs() {
        let mut lane = Lane::new(8);
        lane.wait(job(0, 32, 40));
        assert_eq!(lane.admit(2, blocks), None, "the first token of the answer needs a third block");
        let first = lane.admit(3, blocks).unwrap();
        lane.start(first, 0, ());
        lane.wait(job(1, 16, 16));
        assert_eq!(lane.admit(3, blocks), None, "the first is still to load two blocks and to grow by one");
        lane.running()[0].held = 32;
        assert_eq!(lane.admit(1, blocks), None);
        assert!(lane.admit(2, blocks).is_some());
    }

    #[test]
    fn the_last_to_arrive_gives_way_and_the_first_comes_back_first() {
        let mut lane = Lane::new(8);
        for request in [2, 0, 1] {
            lane.start(job(request, 1, 2), 0, ());
        }
        lane.wait(job(3, 1, 2));
        assert_eq!(lane.oldest(), Some(0));
        assert_eq!(lane.give_way().unwrap().job.request, 2);
        assert_eq!(lane.give_way().unwrap().job.request, 1);
        assert!(!lane.wants_request(), "somebody waits");
        let order: Vec<u32> =
            std::iter::from_fn(|| lane.admit(usize::MAX, blocks)).map(|job| job.request).collect();
        assert_eq!(order, [1, 2, 3]);
        assert_eq!(lane.running().len(), 1);
    }

    #[test]
    fn who_will_not_fit_any_more_leaves_the_line() {
        let mut lane: Lane<()> = Lane::new(8);
        for (request, total) in [(0, 10), (1, 90), (2, 20)] {
            lane.wait(job(request, 1, total));
        }
        assert_eq!(lane.reject(|job| job.total < 50), 1);
        assert_eq!((lane.reject(|job| job.total < 50), lane.oldest()), (0, Some(0)));
    }

    #[test]
    fn no_more_run_than_may() {
        let mut lane = Lane::new(1);
        lane.start(job(0, 1, 2), 0, ());
        assert!(!lane.wants_request());
        lane.wait(job(1, 1, 1));
        assert_eq!(lane.admit(100, blocks), None);
    }

    proptest! {
        /// Against a counter in place of a pool: every job that fits is done, whatever the sizes, and never are more
        /// blocks held than there are.
        #[test]
        fn every_job_ends(sizes in proptest::collection::vec((1u64..200, 0u64..100), 1..20), spare in 0usize..10) {
            let jobs: Vec<Job> = sizes
                .iter()
                .zip(0..)
                .map(|(&(prompt, answer), index)| job(index, prompt, prompt + answer))
                .collect();
            let pool = jobs.iter().map(|job| blocks(job.total)).max().unwrap() + spare;
            let mut lane = Lane::new(6);
            jobs.iter().for_each(|&job| lane.wait(job));
            let (mut done, mut used, mut steps) = (0, 0, 0);
            while done < jobs.len() {
                steps += 1;
                prop_assert!(steps < 100_000, "stuck at {} of {}", done, jobs.len());
                while let Some(job) = lane.admit(pool - used, blocks) {
                    lane.start(job, 0, ());
                }
                let mut index = 0;
                while index < lane.running().len() {
                    let running = &mut lane.running()[index];
                    let tokens = running.next_tokens(64);
                    let more = blocks(running.held + tokens) - blocks(running.held);
                    if used + more > pool {
                        let gone = lane.give_way().unwrap();
                        used -= blocks(gone.held);
                        continue;
                    }
                    used += more;
                    running.held += tokens;
                    index += 1;
                }
                lane.running().retain(|running| {
                    if running.is_done() {
                        used -= blocks(running.held);
                        done += 1;
                    }
                    !running.is_done()
                });
            }
            prop_assert_eq!(used, 0);
        }
    }
}

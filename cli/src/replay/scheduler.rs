//! Continuous batching as pure bookkeeping: the waiting and running requests of one thread,
//! admission and preemption. It uses no pool, time or threads; the [worker](super::worker) connects
//! them.
//!
//! A job is admitted when the free blocks hold its whole prompt, the rest of the prompts of the
//! running jobs, and one block more for each of them (in each list of a sequence), so that an
//! admission does not immediately cause a preemption. A step appends one token to each decoding job
//! and up to a budget of prompt tokens to the others, earliest first. When the pool is full, the
//! job that arrived last is preempted: its blocks are freed, and it restarts later with a prompt
//! that includes the tokens decoded before.
//!
//! Jobs are ordered as they were taken, which is the order of their arrival.

use std::collections::VecDeque;

use kvpool_load::Request;

/// A request, or the rest of it after a preemption.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Job {
    pub request: u32,
    /// Its number in the order in which requests were taken.
    pub order: u32,
    pub attempt: u32,
    /// Its arrival, in virtual nanoseconds.
    pub arrival_ns: u64,
    /// Tokens to append before it decodes: the prompt, and the tokens decoded before a preemption.
    pub prompt: u64,
    pub total: u64,
    /// Leading tokens that were computed before: of an earlier prompt, or by a preempted attempt.
    pub computed: u64,
    /// Whether the first token of the answer has been written.
    pub is_answered: bool,
}

impl Job {
    pub const fn new(index: u32, order: u32, arrival_ns: u64, request: &Request) -> Self {
        Self {
            request: index,
            order,
            attempt: 0,
            arrival_ns,
            prompt: request.input_tokens as u64,
            total: request.tokens(),
            computed: 0,
            is_answered: false,
        }
    }
}

#[derive(Debug)]
pub struct Running<S> {
    pub job: Job,
    /// Tokens in this attempt: found in the cache, or appended.
    pub held: u64,
    pub sequence: S,
}

impl<S> Running<S> {
    /// Returns the number of tokens that the next step appends: the next piece of the prompt, out
    /// of `budget`, or one.
    pub fn next_tokens(&self, budget: u64) -> u64 {
        if self.is_done() {
            0
        } else if self.held < self.job.prompt {
            (self.job.prompt - self.held).min(budget)
        } else {
            1
        }
    }

    /// Returns whether the next tokens belong to the prompt, and count against the budget.
    pub const fn in_prompt(&self) -> bool {
        self.held < self.job.prompt
    }

    pub const fn is_done(&self) -> bool {
        self.held >= self.job.total
    }

    /// Returns the remaining job after a preemption now.
    pub fn preempted(&self) -> Job {
        let Job { attempt, prompt, computed, .. } = self.job;
        let (prompt, computed) = (prompt.max(self.held), computed.max(self.held));
        Job { attempt: attempt + 1, prompt, computed, ..self.job }
    }
}

#[derive(Debug)]
pub struct Scheduler<S> {
    waiting: VecDeque<Job>,
    running: Vec<Running<S>>,
    running_max: usize,
}

impl<S> Scheduler<S> {
    /// Creates a scheduler that runs at most `running_max` jobs at a time.
    pub fn new(running_max: usize) -> Self {
        Self { waiting: VecDeque::new(), running: Vec::new(), running_max: running_max.max(1) }
    }

    /// Returns whether a new request would be the next to be admitted.
    pub fn wants_request(&self) -> bool {
        self.waiting.is_empty() && self.running.len() < self.running_max
    }

    pub fn enqueue(&mut self, job: Job) {
        let place = self.waiting.partition_point(|other| other.order < job.order);
        self.waiting.insert(place, job);
    }

    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Removes and returns the waiting jobs that do not fit.
    pub fn reject(&mut self, fits: impl Fn(&Job) -> bool) -> Vec<Job> {
        let gone: Vec<Job> = self.waiting.iter().filter(|job| !fits(job)).copied().collect();
        if !gone.is_empty() {
            self.waiting.retain(fits);
        }
        gone
    }

    /// Returns the blocks that the running jobs still lack.
    pub fn owed(&self, lacks: impl Fn(&Running<S>) -> usize) -> usize {
        self.running.iter().map(lacks).sum()
    }

    /// Takes the first waiting job, if `free` blocks hold its prompt and what the running jobs are
    /// [owed](Self::owed).
    pub fn admit(
        &mut self,
        free: usize,
        blocks: impl Fn(u64) -> usize,
        lacks: impl Fn(&Running<S>) -> usize,
    ) -> Option<Job> {
        let job = self.waiting.front()?;
        // The first token of the answer must fit too.
        let wanted = blocks(job.total.min(job.prompt + 1)) + self.owed(lacks);
        (self.running.len() < self.running_max && wanted <= free).then(|| self.waiting.pop_front()).flatten()
    }

    pub fn start(&mut self, job: Job, held: u64, sequence: S) {
        let place = self.running.partition_point(|other| other.job.order < job.order);
        self.running.insert(place, Running { job, held, sequence });
    }

    pub fn running(&mut self) -> &mut Vec<Running<S>> {
        &mut self.running
    }

    /// Preempts the running job that arrived last; `None` if no job runs.
    pub fn preempt(&mut self) -> Option<Running<S>> {
        let last = self.running.pop()?;
        self.enqueue(last.preempted());
        Some(last)
    }

    pub fn oldest(&self) -> Option<u32> {
        let waiting = self.waiting.front().map(|job| job.order);
        let running = self.running.first().map(|running| running.job.order);
        waiting.into_iter().chain(running).min()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use proptest::prelude::*;

    fn job(request: u32, prompt: u64, total: u64) -> Job {
        Job { prompt, total, ..Job::new(request, request, 0, &Request::new(Duration::ZERO, 1, 0)) }
    }

    fn blocks(tokens: u64) -> usize {
        tokens.div_ceil(16) as usize
    }

    fn lacks<S>(running: &Running<S>) -> usize {
        1 + blocks(running.job.prompt.saturating_sub(running.held))
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
    fn a_preempted_job_keeps_its_decoded_tokens() {
        let running = Running { job: job(4, 20, 30), held: 25, sequence: () };
        assert_eq!(running.preempted(), Job { attempt: 1, computed: 25, ..job(4, 25, 30) });
        let early = Running { held: 7, ..running };
        let early = early.preempted();
        assert_eq!((early.prompt, early.computed), (20, 7), "the whole prompt is still to be appended");
    }

    #[test]
    fn admission_leaves_a_block_for_every_running_job() {
        let mut scheduler = Scheduler::new(8);
        scheduler.enqueue(job(0, 32, 40));
        assert_eq!(
            scheduler.admit(2, blocks, lacks),
            None,
            "the first token of the answer needs a third block"
        );
        let first = scheduler.admit(3, blocks, lacks).unwrap();
        scheduler.start(first, 0, ());
        scheduler.enqueue(job(1, 16, 16));
        assert_eq!(
            scheduler.admit(3, blocks, lacks),
            None,
            "the first is still to load two blocks and to grow by one"
        );
        scheduler.running()[0].held = 32;
        assert_eq!(scheduler.admit(1, blocks, lacks), None);
        assert!(scheduler.admit(2, blocks, lacks).is_some());
    }

    #[test]
    fn the_last_arrival_is_preempted_and_the_first_readmitted_first() {
        let mut scheduler = Scheduler::new(8);
        for request in [2, 0, 1] {
            scheduler.start(job(request, 1, 2), 0, ());
        }
        scheduler.enqueue(job(3, 1, 2));
        assert_eq!(scheduler.oldest(), Some(0));
        assert_eq!(scheduler.preempt().unwrap().job.request, 2);
        assert_eq!(scheduler.preempt().unwrap().job.request, 1);
        assert!(!scheduler.wants_request(), "a job waits");
        let order: Vec<u32> = std::iter::from_fn(|| scheduler.admit(usize::MAX, blocks, lacks))
            .map(|job| job.request)
            .collect();
        assert_eq!(order, [1, 2, 3]);
        assert_eq!(scheduler.running().len(), 1);
    }

    #[test]
    fn jobs_that_do_not_fit_are_removed() {
        let mut scheduler: Scheduler<()> = Scheduler::new(8);
        for (request, total) in [(0, 10), (1, 90), (2, 20)] {
            scheduler.enqueue(job(request, 1, total));
        }
        assert_eq!(scheduler.reject(|job| job.total < 50), [job(1, 1, 90)]);
        assert_eq!((scheduler.reject(|job| job.total < 50), scheduler.oldest()), (Vec::new(), Some(0)));
    }

    #[test]
    fn running_jobs_are_bounded() {
        let mut scheduler = Scheduler::new(1);
        scheduler.start(job(0, 1, 2), 0, ());
        assert!(!scheduler.wants_request());
        scheduler.enqueue(job(1, 1, 1));
        assert_eq!(scheduler.admit(100, blocks, lacks), None);
    }

    proptest! {
        /// With a counter in place of a pool, every job that fits ends, and the blocks in use never
        /// exceed the pool.
        #[test]
        fn every_job_ends(sizes in proptest::collection::vec((1u64..200, 0u64..100), 1..20), spare in 0usize..10) {
            let jobs: Vec<Job> = sizes
                .iter()
                .zip(0..)
                .map(|(&(prompt, answer), index)| job(index, prompt, prompt + answer))
                .collect();
            let pool = jobs.iter().map(|job| blocks(job.total)).max().unwrap() + spare;
            let mut scheduler = Scheduler::new(6);
            jobs.iter().for_each(|&job| scheduler.enqueue(job));
            let (mut done, mut used, mut steps) = (0, 0, 0);
            while done < jobs.len() {
                steps += 1;
                prop_assert!(steps < 100_000, "stuck at {} of {}", done, jobs.len());
                while let Some(job) = scheduler.admit(pool - used, blocks, lacks) {
                    scheduler.start(job, 0, ());
                }
                let mut index = 0;
                while index < scheduler.running().len() {
                    let running = &mut scheduler.running()[index];
                    let tokens = running.next_tokens(64);
                    let more = blocks(running.held + tokens) - blocks(running.held);
                    if used + more > pool {
                        let gone = scheduler.preempt().unwrap();
                        used -= blocks(gone.held);
                        continue;
                    }
                    used += more;
                    running.held += tokens;
                    index += 1;
                }
                scheduler.running().retain(|running| {
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

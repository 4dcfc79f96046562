//! What the scheduler threads share beside the pool: the line of arrivals, each other's clocks, and the one rule that
//! keeps them from driving each other out for ever.
//!
//! Time is virtual and each thread has its own: a step costs what a [`StepCost`] says, and a thread with nothing to do
//! goes on to the next arrival. Nobody sleeps, and nobody runs [far ahead](Floor::may_step) of who has work.
//!
//! # Progress
//!
//! Threads that share a full pool could give way to each other without end. So the earliest request of all never gives
//! way when it is its thread's last: it says that it [starves](Floor::starve), upon which nobody admits anything until
//! it has its blocks. All others finish or give way, so it gets them; each request becomes the earliest in its turn.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::thread;
use std::time::Duration;

use crate::trace::Request;

/// How far ahead of the slowest a thread may go, in virtual time. Steps take microseconds here and milliseconds in an
/// engine: without a bound, a thread that the system keeps from running for one time slice would hold its step in
/// flight, and everything that was freed meanwhile retired, for what is minutes to the others.
const AHEAD_NS: u64 = 250_000_000;

/// The clock of a thread that makes no steps just now: nobody waits for it.
const AT_REST: u64 = u64::MAX;

/// How often a thread that has halted looks whether it may go on.
const HALT_LOOK: Duration = Duration::from_millis(1);

/// More requests than there can be.
const NEVER: u64 = u64::MAX;

/// No request.
const NOBODY: u32 = u32::MAX;

/// What a step of a modelled engine costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepCost {
    /// Any step.
    pub fixed_ns: u64,
    /// Each token of a prompt.
    pub prompt_token_ns: u64,
    /// Each sequence that decodes.
    pub decode_token_ns: u64,
}

impl StepCost {
    /// About a model of 8 billion parameters on one fast device: 100,000 prompt tokens a second, and 80 steps a
    /// second at 25 sequences.
    pub const DEFAULT: Self =
        Self { fixed_ns: 10_000_000, prompt_token_ns: 10_000, decode_token_ns: 100_000 };

    /// One step's.
    pub const fn of(&self, prompt_tokens: u64, decode_tokens: u64) -> u64 {
        self.fixed_ns + prompt_tokens * self.prompt_token_ns + decode_tokens * self.decode_token_ns
    }
}

/// What the threads share. Counters are Relaxed: they are hints and figures; blocks and bytes change hands through
/// the pool, which orders them.
pub struct Floor<'a> {
    requests: &'a [Request],
    next: AtomicUsize,
    clocks_ns: Vec<AtomicU64>,
    steps_ns: Vec<AtomicU64>,
    oldest: Vec<AtomicU32>,
    starving: AtomicU32,
    settled: AtomicU64,
    tokens: AtomicU64,
    beats: AtomicU64,
    first_refusal: OnceLock<(f64, f64)>,
    stopped: AtomicBool,
    /// Requests settled when all threads are to halt; [`NEVER`] if that is not wanted.
    halt_at: AtomicU64,
    /// Threads that have halted, or ended.
    quiet: AtomicUsize,
    released: AtomicBool,
}

impl<'a> Floor<'a> {
    /// A floor for `threads`, with all requests still to arrive. Once `halt_at` are settled, all threads halt.
    pub fn new(requests: &'a [Request], threads: usize, halt_at: Option<u64>) -> Self {
        Self {
            requests,
            next: AtomicUsize::new(0),
            clocks_ns: (0..threads).map(|_| AtomicU64::new(0)).collect(),
            steps_ns: (0..threads).map(|_| AtomicU64::new(AT_REST)).collect(),
            oldest: (0..threads).map(|_| AtomicU32::new(NOBODY)).collect(),
            starving: AtomicU32::new(NOBODY),
            settled: AtomicU64::new(0),
            tokens: AtomicU64::new(0),
            beats: AtomicU64::new(0),
            first_refusal: OnceLock::new(),
            stopped: AtomicBool::new(false),
            halt_at: AtomicU64::new(halt_at.unwrap_or(NEVER)),
            quiet: AtomicUsize::new(0),
            released: AtomicBool::new(false),
        }
    }

    /// The next request of all, if it has arrived by `now`; each is dealt once.
    pub fn take_due(&self, now: Duration) -> Option<(u32, &'a Request)> {
        let due = |next: usize| self.requests.get(next).is_some_and(|request| request.arrival <= now);
        let taken = self.next.fetch_update(Relaxed, Relaxed, |next| due(next).then_some(next + 1)).ok()?;
        Some((taken as u32, &self.requests[taken]))
    }

    /// A request, by its place.
    pub fn request(&self, index: u32) -> &'a Request {
        &self.requests[index as usize]
    }

    /// When the next request arrives; `None` after the last.
    pub fn next_arrival(&self) -> Option<Duration> {
        self.requests.get(self.next.load(Relaxed)).map(|request| request.arrival)
    }

    /// Tells the others how far a thread is, and the earliest request that it has.
    pub fn publish(&self, thread: usize, now_ns: u64, oldest: Option<u32>) {
        self.clocks_ns[thread].store(now_ns, Relaxed);
        self.oldest[thread].store(oldest.unwrap_or(NOBODY), Relaxed);
    }

    /// Whether a thread that is at `now_ns` may make a step, or is too far ahead of another that makes steps too. The
    /// slowest may always.
    pub fn may_step(&self, thread: usize, now_ns: u64) -> bool {
        self.steps_ns[thread].store(now_ns, Relaxed);
        let slowest = self.steps_ns.iter().map(|clock| clock.load(Relaxed)).min().unwrap_or(now_ns);
        now_ns.saturating_sub(slowest) <= AHEAD_NS
    }

    /// The thread makes no steps for now.
    pub fn rest(&self, thread: usize) {
        self.steps_ns[thread].store(AT_REST, Relaxed);
    }

    /// How far the farthest thread is: one that waits for the others' blocks waits until then, and no longer.
    pub fn latest_clock_ns(&self) -> u64 {
        self.clocks_ns.iter().map(|clock| clock.load(Relaxed)).max().unwrap_or(0)
    }

    /// Whether no thread has an earlier request.
    pub fn is_oldest(&self, request: u32) -> bool {
        self.oldest.iter().all(|oldest| oldest.load(Relaxed) >= request)
    }

    /// The earliest request of all asks everybody else to admit nothing.
    pub fn starve(&self, request: u32) {
        self.starving.store(request, Relaxed);
    }

    /// It got what it needed.
    pub fn fed(&self, request: u32) {
        if self.starving.load(Relaxed) == request {
            let _ = self.starving.compare_exchange(request, NOBODY, Relaxed, Relaxed);
        }
    }

    /// Whether somebody starves, so that nothing is to be admitted.
    pub fn anybody_starves(&self) -> bool {
        self.starving.load(Relaxed) != NOBODY
    }

    /// Counts a request that is completed or rejected.
    pub fn settle(&self) {
        self.settled.fetch_add(1, Relaxed);
    }

    /// Requests completed or rejected.
    pub fn settled(&self) -> u64 {
        self.settled.load(Relaxed)
    }

    /// Counts tokens appended.
    pub fn count(&self, tokens: u64) {
        self.tokens.fetch_add(tokens, Relaxed);
    }

    /// Tokens appended, by all.
    pub fn tokens(&self) -> u64 {
        self.tokens.load(Relaxed)
    }

    /// A sign of life: some tokens have been written or read.
    pub fn beat(&self) {
        self.beats.fetch_add(1, Relaxed);
    }

    /// Changes for as long as anybody gets on with anything.
    pub fn pulse(&self) -> u64 {
        self.beats.load(Relaxed)
    }

    /// Remembers how full the pool was when it refused blocks for the first time: the share that was not free, and
    /// the share that belonged to sequences.
    pub fn note_refusal(&self, used: f64, owned: f64) {
        self.first_refusal.get_or_init(|| (used, owned));
    }

    /// See [`note_refusal`](Self::note_refusal); `None` if nothing was refused.
    pub fn first_refusal(&self) -> Option<(f64, f64)> {
        self.first_refusal.get().copied()
    }

    /// Whether it is time to halt: every thread does so between two steps, with no batch in flight.
    pub fn must_halt(&self) -> bool {
        self.settled() >= self.halt_at.load(Relaxed) && !self.released.load(Acquire)
    }

    /// Lets all threads halt, however many requests are settled.
    pub fn halt_now(&self) {
        self.halt_at.store(0, Relaxed);
    }

    /// Halts until [released](Self::release) or stopped.
    pub fn halt(&self) {
        // Release: pairs with the Acquire of `is_quiet`; what the thread did is done.
        self.quiet.fetch_add(1, Release);
        while !self.released.load(Acquire) && !self.is_stopped() {
            thread::sleep(HALT_LOOK);
        }
        self.quiet.fetch_sub(1, Release);
    }

    /// The calling thread ends, and is not waited for.
    pub fn leave(&self) {
        self.quiet.fetch_add(1, Release);
    }

    /// Whether it is time to halt, and all threads have.
    pub fn is_quiet(&self) -> bool {
        self.must_halt() && self.quiet.load(Acquire) == self.clocks_ns.len()
    }

    /// Lets everybody go on who has halted, for good.
    pub fn release(&self) {
        self.released.store(true, Release);
    }

    /// Ends the replay early, for everybody.
    pub fn stop(&self) {
        self.stopped.store(true, Relaxed);
    }

    /// Whether it is ended.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrivals(seconds: &[u64]) -> Vec<Request> {
        let at = |&s| Request {
            arrival: Duration::from_secs(s),
            input_tokens: 1,
            output_tokens: 1,
            hash_ids: vec![],
            hashed_tokens: 0,
        };
        seconds.iter().map(at).collect()
    }

    #[test]
    fn requests_are_dealt_once_and_when_due() {
        let requests = arrivals(&[0, 5, 5]);
        let floor = Floor::new(&requests, 2, None);
        assert_eq!(floor.take_due(Duration::ZERO).unwrap().0, 0);
        assert!(floor.take_due(Duration::from_secs(4)).is_none());
        assert_eq!(floor.next_arrival(), Some(Duration::from_secs(5)));
        assert_eq!(floor.take_due(Duration::from_secs(5)).unwrap().0, 1);
        assert_eq!(floor.take_due(Duration::from_secs(9)).unwrap().0, 2);
        assert!(floor.take_due(Duration::from_secs(9)).is_none());
        assert_eq!(floor.next_arrival(), None);
    }

    #[test]
    fn nobody_runs_far_ahead_of_who_makes_steps() {
        let floor = Floor::new(&[], 3, None);
        assert!(floor.may_step(0, 5 * AHEAD_NS), "alone");
        assert!(floor.may_step(1, 4 * AHEAD_NS), "the slowest may always");
        assert!(floor.may_step(0, 5 * AHEAD_NS));
        assert!(!floor.may_step(0, 5 * AHEAD_NS + 1));
        floor.rest(1);
        assert!(floor.may_step(0, 9 * AHEAD_NS));
    }

    #[test]
    fn only_the_starving_one_is_fed() {
        let floor = Floor::new(&[], 2, None);
        floor.publish(0, 7, Some(3));
        floor.publish(1, 9, None);
        assert!(floor.is_oldest(3) && !floor.is_oldest(4));
        assert_eq!(floor.latest_clock_ns(), 9);
        floor.starve(3);
        floor.fed(4);
        assert!(floor.anybody_starves());
        floor.fed(3);
        assert!(!floor.anybody_starves());
    }

    /// A thread that has ended is not waited for, and whoever has halted goes on only when told.
    #[test]
    fn all_halt_when_enough_is_settled() {
        let floor = Floor::new(&[], 2, Some(2));
        floor.settle();
        floor.leave();
        assert!(!floor.must_halt() && !floor.is_quiet());
        floor.settle();
        assert!(floor.must_halt() && !floor.is_quiet(), "one is still at work");
        thread::scope(|scope| {
            let halted = scope.spawn(|| floor.halt());
            while !floor.is_quiet() {
                thread::yield_now();
            }
            assert!(!halted.is_finished());
            floor.release();
        });
        assert!(!floor.must_halt());
    }
}

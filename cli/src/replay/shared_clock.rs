//! State that scheduler threads share besides the pool: arrivals, the clocks of all threads, and
//! the rule that ensures progress.
//!
//! Time is virtual, and each thread has its own: a step takes its [costs](super::Costs), and an
//! idle thread advances to the next arrival. No thread sleeps, and no thread runs [far
//! ahead](SharedClock::may_step) of another that has work.
//!
//! # Progress
//!
//! Threads that share a full pool could preempt each other's requests endlessly. So the globally
//! earliest request is never preempted when it is the only one of its thread: it [pauses
//! admission](SharedClock::pause_admission) for all threads until it has its blocks. All other
//! requests end or are preempted, so it gets them, and each request eventually becomes the
//! earliest.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use kvpool_load::Request;

use super::sessions::{Ended, Next, Sessions};

/// How far a thread may run ahead of the slowest, in virtual time. Steps take microseconds here and
/// milliseconds in an engine: without a bound, a descheduled thread would keep its step in flight,
/// and all frames freed meanwhile retired, for minutes of virtual time.
const AHEAD_NS: u64 = 250_000_000;

/// The same with sessions, whose requests arrive when others end: less than two usual steps.
const AHEAD_OF_SESSIONS_NS: u64 = 20_000_000;

const IDLE: u64 = u64::MAX;

const HALT_INTERVAL: Duration = Duration::from_millis(1);

/// More requests than any trace has.
const NEVER: u64 = u64::MAX;

const NO_REQUEST: u32 = u32::MAX;

/// The state of the pool at a refusal.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Refusal {
    /// The share of blocks that were not free.
    pub used: f64,
    /// The share that belonged to sequences.
    pub owned: f64,
    /// Tokens of open sequences, also those for which blocks are reserved.
    pub tokens: u64,
}

/// A request taken by a thread.
#[derive(Clone, Copy, Debug)]
pub struct Taken<'a> {
    pub index: u32,
    /// Its number in the order in which requests are taken.
    pub order: u32,
    pub arrival_ns: u64,
    pub request: &'a Request,
}

/// When requests arrive.
enum Arrivals {
    /// As recorded. The next request.
    Recorded(AtomicUsize),
    /// After others of their session.
    Sessions(Mutex<Sessions>),
}

/// See the [module](self). Counters are Relaxed: they are hints and figures. Blocks and bytes pass
/// between threads through the pool, which orders them.
pub struct SharedClock<'a> {
    requests: &'a [Request],
    arrivals: Arrivals,
    clocks_ns: Vec<AtomicU64>,
    steps_ns: Vec<AtomicU64>,
    oldest: Vec<AtomicU32>,
    /// The request that paused admission.
    paused_by: AtomicU32,
    pub settled: AtomicU64,
    pub tokens: AtomicU64,
    /// Writes and reads of tokens: a measure of progress of all threads.
    pub transfers: AtomicU64,
    pub first_refusal: OnceLock<Refusal>,
    stopped: AtomicBool,
    /// Number of settled requests at which all threads halt, or [`NEVER`].
    halt_at: AtomicU64,
    /// Threads that have halted or ended.
    halted: AtomicUsize,
}

impl<'a> SharedClock<'a> {
    /// Creates the clocks of `threads`. Once `halt_at` requests are settled, all threads halt.
    pub fn new(
        requests: &'a [Request],
        sessions: Option<Sessions>,
        threads: usize,
        halt_at: Option<u64>,
    ) -> Self {
        let recorded = Arrivals::Recorded(AtomicUsize::new(0));
        Self {
            requests,
            arrivals: sessions.map_or(recorded, |sessions| Arrivals::Sessions(Mutex::new(sessions))),
            clocks_ns: (0..threads).map(|_| AtomicU64::new(0)).collect(),
            steps_ns: (0..threads).map(|_| AtomicU64::new(IDLE)).collect(),
            oldest: (0..threads).map(|_| AtomicU32::new(NO_REQUEST)).collect(),
            paused_by: AtomicU32::new(NO_REQUEST),
            settled: AtomicU64::new(0),
            tokens: AtomicU64::new(0),
            transfers: AtomicU64::new(0),
            first_refusal: OnceLock::new(),
            stopped: AtomicBool::new(false),
            halt_at: AtomicU64::new(halt_at.unwrap_or(NEVER)),
            halted: AtomicUsize::new(0),
        }
    }

    fn sessions(&self) -> Option<MutexGuard<'_, Sessions>> {
        match &self.arrivals {
            Arrivals::Recorded(_) => None,
            Arrivals::Sessions(sessions) => Some(sessions.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Takes the next request for a thread if it has arrived by `now`. Each request is taken once.
    pub fn take_due(&self, thread: usize, now: Duration) -> Option<Taken<'a>> {
        let next = match &self.arrivals {
            Arrivals::Recorded(next) => next,
            Arrivals::Sessions(_) => {
                let now_ns = u64::try_from(now.as_nanos()).unwrap_or(u64::MAX);
                let (index, arrival_ns, order) = self.sessions()?.take_due(thread, now_ns)?;
                return Some(Taken { index, order, arrival_ns, request: self.request(index) });
            }
        };
        let due = |next: usize| self.requests.get(next).is_some_and(|request| request.arrival <= now);
        let taken = next.fetch_update(Relaxed, Relaxed, |next| due(next).then_some(next + 1)).ok()?;
        let (index, request) = (taken as u32, &self.requests[taken]);
        Some(Taken { index, order: index, arrival_ns: request.arrival.as_nanos() as u64, request })
    }

    /// Counts a request of a thread as settled: completed or rejected.
    pub fn settle(&self, thread: usize, request: u32, at_ns: u64) {
        if let Some(mut sessions) = self.sessions() {
            sessions.end(thread, request, at_ns);
        }
        self.settled.fetch_add(1, Relaxed);
    }

    pub fn request(&self, index: u32) -> &'a Request {
        &self.requests[index as usize]
    }

    /// Returns the arrival of the next request, for an idle thread.
    pub fn next_arrival(&self, thread: usize) -> Next {
        let next = match &self.arrivals {
            Arrivals::Recorded(next) => self.requests.get(next.load(Relaxed)),
            Arrivals::Sessions(_) => {
                let sessions = self.sessions();
                let clock_ns = |thread: usize| self.clocks_ns[thread].load(Relaxed);
                return sessions.map_or(Next::Never, |sessions| sessions.next(thread, clock_ns));
            }
        };
        next.map_or(Next::Never, |request| Next::At(request.arrival.as_nanos() as u64))
    }

    /// Returns the tokens of a prompt with which an earlier one began; 0 without sessions.
    pub fn known_tokens(&self, request: u32) -> u64 {
        self.sessions().map_or(0, |mut sessions| sessions.known_tokens(self.request(request)))
    }

    /// Returns the think time between a request and the next one of its session.
    pub fn think_after(&self, request: u32) -> Option<Duration> {
        self.sessions()?.think_after(request).map(Duration::from_nanos)
    }

    /// Returns the sessions that have ended, if there are sessions.
    pub fn ended(&self) -> Option<Ended> {
        self.sessions().map(|sessions| sessions.ended())
    }

    /// Publishes the time of a thread, and its earliest request.
    pub fn publish(&self, thread: usize, now_ns: u64, oldest: Option<u32>) {
        self.clocks_ns[thread].store(now_ns, Relaxed);
        self.oldest[thread].store(oldest.unwrap_or(NO_REQUEST), Relaxed);
    }

    /// Returns whether a thread at `now_ns` may make a step, or is too far ahead of another active
    /// thread. The slowest always may.
    pub fn may_step(&self, thread: usize, now_ns: u64) -> bool {
        self.steps_ns[thread].store(now_ns, Relaxed);
        let slowest = self.steps_ns.iter().map(|clock| clock.load(Relaxed)).min().unwrap_or(now_ns);
        let ahead_ns = match self.arrivals {
            Arrivals::Recorded(_) => AHEAD_NS,
            Arrivals::Sessions(_) => AHEAD_OF_SESSIONS_NS,
        };
        now_ns.saturating_sub(slowest) <= ahead_ns
    }

    pub fn set_idle(&self, thread: usize) {
        self.steps_ns[thread].store(IDLE, Relaxed);
    }

    /// Returns the latest time of all threads, up to which a thread without blocks waits.
    pub fn latest_clock_ns(&self) -> u64 {
        self.clocks_ns.iter().map(|clock| clock.load(Relaxed)).max().unwrap_or(0)
    }

    /// Returns whether no thread has an earlier request.
    pub fn is_oldest(&self, request: u32) -> bool {
        self.oldest.iter().all(|oldest| oldest.load(Relaxed) >= request)
    }

    /// Stops all threads from admitting requests until this one, the earliest, has its blocks.
    pub fn pause_admission(&self, request: u32) {
        self.paused_by.store(request, Relaxed);
    }

    pub fn resume_admission(&self, request: u32) {
        if self.paused_by.load(Relaxed) == request {
            let _ = self.paused_by.compare_exchange(request, NO_REQUEST, Relaxed, Relaxed);
        }
    }

    pub fn is_admission_paused(&self) -> bool {
        self.paused_by.load(Relaxed) != NO_REQUEST
    }

    pub fn settled(&self) -> u64 {
        self.settled.load(Relaxed)
    }

    /// Returns whether to halt. Threads halt between steps, without a batch in flight.
    pub fn must_halt(&self) -> bool {
        self.settled() >= self.halt_at.load(Relaxed)
    }

    /// Makes all threads halt, regardless of settled requests.
    pub fn halt_now(&self) {
        self.halt_at.store(0, Relaxed);
    }

    /// Halts the calling thread until [`stop`](Self::stop).
    pub fn halt(&self) {
        // Release: pairs with the Acquire of `is_halted`; the work of the thread is done.
        self.halted.fetch_add(1, Release);
        while !self.is_stopped() {
            thread::sleep(HALT_INTERVAL);
        }
        self.halted.fetch_sub(1, Release);
    }

    /// Counts a thread that ends as permanently halted.
    pub fn leave(&self) {
        self.halted.fetch_add(1, Release);
    }

    /// Returns whether all threads have halted and wait for [`stop`](Self::stop).
    pub fn is_halted(&self) -> bool {
        !self.is_stopped() && self.must_halt() && self.halted.load(Acquire) == self.clocks_ns.len()
    }

    pub fn stop(&self) {
        // Release: pairs with the Acquire of `is_stopped`; halted threads see what was done
        // meanwhile.
        self.stopped.store(true, Release);
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_taken_once_and_when_due() {
        let requests = [0, 5, 5].map(|second| Request::new(Duration::from_secs(second), 1, 1));
        let clock = SharedClock::new(&requests, None, 2, None);
        let take = |second| clock.take_due(0, Duration::from_secs(second)).map(|taken| taken.index);
        assert_eq!((take(0), take(4)), (Some(0), None));
        assert_eq!(clock.next_arrival(1), Next::At(5_000_000_000));
        assert_eq!([5, 9, 9].map(take), [Some(1), Some(2), None]);
        assert_eq!(clock.next_arrival(0), Next::Never);
    }

    #[test]
    fn no_thread_runs_far_ahead_of_one_that_makes_steps() {
        let clock = SharedClock::new(&[], None, 3, None);
        assert!(clock.may_step(0, 5 * AHEAD_NS), "alone");
        assert!(clock.may_step(1, 4 * AHEAD_NS), "the slowest may always");
        assert!(clock.may_step(0, 5 * AHEAD_NS));
        assert!(!clock.may_step(0, 5 * AHEAD_NS + 1));
        clock.set_idle(1);
        assert!(clock.may_step(0, 9 * AHEAD_NS));
    }

    #[test]
    fn only_the_request_that_paused_admission_resumes_it() {
        let clock = SharedClock::new(&[], None, 2, None);
        clock.publish(0, 7, Some(3));
        clock.publish(1, 9, None);
        assert!(clock.is_oldest(3) && !clock.is_oldest(4));
        assert_eq!(clock.latest_clock_ns(), 9);
        clock.pause_admission(3);
        clock.resume_admission(4);
        assert!(clock.is_admission_paused());
        clock.resume_admission(3);
        assert!(!clock.is_admission_paused());
    }

    /// An ended thread counts as halted, and a halted one waits for the end of the replay.
    #[test]
    fn all_threads_halt_when_enough_requests_are_settled() {
        let clock = SharedClock::new(&[], None, 2, Some(2));
        clock.settled.fetch_add(1, Relaxed);
        clock.leave();
        assert!(!clock.must_halt() && !clock.is_halted());
        clock.settled.fetch_add(1, Relaxed);
        assert!(clock.must_halt() && !clock.is_halted(), "one thread is still at work");
        thread::scope(|scope| {
            let halted = scope.spawn(|| clock.halt());
            while !clock.is_halted() {
                thread::yield_now();
            }
            assert!(!halted.is_finished());
            clock.stop();
        });
        assert!(!clock.is_halted());
    }
}

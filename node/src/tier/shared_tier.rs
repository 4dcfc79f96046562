//! A tier over a store: bounded concurrency, deadlines, and the set of failed keys.
//!
//! A call of a store may never return. So it runs in its own task, and the caller waits for its
//! [outcomes](super::call) until the deadline. A few calls of the store run at a time; the others
//! wait in their callers, and end with them. When all running calls are stuck, the circuit breaker
//! opens.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::task::Poll;
use std::time::Instant;

use futures_util::FutureExt;
use futures_util::future::{join, join_all};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tracing::Instrument;

use super::breaker::{Breaker, BreakerState};
use super::call::{Call, Caller};
use super::counters::TierCounters;
use super::error::TierError;
use super::failed_keys::FailedKeys;
use super::key::TierKey;
use super::outcome::{Outcome, TierFailure};
use super::read::TierRead;
use super::settings::TierSettings;
use super::store::{Answer, Store, blocking};
use super::store_counters::StoreCounters;
use super::store_error::StoreError;
use super::value::{TierValue, ValueError};
use crate::admin::Failures;

/// Values that may wait to land, above which the store is not polled. One poll may read more.
const WAITING_MAX: usize = 2;

/// A cluster-wide tier of cached blocks, by hash, over a [`Store`].
///
/// The store is not trusted: a hit is a verified value, and everything else is a miss to the
/// caller. Each call returns one outcome per key, in order, by its deadline. Dropping its future
/// ends the call and removes what the store has not begun. Calls need a tokio runtime with a timer.
///
/// Dropping the tier closes it.
pub struct SharedTier(Arc<Shared>);

struct Shared {
    store: Box<dyn Store>,
    settings: TierSettings,
    /// One permit per concurrent call of the store.
    calls: Arc<Semaphore>,
    /// For the one put that waits in the queue with the reads.
    next_put: Semaphore,
    reads_waiting: AtomicU64,
    puts_waiting: AtomicU64,
    in_flight: AtomicU64,
    /// Calls of the store that exceed the patience.
    stuck: AtomicU64,
    breaker: Mutex<Breaker>,
    failed: Mutex<FailedKeys>,
    /// All but the state, which is separate.
    counters: Mutex<TierCounters>,
    failures: Failures,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Exists,
    Put,
    Get,
}

struct Work {
    operation: Operation,
    keys: Vec<TierKey>,
    values: Vec<TierValue>,
    bytes: usize,
}

/// What a call of the store came to.
struct Asked {
    /// Keys for which it succeeded.
    served: usize,
    /// Whether it showed that the store works, or that it does not.
    proof: Option<bool>,
}

impl SharedTier {
    /// Creates a tier. It connects to the store at the first call.
    ///
    /// # Errors
    /// [`TierError::OutOfRange`].
    pub fn new(store: impl Store, settings: TierSettings) -> Result<Self, TierError> {
        settings.check()?;
        Ok(Self(Arc::new(Shared {
            failures: Failures::new("tiers", store.name()),
            store: Box::new(store),
            calls: Arc::new(Semaphore::new(settings.calls)),
            next_put: Semaphore::new(1),
            reads_waiting: AtomicU64::new(0),
            puts_waiting: AtomicU64::new(0),
            in_flight: AtomicU64::new(0),
            stuck: AtomicU64::new(0),
            breaker: Mutex::new(Breaker::new(settings.failures, settings.rest, Instant::now())),
            failed: Mutex::new(FailedKeys::new(settings.failed_keys, settings.failed_for)),
            counters: Mutex::default(),
            settings,
        })))
    }

    /// Returns the short name of the store, for reports.
    pub fn name(&self) -> &'static str {
        self.0.store.name()
    }

    /// Returns [`Outcome::Hit`] or [`Outcome::Miss`] for each key: whether a get is worth a try.
    pub async fn exists(&self, keys: Vec<TierKey>, deadline: Instant) -> Vec<Outcome> {
        self.0.counters.lock().lookups += keys.len() as u64;
        let call = Call::new(keys.iter().map(|_| None));
        let (failed, asked) = self.0.remembered(keys);
        // A get of these would fail, and a put replaces the wrong value.
        failed.into_iter().for_each(|place| call.set(place, Outcome::Miss));
        // Answers are small: one call where possible, within the queue's limit.
        let chunk = self.0.store.lookups_per_call().clamp(1, self.0.settings.reads_max);
        let work = |keys| Work { operation: Operation::Exists, keys, values: Vec::new(), bytes: 0 };
        self.0.serve(Operation::Exists, call, asked, chunk, work, deadline).await
    }

    /// Stores values ([`Outcome::Stored`], [`Outcome::Declined`]). A value is dropped if too many
    /// wait.
    pub async fn put(&self, values: Vec<TierValue>, deadline: Instant) -> Vec<Outcome> {
        let call = Call::new(values.iter().map(|_| None));
        let chunk = self.0.chunk(values.len(), self.0.settings.puts_max);
        let bytes = values.first().map_or(0, |value| value.bytes().len());
        let work = |values: Vec<TierValue>| {
            let keys = values.iter().map(|value| *value.key()).collect();
            Work { operation: Operation::Put, keys, values, bytes }
        };
        let values = values.into_iter().enumerate().collect();
        self.0.serve(Operation::Put, call, values, chunk, work, deadline).await
    }

    /// Reads values: [`Outcome::Hit`] or [`Outcome::Miss`].
    ///
    /// When the future is ready, the memory of every key was dropped, except for keys [in
    /// flight](Outcome::InFlight) whose value is just landing.
    pub async fn get(&self, reads: Vec<TierRead>, deadline: Instant) -> Vec<Outcome> {
        let bytes = reads.iter().map(|read| read.bytes).max().unwrap_or_default();
        let (keys, memory): (Vec<_>, Vec<_>) =
            reads.into_iter().map(|read| (read.key, Some(read.memory))).unzip();
        let call = Call::new(memory.into_iter());
        let (failed, asked) = self.0.remembered(keys);
        self.0.counters.lock().remembered += failed.len() as u64;
        call.fail(&failed, &TierFailure::Remembered);
        let chunk = self.0.chunk(asked.len(), self.0.settings.reads_max);
        let work = |keys| Work { operation: Operation::Get, keys, values: Vec::new(), bytes };
        self.0.serve(Operation::Get, call, asked, chunk, work, deadline).await
    }

    /// Returns counters since the tier began, and its state.
    pub fn counters(&self) -> TierCounters {
        let (counters, in_flight) = (*self.0.counters.lock(), self.0.in_flight.load(Relaxed));
        let breaker = self.0.breaker.lock();
        TierCounters { in_flight, breaker: breaker.state(), breaker_opened: breaker.opened(), ..counters }
    }

    /// Returns the counters of the store, if it has its values in this process.
    pub fn store_counters(&self) -> Option<StoreCounters> {
        self.0.store.counters()
    }

    /// Returns the failures.
    pub fn failures(&self) -> &Failures {
        &self.0.failures
    }

    /// Refuses further calls, and ends those that wait. Does not wait for running ones.
    pub fn close(&self) {
        self.0.calls.close();
        self.0.next_put.close();
    }
}

impl Drop for SharedTier {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Returns the places of keys that failed recently, and the other keys with their places.
    fn remembered(&self, keys: Vec<TierKey>) -> (Vec<usize>, Vec<(usize, TierKey)>) {
        let (now, failed) = (Instant::now(), self.failed.lock());
        let has = |(_, key): &(usize, TierKey)| failed.has(key, now);
        let (failed, others): (Vec<_>, Vec<_>) = keys.into_iter().enumerate().partition(has);
        (failed.into_iter().map(|(place, _)| place).collect(), others)
    }

    /// Returns the number of keys per call of the store, so that the concurrent calls share the
    /// caller's keys evenly, within `waiting_max`.
    fn chunk(&self, keys: usize, waiting_max: usize) -> usize {
        keys.div_ceil(self.settings.calls).clamp(1, self.store.keys_per_call().clamp(1, waiting_max))
    }

    /// Calls the store for keys by their places, in chunks, and waits for the outcomes.
    async fn serve<T>(
        self: &Arc<Self>,
        operation: Operation,
        call: Arc<Call>,
        asked: Vec<(usize, T)>,
        chunk: usize,
        work: impl Fn(Vec<T>) -> Work,
        deadline: Instant,
    ) -> Vec<Outcome> {
        let caller = Caller(call.clone());
        if asked.is_empty() || self.admits(operation) {
            let (mut asked, mut chunks) = (asked.into_iter().peekable(), Vec::new());
            while asked.peek().is_some() {
                let (places, of): (Vec<_>, Vec<_>) = asked.by_ref().take(chunk).unzip();
                chunks.push(self.take_turn(&call, places, work(of)));
            }
            // The end of the call sets the outcomes that are missing at the deadline.
            let _ = tokio::time::timeout_at(deadline.into(), join_all(chunks)).await;
        } else {
            let places: Vec<usize> = asked.iter().map(|(place, _)| *place).collect();
            call.fail(&places, &TierFailure::Open);
        }
        let outcomes = caller.end();
        let mut counters = self.counters.lock();
        for outcome in &outcomes {
            counters.failed += u64::from(matches!(outcome, Outcome::Failed(_)));
            counters.overdue += u64::from(matches!(outcome, Outcome::InFlight));
        }
        drop(counters);
        outcomes
    }

    fn admits(&self, operation: Operation) -> bool {
        let (now, mut breaker) = (Instant::now(), self.breaker.lock());
        if self.is_stuck() {
            breaker.open(now);
        }
        if self.is_no_trial(operation) { breaker.admits_lookup(now) } else { breaker.admits(now) }
    }

    /// Returns whether a call proves nothing of the store: it opens and closes no breaker.
    fn is_no_trial(&self, operation: Operation) -> bool {
        operation == Operation::Exists && !self.store.lookups_prove()
    }

    fn proves(&self, operation: Operation, outcome: &Outcome) -> bool {
        match outcome {
            Outcome::Failed(_) => false,
            Outcome::Miss | Outcome::Declined => self.store.lookups_prove(),
            _ => !self.is_no_trial(operation),
        }
    }

    /// Returns whether all running calls of the store exceed the patience.
    fn is_stuck(&self) -> bool {
        self.stuck.load(Relaxed) >= self.settings.calls as u64
    }

    /// Waits in the queue for the store, and calls it. The caller may stop waiting at any time,
    /// which leaves the queue; the answer to a call that has begun is awaited by the task. The task
    /// also waits in the queue, so that a caller that is not polled delays no other.
    async fn take_turn(self: &Arc<Self>, call: &Arc<Call>, places: Vec<usize>, work: Work) {
        let (shared, call, (_waiting, gone)) = (self.clone(), call.clone(), oneshot::channel::<()>());
        let asking = async move {
            let turn = tokio::select! {
                biased;
                _ = gone => return,
                turn = shared.turn(work.operation == Operation::Put, places.len()) => turn,
            };
            match turn {
                // It opened while the call waited.
                Ok(_)
                    if !shared.is_no_trial(work.operation)
                        && shared.breaker.lock().state() == BreakerState::Open =>
                {
                    call.fail(&places, &TierFailure::Open);
                }
                Ok(turn) => {
                    call.begin(&places);
                    shared.run(call, places, work, turn).await;
                }
                Err(failure) => call.fail(&places, &failure),
            }
        };
        // A panic was noted in the task.
        let _ = tokio::spawn(asking).await;
    }

    /// Waits in the queue; of the puts, one at a time is queued with the reads.
    async fn turn(&self, is_put: bool, keys: usize) -> Result<OwnedSemaphorePermit, TierFailure> {
        let (waiting, max) = if is_put {
            (&self.puts_waiting, self.settings.puts_max)
        } else {
            (&self.reads_waiting, self.settings.reads_max)
        };
        if self.calls.is_closed() {
            return Err(TierFailure::Closed);
        }
        let Some(_waiting) = Counted::add(waiting, keys, max) else {
            self.counters.lock().dropped_puts += if is_put { keys as u64 } else { 0 };
            return Err(TierFailure::Busy);
        };
        let closed = |_| TierFailure::Closed;
        let _next = if is_put { Some(self.next_put.acquire().await.map_err(closed)?) } else { None };
        self.calls.clone().acquire_owned().await.map_err(closed)
    }

    async fn run(
        self: Arc<Self>,
        call: Arc<Call>,
        places: Vec<usize>,
        work: Work,
        _turn: OwnedSemaphorePermit,
    ) {
        let _in_flight = Counted::add(&self.in_flight, places.len(), usize::MAX);
        let mut asked = pin!(AssertUnwindSafe(self.ask(&call, &places, work)).catch_unwind());
        let in_time = tokio::time::timeout(self.settings.patience, &mut asked).await;
        let is_late = in_time.is_err();
        let asked = match in_time {
            Ok(asked) => asked,
            Err(_) => {
                let _stuck = Counted::add(&self.stuck, 1, usize::MAX);
                self.is_late();
                asked.await
            }
        };
        let failure = match asked {
            Ok(Ok(Asked { proof: Some(true), .. })) => return,
            Ok(Ok(Asked { proof: None, .. })) => {
                return self.breaker.lock().proved_nothing(Instant::now());
            }
            Ok(Ok(_)) => None,
            Ok(Err(error)) => Some(TierFailure::Store(error)),
            Err(_) => Some(TierFailure::Panicked),
        };
        if !is_late {
            self.breaker.lock().failed(Instant::now());
        }
        if let Some(failure) = failure {
            self.failures.note(&failure);
            call.fail(&places, &failure);
        }
    }

    /// Notes that a call exceeds the patience.
    fn is_late(&self) {
        self.failures.note(format!("no answer within {} ms", self.settings.patience.as_millis()));
        let mut breaker = self.breaker.lock();
        if self.is_stuck() {
            breaker.open(Instant::now());
        } else {
            breaker.failed(Instant::now());
        }
    }

    /// Calls the store.
    async fn ask(&self, call: &Call, places: &[usize], work: Work) -> Result<Asked, StoreError> {
        let span = tracing::info_span!(
            parent: None,
            "kvpool.tier",
            tier = self.store.name(),
            operation = work.operation.name(),
            keys = places.len() as u64,
            served = tracing::field::Empty,
            error = tracing::field::Empty,
            otel.kind = "client",
            otel.status_code = tracing::field::Empty,
        );
        let served = self.ask_within(call, places, work).instrument(span.clone()).await;
        match &served {
            Ok(asked) => span.record("served", asked.served as u64),
            Err(error) => {
                span.record("error", error.to_string());
                span.record("otel.status_code", "ERROR")
            }
        };
        served
    }

    async fn ask_within(&self, call: &Call, places: &[usize], work: Work) -> Result<Asked, StoreError> {
        let Work { operation, keys, values, bytes } = work;
        let (began, mut served, mut proved) = (Instant::now(), 0, false);
        let mut tell = |at: usize, outcome: Outcome| {
            let proves = self.proves(operation, &outcome);
            if proves && !proved && began.elapsed() <= self.settings.patience {
                self.breaker.lock().succeeded();
            }
            proved |= proves;
            served += usize::from(!matches!(outcome, Outcome::Failed(_)));
            self.note(&keys[at], &outcome, bytes, operation == Operation::Get);
            call.set(places[at], outcome);
        };
        match operation {
            Operation::Exists => {
                let found = self.store.exists(&keys).await?;
                self.check_count(found.len(), keys.len())?;
                let outcome = |is_there| if is_there { Outcome::Hit } else { Outcome::Miss };
                found.into_iter().enumerate().for_each(|(at, found)| tell(at, outcome(found)));
            }
            Operation::Put => {
                let stored = self.store.put(values).await?;
                self.check_count(stored.len(), keys.len())?;
                let outcome = |stored: Result<(), StoreError>| match stored {
                    Ok(()) => Outcome::Stored,
                    Err(StoreError::Declined { .. }) => Outcome::Declined,
                    Err(error) => Outcome::Failed(error.into()),
                };
                stored.into_iter().enumerate().for_each(|(at, stored)| tell(at, outcome(stored)));
            }
            Operation::Get => self.get(call, places, &keys, bytes, &mut tell).await?,
        }
        let has_failed = served < keys.len();
        Ok(Asked { served, proof: (proved || has_failed).then_some(proved) })
    }

    async fn get(
        &self,
        call: &Call,
        places: &[usize],
        keys: &[TierKey],
        bytes: usize,
        tell: &mut (dyn FnMut(usize, Outcome) + Send),
    ) -> Result<(), StoreError> {
        let (mut answered, mut bad) = (vec![false; keys.len()], Vec::new());
        let (answers, mut given) = mpsc::unbounded_channel();
        let waiting = AtomicUsize::new(0);
        let asked = async {
            // Dropping it ends the other future.
            let answers = answers;
            let mut answer = |at: usize, answer: Answer| {
                // A second answer for one key is ignored.
                if answered.get_mut(at).is_some_and(|answered| !std::mem::replace(answered, true)) {
                    waiting.fetch_add(1, Relaxed);
                    let _ = answers.send((at, answer));
                }
            };
            let done = self.store.get(keys, bytes, &mut answer).await;
            done.map(|()| answered.iter().filter(|is_answered| **is_answered).count())
        };
        // A value lands while the store reads the next one.
        let told = async {
            while let Some((at, answer)) = given.recv().await {
                waiting.fetch_sub(1, Relaxed);
                let memory = call.take_memory(places[at]);
                let outcome = match (answer, memory) {
                    (Ok(None), _) => Outcome::Miss,
                    (Ok(Some(value)), Some(mut memory)) => {
                        match blocking(move || memory.land((*value).as_ref())).await {
                            Ok(()) => Outcome::Hit,
                            Err(error) => {
                                bad.push(keys[at]);
                                Outcome::Failed(error.into())
                            }
                        }
                    }
                    (Ok(Some(_)), None) => Outcome::InFlight,
                    (Err(error @ StoreError::Damaged { .. }), _) => {
                        self.counters.lock().bad_values += 1;
                        self.failures.note(error);
                        Outcome::Miss
                    }
                    (Err(error), _) => Outcome::Failed(error.into()),
                };
                tell(at, outcome);
            }
        };
        // If the store panics, the answers before it still land.
        let mut asked = pin!(AssertUnwindSafe(asked).catch_unwind());
        // `told` is polled first: if it leaves too many values, a landing one wakes this task.
        let asked = poll_fn(|cx| {
            if waiting.load(Relaxed) >= WAITING_MAX { Poll::Pending } else { asked.as_mut().poll(cx) }
        });
        let ((), done) = join(told, asked).await;
        if !bad.is_empty() {
            self.store.found_bad_values(&bad);
        }
        self.check_count(done.unwrap_or_else(|panic| resume_unwind(panic))?, keys.len())
    }

    fn check_count(&self, got: usize, want: usize) -> Result<(), StoreError> {
        if got == want {
            return Ok(());
        }
        let reason = format!("{got} keys, and was asked for {want}");
        Err(StoreError::Answer { store: self.store.name(), reason })
    }

    /// Counts an outcome, and remembers a failed key.
    fn note(&self, key: &TierKey, outcome: &Outcome, bytes: usize, is_get: bool) {
        let mut counters = self.counters.lock();
        match outcome {
            Outcome::Stored => {
                counters.stored += 1;
                counters.written_bytes += bytes as u64;
                self.failed.lock().forget(key);
            }
            Outcome::Declined => counters.declined += 1,
            Outcome::Hit if is_get => {
                counters.hits += 1;
                counters.read_bytes += bytes as u64;
            }
            Outcome::Miss if is_get => counters.misses += 1,
            Outcome::Failed(failure) => {
                if is_get {
                    counters.bad_values += u64::from(matches!(failure, TierFailure::Value(_)));
                    self.failed.lock().note(*key, Instant::now());
                }
                drop(counters);
                if *failure != TierFailure::Value(ValueError::Stale) {
                    self.failures.note(failure);
                }
            }
            _ => {}
        }
    }
}

impl Operation {
    const fn name(self) -> &'static str {
        match self {
            Self::Exists => "exists",
            Self::Put => "put",
            Self::Get => "get",
        }
    }
}

/// A share of a counter, subtracted on drop.
struct Counted<'a>(&'a AtomicU64, u64);

impl<'a> Counted<'a> {
    /// Adds to a counter, unless the sum would exceed `max`.
    fn add(counter: &'a AtomicU64, count: usize, max: usize) -> Option<Self> {
        let (count, max) = (count as u64, max as u64);
        // Relaxed: the counters order nothing.
        let sum = |now: u64| now.checked_add(count).filter(|sum| *sum <= max);
        counter.fetch_update(Relaxed, Relaxed, sum).ok().map(|_| Self(counter, count))
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Relaxed);
    }
}

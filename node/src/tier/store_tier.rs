//! A tier over a store: threads for its calls, deadlines, and what is remembered of failures.
//!
//! A call of a store can block for ever. So it runs on one of a few threads, and the caller waits for
//! its [results](super::work), not for the thread. A thread that is stuck keeps the session, the values
//! and the memory of its one call. When all threads are stuck, the circuit breaker opens.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::breaker::{Breaker, BreakerState};
use super::counters::{Counters, TierCounters, add};
use super::error::TierError;
use super::failed_keys::FailedKeys;
use super::key::TierKey;
use super::outcome::{Outcome, TierFailure};
use super::perform::perform;
use super::queue::Queue;
use super::settings::TierSettings;
use super::shared_tier::{SharedTier, TierFuture, TierRead};
use super::store::{Session, Store};
use super::store_error::StoreError;
use super::value::{TierValue, ValueError};
use super::work::{Results, Task, Work};
use crate::admin::Failures;

/// A [`SharedTier`] over a [`Store`].
///
/// Dropping it closes it. A thread whose call of the store has not returned ends when it does.
pub struct StoreTier {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    store: Box<dyn Store>,
    name: &'static str,
    settings: TierSettings,
    queue: Queue,
    breaker: Mutex<Breaker>,
    failed: Mutex<FailedKeys>,
    counters: Counters,
    failures: Failures,
    began: Instant,
    /// For each thread, when its call began, in milliseconds since `began` plus one; 0: none.
    calls: Vec<AtomicU64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StoreTier {
    /// Starts the threads. The store is connected to when it is first asked, and need not be there.
    ///
    /// # Errors
    ///
    /// [`TierError::OutOfRange`], [`TierError::Thread`].
    pub fn start(store: impl Store, settings: TierSettings) -> Result<Self, TierError> {
        settings.check()?;
        let now = Instant::now();
        let shared = Arc::new(Shared {
            name: store.name(),
            failures: Failures::new("tiers", store.name()),
            store: Box::new(store),
            queue: Queue::new(settings.reads_max, settings.puts_max),
            breaker: Mutex::new(Breaker::new(settings.failures, settings.rest, now)),
            failed: Mutex::new(FailedKeys::new(settings.failed_keys, settings.failed_for)),
            counters: Counters::default(),
            began: now,
            calls: (0..settings.threads).map(|_| AtomicU64::new(0)).collect(),
            settings,
        });
        let mut tier = Self { shared, threads: Vec::new() };
        for number in 0..tier.shared.settings.threads {
            let shared = tier.shared.clone();
            let named = thread::Builder::new().name(format!("kvpool-tier-{number}"));
            let thread = named.spawn(move || shared.run(number));
            tier.threads.push(thread.map_err(|error| TierError::Thread { reason: error.to_string() })?);
        }
        Ok(tier)
    }

    /// Returns the number of threads that have not ended after [`close`](SharedTier::close).
    pub fn threads_left(&self) -> usize {
        self.threads.iter().filter(|thread| !thread.is_finished()).count()
    }
}

impl Drop for StoreTier {
    fn drop(&mut self) {
        self.close();
    }
}

impl SharedTier for StoreTier {
    fn name(&self) -> &'static str {
        self.shared.name
    }

    fn exists(&self, keys: Vec<TierKey>, deadline: Instant) -> TierFuture {
        add(&self.shared.counters.lookups, keys.len());
        let (results, now) = (Results::new(keys.len()), Instant::now());
        // A get of these would fail, and a put replaces what is wrong there.
        let (failed, mut asked): (Vec<_>, Vec<_>) = {
            let failed = lock(&self.shared.failed);
            keys.into_iter().enumerate().partition(|(_, key)| failed.has(key, now))
        };
        failed.iter().for_each(|(place, _)| results.set(*place, Outcome::Miss));
        if !asked.is_empty() && !self.shared.admits() {
            refuse(&mut asked, &results);
        }
        // Where answers are small: in one call, and without waiting for each other, as far as the queue
        // permits.
        let chunk = self.shared.store.lookups_per_call().clamp(1, self.shared.settings.reads_max);
        let mut asked = asked.into_iter().peekable();
        while asked.peek().is_some() {
            let (places, keys) = asked.by_ref().take(chunk).unzip();
            self.shared.submit(Work::Exists(keys), places, &results);
        }
        self.shared.clone().answer(results, deadline)
    }

    fn put(&self, values: Vec<TierValue>, deadline: Instant) -> TierFuture {
        let results = Results::new(values.len());
        let mut values: Vec<_> = values.into_iter().enumerate().collect();
        if !values.is_empty() && !self.shared.admits() {
            refuse(&mut values, &results);
        }
        let chunk = self.shared.chunk(values.len(), self.shared.settings.puts_max);
        let mut values = values.into_iter().peekable();
        while values.peek().is_some() {
            let (places, values) = values.by_ref().take(chunk).unzip();
            self.shared.submit(Work::Put(values), places, &results);
        }
        self.shared.clone().answer(results, deadline)
    }

    fn get(&self, reads: Vec<TierRead>, deadline: Instant) -> TierFuture {
        let (results, now) = (Results::new(reads.len()), Instant::now());
        let mut asked = Vec::with_capacity(reads.len());
        for (place, read) in reads.into_iter().enumerate() {
            if lock(&self.shared.failed).has(&read.key, now) {
                drop(read);
                add(&self.shared.counters.remembered, 1);
                results.set(place, Outcome::Failed(TierFailure::Remembered));
            } else {
                asked.push((place, read));
            }
        }
        if !asked.is_empty() && !self.shared.admits() {
            refuse(&mut asked, &results);
        }
        let chunk = self.shared.chunk(asked.len(), self.shared.settings.reads_max);
        let mut asked = asked.into_iter().peekable();
        while asked.peek().is_some() {
            let (places, reads) = asked.by_ref().take(chunk).unzip();
            self.shared.submit(Work::Get(reads), places, &results);
        }
        self.shared.clone().answer(results, deadline)
    }

    fn counters(&self) -> TierCounters {
        let breaker = lock(&self.shared.breaker);
        self.shared.counters.read(breaker.state(), breaker.opened())
    }

    fn failures(&self) -> Option<Failures> {
        Some(self.shared.failures.clone())
    }

    fn close(&self) {
        for task in self.shared.queue.close() {
            task.results.fail(&task.places, &TierFailure::Closed);
        }
    }
}

impl Shared {
    /// Returns the number of keys per task, so that all threads have a share of a call, and that a
    /// task fits into a queue of `queued_max` keys.
    fn chunk(&self, keys: usize, queued_max: usize) -> usize {
        keys.div_ceil(self.settings.threads).clamp(1, self.store.keys_per_call().clamp(1, queued_max))
    }

    fn submit(&self, work: Work, places: Vec<usize>, results: &Arc<Results>) {
        let task = Task { work, places, results: results.clone() };
        if let Err(task) = self.queue.push(task) {
            let is_closed = self.queue.is_closed();
            let failure = if is_closed { TierFailure::Closed } else { TierFailure::Busy };
            if matches!(task.work, Work::Put(_)) && !is_closed {
                add(&self.counters.dropped_puts, task.places.len());
            }
            // First: with the outcome, the caller may take the memory back.
            drop(task.work);
            results.fail(&task.places, &failure);
        }
    }

    /// Returns whether a call may go to the store.
    fn admits(&self) -> bool {
        let (now, mut breaker) = (Instant::now(), lock(&self.breaker));
        if self.is_stuck(now) {
            if breaker.state() != BreakerState::Open {
                self.failures.note(self.late());
            }
            breaker.open(now);
        }
        breaker.admits(now)
    }

    /// Returns whether every thread is in a call that takes too long.
    fn is_stuck(&self, now: Instant) -> bool {
        let now = now.saturating_duration_since(self.began);
        self.calls.iter().all(|call| {
            // Relaxed: the time of a call orders nothing.
            let since = call.load(Relaxed).checked_sub(1).map(Duration::from_millis);
            since.is_some_and(|since| now.saturating_sub(since) > self.settings.patience)
        })
    }

    /// Describes calls that take too long.
    fn late(&self) -> String {
        format!("no answer within {} ms", self.settings.patience.as_millis())
    }

    /// Waits for the outcomes of a call, and counts them.
    fn answer(self: Arc<Self>, results: Arc<Results>, deadline: Instant) -> TierFuture {
        let waiting = Box::pin(results.clone().wait(deadline));
        Box::pin(Waiting { waiting, after: Sweep { shared: self, results } }.outcomes())
    }

    /// A thread: takes tasks until the queue is closed.
    fn run(&self, number: usize) {
        let mut session = None;
        while let Some(task) = self.queue.pop() {
            // Dropped with its memory: the call is over.
            if !task.results.begin(&task.places) {
                continue;
            }
            let (places, results) = (task.places.clone(), task.results.clone());
            let began = self.began.elapsed();
            self.calls[number].store(began.as_millis() as u64 + 1, Relaxed);
            add(&self.counters.in_flight, places.len());
            let asked = catch_unwind(AssertUnwindSafe(|| self.ask(&mut session, task)));
            self.calls[number].store(0, Relaxed);
            self.counters.in_flight.fetch_sub(places.len() as u64, Relaxed);
            let failure = match asked {
                Ok(Ok(is_success)) => {
                    let is_slow = self.began.elapsed().saturating_sub(began) > self.settings.patience;
                    if is_slow {
                        self.failures.note(self.late());
                    }
                    if !is_success || is_slow {
                        lock(&self.breaker).failed(Instant::now());
                    }
                    continue;
                }
                Ok(Err(error)) => TierFailure::Store(error),
                Err(_) => TierFailure::Panicked,
            };
            self.failures.note(&failure);
            // Its state is unknown.
            session = None;
            lock(&self.breaker).failed(Instant::now());
            results.fail(&places, &failure);
        }
    }

    /// Asks the store. Returns whether it did what it was asked for, for one key at least.
    fn ask(&self, session: &mut Option<Box<dyn Session>>, task: Task) -> Result<bool, StoreError> {
        let span = tracing::info_span!(
            parent: None,
            "kvpool.tier",
            tier = self.name,
            operation = task.work.name(),
            keys = task.places.len() as u64,
            served = tracing::field::Empty,
            error = tracing::field::Empty,
            otel.kind = "client",
            otel.status_code = tracing::field::Empty,
        );
        let _entered = span.enter();
        let served = self.ask_within(session, task);
        match &served {
            Ok(keys) => span.record("served", *keys as u64),
            Err(error) => {
                span.record("error", error.to_string());
                span.record("otel.status_code", "ERROR")
            }
        };
        Ok(served? > 0)
    }

    /// Asks the store. Returns for how many keys it did what it was asked for.
    fn ask_within(&self, session: &mut Option<Box<dyn Session>>, task: Task) -> Result<usize, StoreError> {
        let open = match session {
            Some(open) => open,
            None => session.insert(self.store.open()?),
        };
        let ((keys, bytes), is_get) = (keys_of(&task.work), matches!(task.work, Work::Get(_)));
        let (began, mut served) = (Instant::now(), 0);
        let mut note = |place: usize, outcome: &Outcome| {
            self.note(&keys[place], outcome, bytes, is_get);
            let is_good = matches!(outcome, Outcome::Stored | Outcome::Hit | Outcome::Miss);
            if is_good && served == 0 && began.elapsed() <= self.settings.patience {
                lock(&self.breaker).succeeded();
            }
            served += usize::from(is_good);
        };
        perform(self.name, &mut **open, task, &mut note)?;
        Ok(served)
    }

    /// Counts an outcome, and remembers a key that failed.
    fn note(&self, key: &TierKey, outcome: &Outcome, bytes: usize, is_get: bool) {
        let counters = &self.counters;
        if let Outcome::Failed(failure) = outcome
            && *failure != TierFailure::Value(ValueError::Stale)
        {
            self.failures.note(failure);
        }
        match outcome {
            Outcome::Stored => {
                add(&counters.stored, 1);
                add(&counters.written_bytes, bytes);
                lock(&self.failed).forget(key);
            }
            Outcome::Hit if is_get => {
                add(&counters.hits, 1);
                add(&counters.read_bytes, bytes);
            }
            Outcome::Miss if is_get => add(&counters.misses, 1),
            Outcome::Failed(failure) if is_get => {
                if matches!(failure, TierFailure::Value(_)) {
                    add(&counters.bad_values, 1);
                }
                lock(&self.failed).note(*key, Instant::now());
            }
            _ => {}
        }
    }
}

/// A call under way. What it drops, it drops in this order.
struct Waiting<F> {
    waiting: Pin<Box<F>>,
    after: Sweep,
}

impl<F: Future<Output = Vec<Outcome>>> Waiting<F> {
    async fn outcomes(mut self) -> Vec<Outcome> {
        let outcomes = self.waiting.as_mut().await;
        let counters = &self.after.shared.counters;
        let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| is(outcome)).count();
        add(&counters.failed, count(|outcome| matches!(outcome, Outcome::Failed(_))));
        add(&counters.overdue, count(|outcome| matches!(outcome, Outcome::InFlight)));
        outcomes
    }
}

/// Takes back what has not begun of a call that is over: all threads may be stuck for ever.
struct Sweep {
    shared: Arc<Shared>,
    results: Arc<Results>,
}

impl Drop for Sweep {
    fn drop(&mut self) {
        if !self.results.is_complete() {
            drop(self.shared.queue.sweep());
        }
    }
}

/// Takes the keys of a call that does not go to the store.
fn refuse<T>(keys: &mut Vec<(usize, T)>, results: &Results) {
    let places: Vec<usize> = keys.iter().map(|(place, _)| *place).collect();
    // First: with the outcome, the caller may take the memory back.
    keys.clear();
    results.fail(&places, &TierFailure::Open);
}

/// Returns the keys of a task, and the size of its values.
fn keys_of(work: &Work) -> (Vec<TierKey>, usize) {
    match work {
        Work::Exists(keys) => (keys.clone(), 0),
        Work::Put(values) => {
            let bytes = values.first().map_or(0, |value| value.bytes().len());
            (values.iter().map(|value| *value.key()).collect(), bytes)
        }
        Work::Get(reads) => {
            (reads.iter().map(|read| read.key).collect(), reads.first().map_or(0, |read| read.bytes))
        }
    }
}

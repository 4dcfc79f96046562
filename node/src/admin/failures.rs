//! Failures of a service beside a pool: counted, and logged at a limited rate.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const ANY_ONCE: Duration = Duration::from_secs(10);
const SAME_ONCE: Duration = Duration::from_secs(60);

/// Most characters of a reason: a service may answer anything.
const REASON_CHARS: usize = 300;

/// The failures of a service. Clones share them.
#[derive(Clone, Debug)]
pub struct Failures(Arc<State>);

#[derive(Debug)]
struct State {
    group: &'static str,
    name: &'static str,
    count: AtomicU64,
    last: Mutex<Last>,
}

#[derive(Debug, Default)]
struct Last {
    failure: Option<(String, Instant)>,
    told: Option<(String, Instant)>,
    /// Failures since the last one that was logged.
    untold: u64,
}

impl Last {
    /// Returns the number of failures to log now, if this one is to be logged.
    fn take_due(&mut self, reason: &str, now: Instant) -> Option<u64> {
        let is_due = self.told.as_ref().is_none_or(|(told, at)| {
            now.duration_since(*at) >= if told == reason { SAME_ONCE } else { ANY_ONCE }
        });
        is_due.then(|| {
            self.told = Some((reason.to_owned(), now));
            std::mem::take(&mut self.untold)
        })
    }
}

impl Failures {
    /// Creates the record of a service, by the names of its [`Reporter`](super::Reporter).
    pub fn new(group: &'static str, name: &'static str) -> Self {
        Self(Arc::new(State { group, name, count: AtomicU64::new(0), last: Mutex::default() }))
    }

    /// Notes a failure. Logs a warning, unless the same failure was logged in the last minute, or
    /// any in the last ten seconds.
    pub fn note(&self, reason: impl ToString) {
        let reason = reason.to_string();
        let reason: String = reason.chars().filter(|char| !char.is_control()).take(REASON_CHARS).collect();
        let (mut last, now) = (self.last(), Instant::now());
        // Relaxed: a counter orders nothing.
        self.0.count.fetch_add(1, Relaxed);
        last.failure = Some((reason.clone(), now));
        last.untold += 1;
        let due = last.take_due(&reason, now);
        // Writing the log may block.
        drop(last);
        if let Some(failures) = due {
            let (service, name) = (self.0.group, self.0.name);
            tracing::warn!(service, name, failures, error = reason, "a service fails");
        }
    }

    /// Returns the number of failures.
    pub fn count(&self) -> u64 {
        self.0.count.load(Relaxed)
    }

    /// Returns the reason of the last failure, and the time since then.
    pub fn last_error(&self) -> Option<(String, Duration)> {
        self.last().failure.as_ref().map(|(reason, at)| (reason.clone(), at.elapsed()))
    }

    pub(super) fn add_to(&self, stats: &mut Value) {
        stats["failures"] = json!(self.count());
        if let Some((reason, age)) = self.last_error() {
            stats["last_error"] = reason.into();
            stats["last_error_s"] = age.as_secs().into();
        }
    }

    fn last(&self) -> MutexGuard<'_, Last> {
        self.0.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warnings_are_few_and_have_the_number_of_failures() {
        let (mut last, begin) = (Last::default(), Instant::now());
        let mut told = |reason: &str, seconds: u64| {
            last.untold += 1;
            last.take_due(reason, begin + Duration::from_secs(seconds))
        };
        assert_eq!(told("refused", 0), Some(1), "the first one at once");
        assert_eq!((told("refused", 0), told("refused", 59), told("late", 9)), (None, None, None));
        assert_eq!(told("late", 10), Some(4), "another reason");
        assert_eq!((told("late", 69), told("late", 70)), (None, Some(2)));
    }

    #[test]
    fn the_last_one_is_remembered_as_one_short_line() {
        let failures = Failures::new("tiers", "redis");
        assert_eq!((failures.count(), failures.last_error()), (0, None));
        failures.note("first");
        failures.clone().note(format!("second\r\n{}", "x".repeat(10_000)));
        let (reason, age) = failures.last_error().unwrap();
        assert!(reason.starts_with("secondx") && reason.len() == REASON_CHARS, "{reason}");
        assert!(failures.count() == 2 && age < Duration::from_secs(60));
        let mut stats = json!({ "stored": 1 });
        failures.add_to(&mut stats);
        assert_eq!(stats, json!({ "stored": 1, "failures": 2, "last_error": reason, "last_error_s": 0 }));
    }
}

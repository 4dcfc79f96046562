//! The work of one call, and its results.
//!
//! ```text
//! queued  --[a thread takes the task]-->  begun  --[the store has answered]-->  done
//!    |                                      |
//!    +-- deadline: taken back, failed       +-- deadline: in flight; the memory stays with the thread
//! ```
//!
//! Invariant: after the call has returned, no key of it begins.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

use super::key::TierKey;
use super::outcome::{Outcome, TierFailure};
use super::shared_tier::TierRead;
use super::value::TierValue;

/// What is asked of a store in one call of a session.
pub(super) enum Work {
    Exists(Vec<TierKey>),
    Put(Vec<TierValue>),
    Get(Vec<TierRead>),
}

impl Work {
    /// Returns the name of the call.
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Exists(_) => "exists",
            Self::Put(_) => "put",
            Self::Get(_) => "get",
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Exists(keys) => keys.len(),
            Self::Put(values) => values.len(),
            Self::Get(reads) => reads.len(),
        }
    }
}

/// A part of a call, for a thread.
pub(super) struct Task {
    pub(super) work: Work,
    /// Place in the call of each key.
    pub(super) places: Vec<usize>,
    pub(super) results: Arc<Results>,
}

/// State of one key.
enum Progress {
    Queued,
    Begun,
    Done(Outcome),
}

struct State {
    keys: Vec<Progress>,
    left: usize,
    is_over: bool,
}

/// The results of a call, while they come.
pub(super) struct Results {
    state: Mutex<State>,
    complete: Notify,
}

impl Results {
    pub(super) fn new(keys: usize) -> Arc<Self> {
        let keys: Vec<_> = (0..keys).map(|_| Progress::Queued).collect();
        let state = State { left: keys.len(), keys, is_over: false };
        Arc::new(Self { state: Mutex::new(state), complete: Notify::new() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a thread begins with these keys. Returns false if the call is over.
    pub(super) fn begin(&self, places: &[usize]) -> bool {
        let mut state = self.state();
        if state.is_over {
            return false;
        }
        places.iter().for_each(|&place| state.keys[place] = Progress::Begun);
        true
    }

    /// Notes the outcome of a key; the first one counts.
    pub(super) fn set(&self, place: usize, outcome: Outcome) {
        let mut state = self.state();
        if matches!(state.keys[place], Progress::Done(_)) {
            return;
        }
        state.keys[place] = Progress::Done(outcome);
        state.left -= 1;
        if state.left == 0 {
            drop(state);
            self.complete.notify_one();
        }
    }

    /// Notes the same failure for keys that have no outcome.
    pub(super) fn fail(&self, places: &[usize], failure: &TierFailure) {
        places.iter().for_each(|&place| self.set(place, Outcome::Failed(failure.clone())));
    }

    /// Returns whether the call has returned, or its future was dropped.
    pub(super) fn is_over(&self) -> bool {
        self.state().is_over
    }

    pub(super) fn is_complete(&self) -> bool {
        self.state().left == 0
    }

    /// Waits for all outcomes, or for the deadline, and ends the call.
    pub(super) fn wait(
        self: Arc<Self>,
        deadline: Instant,
    ) -> impl Future<Output = Vec<Outcome>> + Send + use<> {
        // Ends the call also if the future is dropped, and before it was polled.
        let call = Call(self);
        async move {
            if !call.0.is_complete() {
                // A notification between the look and this line is kept for it.
                let _ = tokio::time::timeout_at(deadline.into(), call.0.complete.notified()).await;
            }
            call.end()
        }
    }
}

/// A call; it is over when this is dropped.
struct Call(Arc<Results>);

impl Call {
    fn end(&self) -> Vec<Outcome> {
        let mut state = self.0.state();
        state.is_over = true;
        let outcome = |progress: &Progress| match progress {
            Progress::Queued => Outcome::Failed(TierFailure::Late),
            Progress::Begun => Outcome::InFlight,
            Progress::Done(outcome) => outcome.clone(),
        };
        state.keys.iter().map(outcome).collect()
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.state().is_over = true;
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn a_call_ends_at_its_deadline_and_takes_back_what_has_not_begun() {
        let results = Results::new(3);
        assert!(results.begin(&[0, 1]));
        results.set(0, Outcome::Hit);
        let deadline = Instant::now() + Duration::from_millis(20);
        let outcomes = results.clone().wait(deadline).await;
        assert!(Instant::now() >= deadline);
        let late = Outcome::Failed(TierFailure::Late);
        assert_eq!(outcomes, [Outcome::Hit, Outcome::InFlight, late]);
        assert!(!results.begin(&[2]));
        results.set(1, Outcome::Miss);
    }

    #[tokio::test]
    async fn a_complete_call_does_not_wait() {
        let results = Results::new(1);
        results.fail(&[0], &TierFailure::Open);
        results.set(0, Outcome::Hit);
        let far = Instant::now() + Duration::from_secs(3600);
        assert_eq!(results.wait(far).await, [Outcome::Failed(TierFailure::Open)]);
        assert_eq!(Results::new(0).wait(far).await, []);
        let results = Results::new(1);
        let waiting = tokio::spawn(results.clone().wait(far));
        tokio::time::sleep(Duration::from_millis(5)).await;
        results.set(0, Outcome::Miss);
        assert_eq!(waiting.await.unwrap(), [Outcome::Miss]);
    }

    #[tokio::test]
    async fn a_dropped_call_is_over() {
        let results = Results::new(1);
        let far = Instant::now() + Duration::from_secs(3600);
        let waiting = tokio::time::timeout(Duration::from_millis(5), results.clone().wait(far));
        waiting.await.unwrap_err();
        assert!(!results.begin(&[0]));
        let results = Results::new(1);
        drop(results.clone().wait(far));
        assert!(!results.begin(&[0]), "never polled");
    }
}

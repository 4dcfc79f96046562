//! The outcomes of one call, while they arrive.
//!
//! ```text
//! waiting  --[a call of the store takes the key]-->  begun  --[the store has answered]-->  done
//!    |                                                 |
//!    +-- deadline: failed                              +-- deadline: in flight
//! ```
//!
//! The memory of a get is taken when its value arrives, and dropped before the outcome becomes
//! visible. The end of the call drops the remaining memory, so a later answer finds none.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::outcome::{Outcome, TierFailure};
use super::read::Landing;

enum Progress {
    Waiting,
    Begun,
    Done(Outcome),
}

struct Key {
    progress: Progress,
    memory: Option<Box<dyn Landing>>,
}

pub(super) struct Call(Mutex<Vec<Key>>);

impl Call {
    /// Creates a call, with optional memory for each of its keys.
    pub(super) fn new(memory: impl Iterator<Item = Option<Box<dyn Landing>>>) -> Arc<Self> {
        let key = |memory| Key { progress: Progress::Waiting, memory };
        Arc::new(Self(Mutex::new(memory.map(key).collect())))
    }

    fn keys(&self) -> MutexGuard<'_, Vec<Key>> {
        self.0.lock()
    }

    pub(super) fn begin(&self, places: &[usize]) {
        let mut keys = self.keys();
        places.iter().for_each(|&place| keys[place].progress = Progress::Begun);
    }

    /// Takes the memory of a key; `None` if a value has arrived there, or the call is over.
    pub(super) fn take_memory(&self, place: usize) -> Option<Box<dyn Landing>> {
        self.keys()[place].memory.take()
    }

    pub(super) fn set(&self, place: usize, outcome: Outcome) {
        // First, because the caller may reuse the memory once the outcome is visible.
        drop(self.take_memory(place));
        let progress = &mut self.keys()[place].progress;
        if !matches!(progress, Progress::Done(_)) {
            *progress = Progress::Done(outcome);
        }
    }

    pub(super) fn fail(&self, places: &[usize], failure: &TierFailure) {
        places.iter().for_each(|&place| self.set(place, Outcome::Failed(failure.clone())));
    }

    /// Ends the call, and drops the remaining memory. Returns the outcomes.
    fn end(&self) -> Vec<Outcome> {
        let mut keys = self.keys();
        let memory: Vec<_> = keys.iter_mut().map(|key| key.memory.take()).collect();
        let outcome = |key: &Key| match &key.progress {
            Progress::Waiting => Outcome::Failed(TierFailure::Late),
            Progress::Begun => Outcome::InFlight,
            Progress::Done(outcome) => outcome.clone(),
        };
        let outcomes = keys.iter().map(outcome).collect();
        drop(keys);
        drop(memory);
        outcomes
    }
}

/// The caller's handle of a call; dropping it ends the call.
pub(super) struct Caller(pub(super) Arc<Call>);

impl Caller {
    pub(super) fn end(self) -> Vec<Outcome> {
        self.0.end()
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::super::value::ValueError;
    use super::*;

    struct Nowhere {
        _memory: Arc<()>,
    }

    impl Landing for Nowhere {
        fn land(&mut self, _value: &[u8]) -> Result<(), ValueError> {
            Ok(())
        }
    }

    #[test]
    fn a_call_that_ends_takes_back_what_has_not_landed() {
        let memory = Arc::new(());
        let some = (0..4).map(|_| Some(Box::new(Nowhere { _memory: memory.clone() }) as Box<dyn Landing>));
        let call = Call::new(some);
        let caller = Caller(call.clone());
        call.begin(&[0, 1, 3]);
        call.set(0, Outcome::Hit);
        call.fail(&[0], &TierFailure::Open);
        let landing = call.take_memory(3);
        assert_eq!(Arc::strong_count(&memory), 4);
        let late = Outcome::Failed(TierFailure::Late);
        assert_eq!(caller.end(), [Outcome::Hit, Outcome::InFlight, late, Outcome::InFlight]);
        assert_eq!(Arc::strong_count(&memory), 2, "one value is landing");
        assert!(call.take_memory(1).is_none());
        drop(landing);
        call.set(1, Outcome::Miss);
        assert_eq!(Arc::strong_count(&memory), 1);
    }

    #[test]
    fn a_dropped_call_is_over() {
        let memory = Arc::new(());
        let call =
            Call::new([Some(Box::new(Nowhere { _memory: memory.clone() }) as Box<dyn Landing>)].into_iter());
        drop(Caller(call.clone()));
        assert!(call.take_memory(0).is_none() && Arc::strong_count(&memory) == 1);
    }
}

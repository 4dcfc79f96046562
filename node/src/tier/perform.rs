//! One task on a thread of a tier: a call of a session, and what its answers mean.

use std::sync::Arc;

use super::outcome::Outcome;
use super::shared_tier::TierRead;
use super::store::Session;
use super::store_error::StoreError;
use super::value::TierValue;
use super::work::{Results, Task, Work};

/// Takes note of the outcome of a key, by its place in the task, before the caller sees it.
pub(super) type Note<'a> = &'a mut dyn FnMut(usize, &Outcome);

/// The results of a task by its own places.
struct Told<'a> {
    places: &'a [usize],
    results: &'a Arc<Results>,
    note: Note<'a>,
}

impl Told<'_> {
    fn tell(&mut self, place: usize, outcome: Outcome) {
        (self.note)(place, &outcome);
        self.results.set(self.places[place], outcome);
    }
}

/// Asks the store.
///
/// # Errors
///
/// [`StoreError`]: the session is not usable any more. Keys may be without an outcome.
pub(super) fn perform(
    store: &'static str,
    session: &mut dyn Session,
    task: Task,
    note: Note<'_>,
) -> Result<(), StoreError> {
    let Task { work, places, results } = task;
    let mut told = Told { places: &places, results: &results, note };
    match work {
        Work::Exists(keys) => {
            let found = session.exists(&keys)?;
            check_count(store, found.len(), keys.len())?;
            let outcome = |is_there: bool| if is_there { Outcome::Hit } else { Outcome::Miss };
            found.into_iter().enumerate().for_each(|(place, found)| told.tell(place, outcome(found)));
            Ok(())
        }
        Work::Put(values) => put(store, session, values, &mut told),
        Work::Get(reads) => get(store, session, reads, &mut told),
    }
}

fn check_count(store: &'static str, got: usize, want: usize) -> Result<(), StoreError> {
    if got == want {
        return Ok(());
    }
    Err(StoreError::Answer { store, reason: format!("{got} keys, and was asked for {want}") })
}

fn put(
    store: &'static str,
    session: &mut dyn Session,
    values: Vec<TierValue>,
    told: &mut Told<'_>,
) -> Result<(), StoreError> {
    let stored = session.put(&values)?;
    check_count(store, stored.len(), values.len())?;
    for (place, stored) in stored.into_iter().enumerate() {
        told.tell(place, stored.map_or_else(|error| Outcome::Failed(error.into()), |()| Outcome::Stored));
    }
    Ok(())
}

fn get(
    store: &'static str,
    session: &mut dyn Session,
    reads: Vec<TierRead>,
    told: &mut Told<'_>,
) -> Result<(), StoreError> {
    let keys: Vec<_> = reads.iter().map(|read| read.key).collect();
    let bytes = reads.iter().map(|read| read.bytes).max().unwrap_or_default();
    let mut reads: Vec<Option<TierRead>> = reads.into_iter().map(Some).collect();
    let mut bad = Vec::new();
    let done = session.get(&keys, bytes, &mut |place, answer| {
        // A second answer for one key is ignored.
        let Some(mut read) = reads.get_mut(place).and_then(Option::take) else { return };
        let outcome = match answer {
            Ok(None) => Outcome::Miss,
            Ok(Some(value)) => match read.memory.land(value) {
                Ok(()) => Outcome::Hit,
                Err(error) => {
                    bad.push(read.key);
                    Outcome::Failed(error.into())
                }
            },
            Err(error) => Outcome::Failed(error.into()),
        };
        // First: with the outcome, the caller may take the memory back.
        drop(read);
        told.tell(place, outcome);
    });
    if !bad.is_empty() {
        session.found_bad_values(&bad);
    }
    done?;
    let missing = reads.iter().flatten().count();
    check_count(store, keys.len() - missing, keys.len())
}

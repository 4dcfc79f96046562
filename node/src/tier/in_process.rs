use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::key::TierKey;
use super::store::{Answer, Store, StoreFuture, blocking};
use super::store_error::StoreError;
use super::value::TierValue;

const NAME: &str = "in-process";

#[derive(Default)]
struct State {
    values: HashMap<TierKey, Arc<[u8]>>,
    /// Oldest first.
    order: VecDeque<TierKey>,
    bytes: usize,
}

struct Shared {
    state: Mutex<State>,
    bytes_max: usize,
}

/// A [`Store`] in the memory of the process, which removes its oldest values when it is full.
/// Clones share the values.
///
/// For tests, and for several pools of one process.
#[derive(Clone)]
pub struct InProcess(Arc<Shared>);

impl InProcess {
    /// Creates a store of at most this many bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), bytes_max }))
    }

    /// Returns the number of values.
    pub fn len(&self) -> usize {
        self.state().values.len()
    }

    /// Returns whether it has no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all values.
    pub fn clear(&self) {
        *self.state() = State::default();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }
}

impl State {
    fn insert(&mut self, value: &TierValue, bytes_max: usize) -> Result<(), StoreError> {
        let bytes = value.bytes().len();
        if bytes > bytes_max {
            let reason = format!("a value of {bytes} bytes, and has room for {bytes_max}");
            return Err(StoreError::Refused { store: NAME, reason });
        }
        if let Some(former) = self.values.insert(*value.key(), value.bytes().into()) {
            self.bytes -= former.len();
        } else {
            self.order.push_back(*value.key());
        }
        self.bytes += bytes;
        while self.bytes > bytes_max {
            let Some(oldest) = self.order.pop_front() else { break };
            self.bytes -= self.values.remove(&oldest).map_or(0, |value| value.len());
        }
        Ok(())
    }
}

impl Store for InProcess {
    fn name(&self) -> &'static str {
        NAME
    }

    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>> {
        Box::pin(async move {
            let state = self.state();
            Ok(keys.iter().map(|key| state.values.contains_key(key)).collect())
        })
    }

    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>> {
        let store = self.clone();
        Box::pin(blocking(move || {
            let mut state = store.state();
            Ok(values.iter().map(|value| state.insert(value, store.0.bytes_max)).collect())
        }))
    }

    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        _bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            for (place, key) in keys.iter().enumerate() {
                let value = self.state().values.get(key).cloned();
                answer(place, Ok(value.map(|value| Box::new(value) as _)));
            }
            Ok(())
        })
    }
}

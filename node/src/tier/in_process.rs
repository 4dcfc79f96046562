//! A store in the memory of the process, with faults on request.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::key::TierKey;
use super::store::{Answer, Store, StoreFuture};
use super::store_error::StoreError;
use super::value::TierValue;

const NAME: &str = "in-process";

/// What an [`InProcess`] store does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// Connections and calls fail.
    Refuse,
    /// Calls do not return until the fault ends.
    Hang,
    /// Gets do not return until the fault ends.
    HangInGets,
    /// Each call takes this long.
    Slow(Duration),
    /// Values come without their last byte.
    Short,
    /// Values come with a byte more.
    Long,
    /// A key's value is that of another block, if there is one.
    Foreign,
    /// One bit of each value is wrong.
    Corrupt,
    /// Puts are confirmed, and nothing is stored.
    StoresNothing,
    /// Every key exists, and no value is there.
    ClaimsAll,
    /// Half of the keys get no answer, and the others two.
    Miscounts,
    /// Calls panic.
    Panic,
}

#[derive(Default)]
struct State {
    values: HashMap<TierKey, Arc<[u8]>>,
    /// Oldest first.
    order: VecDeque<TierKey>,
    bytes: usize,
}

struct Shared {
    state: Mutex<State>,
    fault: watch::Sender<Fault>,
    bytes_max: usize,
}

/// A [`Store`] in the memory of the process, which forgets its oldest values when it is full. A clone
/// refers to the same values.
///
/// For tests, and for several pools of one process.
#[derive(Clone)]
pub struct InProcess(Arc<Shared>);

impl InProcess {
    /// Creates a store of at most this many bytes.
    pub fn new(bytes_max: usize) -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), fault: watch::Sender::default(), bytes_max }))
    }

    /// Begins or ends a fault. Calls that hang go on.
    pub fn set_fault(&self, fault: Fault) {
        self.0.fault.send_replace(fault);
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
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what faults do to a call. Returns the fault.
    async fn enter(&self, is_get: bool) -> Result<Fault, StoreError> {
        let hangs = |fault: &Fault| *fault == Fault::Hang || is_get && *fault == Fault::HangInGets;
        let mut faults = self.0.fault.subscribe();
        let fault = *faults.wait_for(|fault| !hangs(fault)).await.expect("the store has the sender");
        match fault {
            Fault::Refuse => Err(StoreError::Unreachable { store: NAME, reason: "a fault was set".into() }),
            Fault::Panic => panic!("a fault was set"),
            Fault::Slow(time) => {
                tokio::time::sleep(time).await;
                Ok(fault)
            }
            fault => Ok(fault),
        }
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

    /// Returns what the store says is the value of a key.
    fn read(&self, key: &TierKey, fault: Fault) -> Option<Vec<u8>> {
        let own = || self.values.get(key).map(|value| value.to_vec());
        match fault {
            Fault::ClaimsAll => None,
            Fault::Foreign => {
                let other = self.values.iter().find(|(other, _)| *other != key);
                other.map(|(_, value)| value.to_vec()).or_else(own)
            }
            Fault::Short => own().map(|mut value| {
                value.pop();
                value
            }),
            Fault::Long => own().map(|value| [&value[..], &[0]].concat()),
            Fault::Corrupt => own().map(|mut value| {
                let middle = value.len() / 2;
                value[middle] ^= 1;
                value
            }),
            _ => own(),
        }
    }
}

impl Store for InProcess {
    fn name(&self) -> &'static str {
        NAME
    }

    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>> {
        Box::pin(async move {
            let fault = self.enter(false).await?;
            let state = self.state();
            let is_there = |key| fault == Fault::ClaimsAll || state.values.contains_key(key);
            let mut found: Vec<bool> = keys.iter().map(is_there).collect();
            if fault == Fault::Miscounts {
                found.push(true);
            }
            Ok(found)
        })
    }

    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(async move {
            let fault = self.enter(false).await?;
            if matches!(fault, Fault::StoresNothing | Fault::ClaimsAll) {
                return Ok(vec![Ok(()); values.len()]);
            }
            let mut state = self.state();
            Ok(values.iter().map(|value| state.insert(value, self.0.bytes_max)).collect())
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        _bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer<'_>) + Send),
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let fault = self.enter(true).await?;
            for (place, key) in keys.iter().enumerate() {
                let value = self.state().read(key, fault);
                if fault == Fault::Miscounts {
                    if place % 2 == 0 {
                        answer(place, Ok(value.as_deref()));
                        answer(place, Ok(value.as_deref()));
                    }
                    answer(keys.len() + place, Ok(value.as_deref()));
                    continue;
                }
                answer(place, Ok(value.as_deref()));
            }
            Ok(())
        })
    }
}

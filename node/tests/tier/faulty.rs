//! A store in the process with faults.

use std::ops::Deref;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpool_node::tier::{Answer, InProcess, Store, StoreError, StoreFuture, TierKey, TierValue};
use tokio::sync::watch;

/// What a [`Faulty`] store does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Fault {
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

/// A clone refers to the same values, and has the same faults.
#[derive(Clone)]
pub struct Faulty {
    inner: InProcess,
    fault: Arc<watch::Sender<Fault>>,
    /// The keys that were ever put.
    keys: Arc<Mutex<Vec<TierKey>>>,
}

impl Faulty {
    pub fn new(bytes_max: usize) -> Self {
        Self { inner: InProcess::new(bytes_max), fault: Arc::default(), keys: Arc::default() }
    }

    /// Begins or ends a fault. Calls that hang go on.
    pub fn set_fault(&self, fault: Fault) {
        self.fault.send_replace(fault);
    }

    /// Does what faults do to a call. Returns the fault.
    async fn enter(&self, is_get: bool) -> Result<Fault, StoreError> {
        let hangs = |fault: &Fault| *fault == Fault::Hang || is_get && *fault == Fault::HangInGets;
        let fault = *self.fault.subscribe().wait_for(|fault| !hangs(fault)).await.unwrap();
        match fault {
            Fault::Refuse => {
                Err(StoreError::Unreachable { store: self.name(), reason: "a fault was set".into() })
            }
            Fault::Panic => panic!("a fault was set"),
            Fault::Slow(time) => {
                tokio::time::sleep(time).await;
                Ok(fault)
            }
            fault => Ok(fault),
        }
    }

    async fn values(&self, keys: &[TierKey]) -> Result<Vec<Option<Vec<u8>>>, StoreError> {
        let mut values = vec![None; keys.len()];
        let mut answer = |place: usize, answer: Answer| {
            values[place] = answer.unwrap().map(|value| (*value).as_ref().to_vec());
        };
        self.inner.get(keys, 0, &mut answer).await?;
        Ok(values)
    }
}

impl Deref for Faulty {
    type Target = InProcess;

    fn deref(&self) -> &InProcess {
        &self.inner
    }
}

impl Store for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>> {
        Box::pin(async move {
            let fault = self.enter(false).await?;
            let mut found = self.inner.exists(keys).await?;
            match fault {
                Fault::ClaimsAll => found.fill(true),
                Fault::Miscounts => found.push(true),
                _ => {}
            }
            Ok(found)
        })
    }

    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(async move {
            if matches!(self.enter(false).await?, Fault::StoresNothing | Fault::ClaimsAll) {
                return Ok(vec![Ok(()); values.len()]);
            }
            self.keys.lock().unwrap().extend(values.iter().map(|value| *value.key()));
            self.inner.put(values).await
        })
    }

    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        _bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()> {
        Box::pin(async move {
            let fault = self.enter(true).await?;
            let asked: Vec<TierKey> = match fault {
                Fault::Foreign => {
                    let all = self.keys.lock().unwrap();
                    let other = |key| *all.iter().find(|other| *other != key).unwrap_or(key);
                    keys.iter().map(other).collect()
                }
                _ => keys.to_vec(),
            };
            for (place, mut value) in self.values(&asked).await?.into_iter().enumerate() {
                match (&mut value, fault) {
                    (_, Fault::ClaimsAll) => value = None,
                    (Some(value), Fault::Short) => drop(value.pop()),
                    (Some(value), Fault::Long) => value.push(0),
                    (Some(value), Fault::Corrupt) => {
                        let middle = value.len() / 2;
                        value[middle] ^= 1;
                    }
                    _ => {}
                }
                let mut give = |place| answer(place, Ok(value.clone().map(|value| Box::new(value) as _)));
                if fault != Fault::Miscounts {
                    give(place);
                    continue;
                }
                if place % 2 == 0 {
                    give(place);
                    give(place);
                }
                give(keys.len() + place);
            }
            Ok(())
        })
    }
}

//! `Events`: changes of a prefix cache, as an iterator and as an asynchronous one.

use std::sync::Arc;

use kvpool::prefix::{KvEvent, KvEvents, Numbered};
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;
use tokio::sync::Mutex;

use crate::args::Count;
use crate::call::Call;
use crate::error::{Failure, Outcome};
use crate::process::{Own, Process};
use crate::record::record;
use crate::returned::{Received, Returned};
use crate::runtime::wait;

record! {
    /// A change of a prefix cache.
    Event {
        /// "stored", "removed", "cleared" or "resync". After a resync, events were lost because they
        /// were received too slowly: list the cached blocks again.
        kind: String,
        /// Number of events before it, since the subscription.
        number: u64,
        /// The block that was stored or removed.
        block: Option<u32>,
        /// The hash by which it is, or was, found.
        hash: Option<String>,
        /// Hash of the block before a stored one.
        parent: Option<String>,
        /// Token ids of a stored block; empty if unknown.
        tokens: Vec<u32>,
        /// Tokens per block.
        block_tokens: Option<u32>,
        /// The group of layers of the block: a list of a sequence, or behind them a state.
        group: Option<u32>,
        /// Position relative to the block's first token, and key, of each extra key of a stored
        /// block.
        extra_keys: Vec<(i64, Vec<u8>)>,
        /// Number of lost events.
        lost: u64,
    }
}

impl From<Numbered> for Event {
    fn from(Numbered { number, event }: Numbered) -> Self {
        let empty = Self {
            kind: "cleared".to_owned(),
            number,
            block: None,
            hash: None,
            parent: None,
            tokens: Vec::new(),
            block_tokens: None,
            group: None,
            extra_keys: Vec::new(),
            lost: 0,
        };
        match event {
            KvEvent::Stored { block, hash, parent, tokens, block_tokens, group, extra_keys } => Self {
                kind: "stored".to_owned(),
                block: Some(block.0),
                hash: Some(hash.to_string()),
                parent: parent.map(|parent| parent.to_string()),
                tokens: tokens.to_vec(),
                block_tokens: Some(block_tokens),
                group: Some(group),
                extra_keys: extra_keys.iter().map(|(at, key)| (*at, key.key.to_vec())).collect(),
                ..empty
            },
            KvEvent::Removed { block, hash, group } => Self {
                kind: "removed".to_owned(),
                block: Some(block.0),
                hash: Some(hash.to_string()),
                group: Some(group),
                ..empty
            },
            KvEvent::Resync { lost } => Self { kind: "resync".to_owned(), lost, ..empty },
            _ => empty,
        }
    }
}

/// A subscription to the events of a prefix cache.
///
/// `for event in events` blocks this thread without the GIL until there is one; `async for event in
/// events` waits on asyncio. Both end with the pool: when it, its sequences and batches are closed.
/// `drain` takes what is there. An `Events` is received from by one task at a time; others wait.
#[pyclass(frozen, name = "Events", module = "kvpool._kvpool")]
pub struct PyEvents {
    made_in: Process,
    events: Own<Arc<Mutex<KvEvents>>>,
    returned: Arc<Returned<Event>>,
}

impl PyEvents {
    /// Wraps a subscription.
    pub fn new(events: KvEvents) -> Self {
        Self {
            made_in: Process::current(),
            events: Own::new(Arc::new(Mutex::new(events))),
            returned: Arc::default(),
        }
    }

    async fn recv(events: &Mutex<KvEvents>, returned: &Returned<Event>) -> Option<Event> {
        returned.or_next(|| async { events.lock().await.recv().await.map(Event::from) }).await
    }

    fn share(&self) -> Outcome<Arc<Mutex<KvEvents>>> {
        self.made_in.check()?;
        Ok(Arc::clone(self.events.get()))
    }
}

#[pymethods]
impl PyEvents {
    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> Outcome<Option<Event>> {
        let events = self.share()?;
        if let Some(event) = self.returned.take() {
            return Ok(Some(event));
        }
        // Most often there is one.
        if let Ok(mut events) = events.try_lock()
            && let Some(event) = events.try_recv()
        {
            return Ok(Some(event.into()));
        }
        wait(py, Self::recv(&events, &self.returned))
    }

    fn __aiter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __anext__(&self) -> Outcome<Call> {
        let (events, returned) = (self.share()?, Arc::clone(&self.returned));
        Ok(Call::new(move |caller| {
            caller.start(async move {
                let ended = || Failure::from(PyStopAsyncIteration::new_err("the pool is closed"));
                let event = Self::recv(&events, &returned).await.ok_or_else(ended)?;
                Ok(Received::new(event, &returned))
            })
        }))
    }

    /// Returns the events that are there, without waiting; at most `limit`.
    #[pyo3(signature = (limit=None))]
    fn drain(&self, limit: Option<Count>) -> Outcome<Vec<Event>> {
        let events = self.share()?;
        let mut events = events.try_lock().ok();
        let limit = limit.map_or(usize::MAX, |limit| limit.0);
        let returned = std::iter::from_fn(|| self.returned.take());
        let next = std::iter::from_fn(|| events.as_mut()?.try_recv()).map(Event::from);
        Ok(returned.chain(next).take(limit).collect())
    }

    /// Number of events that were not received yet; None while another task receives.
    #[getter]
    fn lag(&self) -> Outcome<Option<u64>> {
        Ok(self.share()?.try_lock().ok().map(|events| events.lag()))
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Event>()?;
    module.add_class::<PyEvents>()
}

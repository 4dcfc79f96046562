//! `Admin`: the admin interface of a pool of frames.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvpool_node::admin::{Reporter, Reporters};
use kvpool_node::metrics::{ENGINE, Scrape};
use kvpool_node::services::{Prepared, Reread, ServedFrames};
use kvpool_node::settings::Sources;
use pyo3::prelude::*;

use crate::args::{PoolNumber, Seconds};
use crate::call::Call;
use crate::error::{Outcome, raise};
use crate::exclusive::Open;
use crate::frame_pool::FramePool;
use crate::log;
use crate::node::Json;
use crate::settings::{apart, sources};

/// The admin interface of a `FramePool`: page, metrics, statistics, owners, map, audit, and events
/// of these, over HTTP. `await Admin.from_settings(pool, settings)` starts it.
///
/// `kvpool stats`, `owners`, `top` and `audit` work on it. Questions about bytes, sequences and
/// peers, and orders to move, resize and evict, are refused: the pool's engine has these.
#[pyclass(frozen, name = "Admin", module = "kvpool._kvpool")]
pub struct PyAdmin(Open<Running>);

struct Running {
    served: ServedFrames,
    number: u16,
    sources: Mutex<Sources>,
    reporters: Reporters,
}

impl Running {
    fn sources(&self) -> MutexGuard<'_, Sources> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counters that the engine has reported.
struct Reported {
    engine: String,
    counters: BTreeMap<String, u64>,
}

impl Reporter for Reported {
    fn group(&self) -> &'static str {
        "engine"
    }

    fn name(&self) -> &str {
        &self.engine
    }

    fn stats(&self) -> Option<serde_json::Value> {
        Some(serde_json::json!(self.counters))
    }

    fn scrape(&self, scrape: &mut Scrape) {
        for (name, &value) in &self.counters {
            scrape.count(&ENGINE, &[&self.engine, name], value);
        }
    }
}

async fn serve(pool: kvpool::FramePool, sources: Sources, number: u16) -> Outcome<PyAdmin> {
    log::start()?;
    let read = sources.clone();
    let prepared = apart(move || Ok(Prepared::new(read.load_for_frames(number)?)?)).await?;
    let reporters = Reporters::new();
    let served = prepared.serve_frames(pool, reporters.clone());
    let running = Running { served, number, sources: sources.into(), reporters };
    Ok(PyAdmin(Open::new("admin interface", running)))
}

#[pymethods]
impl PyAdmin {
    /// Starts the admin interface of a pool of frames. `settings` are the path of a TOML file of
    /// `kvpool serve`, or a mapping with the same keys: `admin`, `admin_connections`, `name`,
    /// `token_file`, `read_token_file`, `tls_cert`, `tls_key`, `drain`. Others are refused by name.
    ///
    /// `number` tells apart pools with the same settings, such as those of an engine's ranks: it is
    /// added to the port, unless that is 0, and above 0 appended to the name.
    #[staticmethod]
    #[pyo3(signature = (pool, settings, *, number=PoolNumber(0)), text_signature = "(pool, settings, *, number=0)")]
    fn from_settings(
        pool: &Bound<'_, FramePool>,
        settings: &Bound<'_, PyAny>,
        number: PoolNumber,
    ) -> Outcome<Call> {
        let (pool, sources) = (pool.get().here()?.clone(), sources(settings)?);
        Ok(Call::new(move |caller| caller.waits(serve(pool, sources, number.0))))
    }

    /// Serves another pool from now on, for an engine that makes its pool anew.
    fn set_pool(&self, pool: &Bound<'_, FramePool>) -> Outcome<()> {
        self.0.get()?.served.set_pool(pool.get().here()?.clone());
        Ok(())
    }

    /// Adds counters of the engine to statistics and metrics, in place of those that it reported
    /// before.
    fn report(&self, engine: String, counters: BTreeMap<String, u64>) -> Outcome<()> {
        self.0.get()?.reporters.add(Reported { engine, counters });
        Ok(())
    }

    /// Returns what `/stats` answers.
    fn stats(slf: &Bound<'_, Self>) -> Outcome<Call> {
        let running = slf.get().0.share()?;
        Ok(Call::new(move |caller| {
            caller.waits(async move {
                let stats = running.served.admin().stats().await;
                Ok(Json(serde_json::json!(stats.map_err(|error| raise("NodeError", error, Vec::new()))?)))
            })
        }))
    }

    /// Reads the settings again, or other ones, and applies certificates and tokens, completely or
    /// not at all. Returns the changes, and names those that need another start.
    #[pyo3(signature = (settings=None))]
    fn reload(slf: &Bound<'_, Self>, settings: Option<&Bound<'_, PyAny>>) -> Outcome<Call> {
        let (running, given) = (slf.get().0.share()?, settings.map(sources).transpose()?);
        Ok(Call::new(move |caller| {
            caller.waits(async move {
                let sources = given.unwrap_or_else(|| running.sources().clone());
                let (read, number) = (sources.clone(), running.number);
                let reread = apart(move || Ok(Reread::new(read.load_for_frames(number)?)?)).await?;
                let changes = running.served.apply(reread)?;
                *running.sources() = sources;
                Ok(changes)
            })
        }))
    }

    /// Its address, with the port that the system selected; None if the settings have none.
    #[getter]
    fn address(&self) -> Outcome<Option<String>> {
        Ok(self.0.get()?.served.admin_address().map(ToString::to_string))
    }

    /// Its name.
    #[getter]
    fn name(&self) -> Outcome<String> {
        Ok(self.0.get()?.served.name())
    }

    /// Ends it when the requests in progress are answered, within `patience` seconds, by default
    /// those of `drain`. Then its port is free.
    #[pyo3(signature = (patience=None))]
    fn shutdown(slf: &Bound<'_, Self>, patience: Option<Seconds>) -> Outcome<Call> {
        let (this, running) = (slf.clone().unbind(), slf.get().0.share()?);
        Ok(Call::new(move |caller| {
            caller.waits(async move {
                running.served.end(patience.map_or(running.served.drain(), |patience| patience.0)).await;
                this.get().0.close().map(|()| None::<()>)
            })
        }))
    }

    /// Ends it at once. Its port is free shortly afterwards.
    fn close(&self) -> Outcome<()> {
        self.0.close()
    }

    fn __repr__(&self) -> Outcome<String> {
        if self.0.is_closed() {
            return Ok("<kvpool.Admin, closed>".to_owned());
        }
        let running = self.0.get()?;
        let address = running.served.admin_address().map_or("no address".to_owned(), ToString::to_string);
        Ok(format!("<kvpool.Admin {}, {address}>", running.served.name()))
    }
}

/// Adds the class of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyAdmin>()
}

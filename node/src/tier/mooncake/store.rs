use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;

use tokio::sync::oneshot;

use super::super::error::TierError;
use super::super::key::TierKey;
use super::super::store::{Answer, Store, StoreFuture};
use super::super::store_error::StoreError;
use super::super::value::TierValue;
use super::api::NAME;
use super::handle::{Handle, MooncakeSettings};
use super::session::Client;

/// Mooncake Store as a [`Store`].
pub struct Mooncake(Arc<Handle>);

impl Mooncake {
    /// Loads the library, connects to the master, puts a probe and reads it back. Blocks.
    ///
    /// # Errors
    /// [`TierError::Library`], or [`TierError::Probe`] with what the store did, since a client and
    /// a master of different versions do not report it.
    pub fn connect(settings: MooncakeSettings) -> Result<Self, TierError> {
        let (limit, (done, result)) = (settings.limit, mpsc::channel());
        let connect = move || {
            let handle = Handle::connect(&settings).and_then(|handle| {
                handle.probe()?;
                Ok(handle)
            });
            // Without a receiver, the time is up.
            let _ = done.send(handle);
        };
        // Calls to a master that hangs do not return.
        let thread = thread::Builder::new().name("kvpool-mooncake".into());
        thread.spawn(connect).map_err(|error| TierError::Thread { reason: error.to_string() })?;
        let probe_failed = |reason: String| TierError::Probe { store: NAME, reason };
        match result.recv_timeout(limit) {
            Ok(handle) => Ok(Self(handle?)),
            Err(RecvTimeoutError::Timeout) => {
                Err(probe_failed(format!("the probe did not come back within {} ms", limit.as_millis())))
            }
            Err(RecvTimeoutError::Disconnected) => Err(probe_failed("the probe panicked".into())),
        }
    }
}

impl Mooncake {
    /// Makes a call on a separate thread: it may block for half a minute.
    async fn on_thread<T: Send + 'static>(
        &self,
        call: impl FnOnce(Client) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        // One client serves all threads, and reconnects to the master itself.
        let (client, (done, result)) = (Client { handle: self.0.clone() }, oneshot::channel());
        let thread = thread::Builder::new().name("kvpool-tier".into());
        thread
            .spawn(move || done.send(call(client)).map_err(drop))
            .map_err(|error| StoreError::Unreachable { store: NAME, reason: error.to_string() })?;
        result.await.expect("the thread panicked")
    }
}

impl Store for Mooncake {
    fn name(&self) -> &'static str {
        NAME
    }

    fn keys_per_call(&self) -> usize {
        32
    }

    fn exists<'a>(&'a self, keys: &'a [TierKey]) -> StoreFuture<'a, Vec<bool>> {
        let keys = keys.to_vec();
        Box::pin(self.on_thread(move |client| client.exists(&keys)))
    }

    fn put(&self, values: Vec<TierValue>) -> StoreFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(self.on_thread(move |client| client.put(&values)))
    }

    fn get<'a>(
        &'a self,
        keys: &'a [TierKey],
        bytes: usize,
        answer: &'a mut (dyn FnMut(usize, Answer) + Send),
    ) -> StoreFuture<'a, ()> {
        let keys = keys.to_vec();
        Box::pin(async move { self.on_thread(move |client| client.get(&keys, bytes)).await?.answer(answer) })
    }
}

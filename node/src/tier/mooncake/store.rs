//! Mooncake as a store.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};

use super::super::error::TierError;
use super::super::store::{Session, Store};
use super::super::store_error::StoreError;
use super::api::NAME;
use super::handle::{Handle, MooncakeSettings};
use super::session::Client;

/// Mooncake Store as a [`Store`].
pub struct Mooncake(Arc<Handle>);

impl Mooncake {
    /// Loads the library, connects to the master, puts a probe and reads it back. Blocks.
    ///
    /// # Errors
    ///
    /// [`TierError::Library`], or [`TierError::Probe`] with what the store did: a client and a master of
    /// different versions do not say that they are.
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
        // Calls to a master that stands still do not return.
        let thread = std::thread::Builder::new().name("kvpool-mooncake".into());
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

impl Store for Mooncake {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self) -> Result<Box<dyn Session>, StoreError> {
        // One client serves all threads, and connects to the master by itself.
        Ok(Box::new(Client::new(&self.0)))
    }

    fn keys_per_call(&self) -> usize {
        32
    }
}

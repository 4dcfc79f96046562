//! A node of kvpool as the store of a tier.
//!
//! Nodes exchange blocks between pools, not values. So a tier over a node has a small pool of its own in
//! this process, the window, through which blocks go both ways:
//!
//! ```text
//! put   value --[verified]--> window --[as in an offload]--> cache of the peer
//! get   value <--[packed]---- window <--[as in a bring-back]- cache of the peer
//! ```
//!
//! A node has no question for existence: [`exists`](Session::exists) fetches the blocks into the window, up
//! to the first one that the peer does not have, and says no for those behind it. The get that follows
//! finds them there.

use std::sync::Arc;
use std::time::Duration;

use kvpool::prefix::BlockHash;
use kvpool::{Pool, TransferError};
use tokio::runtime::Handle;

use super::error::TierError;
use super::key::{Fingerprint, TierKey};
use super::store::{Answer, Session, Store};
use super::store_error::StoreError;
use super::value::{TierValue, verify};
use crate::node::Node;

const NAME: &str = "peer";

/// A peer of a node as a [`Store`].
pub struct Peer {
    inner: Window,
}

#[derive(Clone)]
struct Window {
    node: Arc<Node>,
    peer: String,
    fingerprint: Fingerprint,
    limit: Duration,
    runtime: Handle,
}

impl Peer {
    /// Creates the store. `node` is a node over the window, which is linked to the peer of this name.
    ///
    /// The window is a pool with the layout and the hashing of the pools that use the tier, and with a
    /// prefix cache; it bounds the blocks of one call. The node needs no address of its own. `limit`
    /// bounds each transfer.
    ///
    /// # Errors
    ///
    /// [`TierError::Namespace`], [`TierError::Pool`].
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn new(node: Arc<Node>, peer: &str, namespace: &str, limit: Duration) -> Result<Self, TierError> {
        let fingerprint = Fingerprint::of(node.pool(), namespace)?;
        let (peer, runtime) = (peer.to_owned(), Handle::current());
        Ok(Self { inner: Window { node, peer, fingerprint, limit, runtime } })
    }
}

impl Store for Peer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn open(&self) -> Result<Box<dyn Session>, StoreError> {
        Ok(Box::new(self.inner.clone()))
    }

    fn keys_per_call(&self) -> usize {
        // Two threads may fill the window at the same time.
        (self.inner.node.pool().total_blocks() / 4).clamp(1, 32)
    }
}

fn failed(error: &TransferError) -> StoreError {
    StoreError::Unreachable { store: NAME, reason: error.to_string() }
}

fn refused(reason: impl ToString) -> StoreError {
    StoreError::Refused { store: NAME, reason: reason.to_string() }
}

impl Window {
    fn pool(&self) -> &Pool {
        self.node.pool()
    }

    fn within<T>(&self, work: impl Future<Output = T>) -> Result<T, StoreError> {
        let limit = self.limit;
        // The timer must be created on the runtime.
        let done = self.runtime.block_on(async move { tokio::time::timeout(limit, work).await });
        done.map_err(|_| StoreError::Unreachable {
            store: NAME,
            reason: format!("{} did not answer within {} ms", self.peer, limit.as_millis()),
        })
    }

    fn is_here(&self, hash: BlockHash) -> bool {
        self.pool().export_prefix(0, &[hash]).is_ok_and(|export| !export.is_empty())
    }

    /// Fetches the blocks that the window does not have. A fetch ends at the first block that the peer
    /// does not have; with `over_gaps` it goes on after it, which takes a round trip each time.
    fn fetch(&self, keys: &[TierKey], over_gaps: bool) -> Result<(), StoreError> {
        let remote = self.pool().remote(&self.peer).map_err(|error| failed(&error))?;
        let mut hashes: Vec<BlockHash> = Vec::new();
        for key in keys.iter().filter(|key| key.fingerprint == self.fingerprint) {
            if !self.is_here(key.hash) && !hashes.contains(&key.hash) {
                hashes.push(key.hash);
            }
        }
        let hashes_max = self.pool().total_blocks() / 4;
        hashes.truncate(hashes_max.max(1));
        while !hashes.is_empty() {
            self.within(remote.fetch(0, hashes.clone()))?.map_err(|error| failed(&error))?;
            let came = hashes.iter().take_while(|hash| self.is_here(**hash)).count();
            if !over_gaps {
                break;
            }
            // The next one is not there.
            hashes.drain(..(came + 1).min(hashes.len()));
        }
        Ok(())
    }

    /// Puts a value into the window.
    fn take_in(&self, value: &TierValue) -> Result<(), StoreError> {
        if value.key().fingerprint != self.fingerprint {
            return Err(refused("a value of another fingerprint"));
        }
        let packed = verify(value.key(), self.pool().layout().packed_bytes(), value.bytes());
        let packed = packed.map_err(refused)?;
        let mut import = self.pool().import_prefix(0, &[value.key().hash]).map_err(refused)?;
        if !import.missing().is_empty() {
            import.write(0, None, packed).map_err(refused)?;
        }
        import.commit().map(drop).map_err(refused)
    }
}

impl Session for Window {
    fn exists(&mut self, keys: &[TierKey]) -> Result<Vec<bool>, StoreError> {
        self.fetch(keys, false)?;
        Ok(keys.iter().map(|key| key.fingerprint == self.fingerprint && self.is_here(key.hash)).collect())
    }

    fn put(&mut self, values: &[TierValue]) -> Result<Vec<Result<(), StoreError>>, StoreError> {
        let mut stored = Vec::with_capacity(values.len());
        let mut hashes = Vec::new();
        for value in values {
            let taken = self.take_in(value);
            if taken.is_ok() && !hashes.contains(&value.key().hash) {
                hashes.push(value.key().hash);
            }
            stored.push(taken);
        }
        let export = self.pool().export_prefix(0, &hashes).map_err(|error| failed(&error))?;
        let sent = export.len();
        if sent > 0 {
            let remote = self.pool().remote(&self.peer).map_err(|error| failed(&error))?;
            self.within(remote.send(export))?.map_err(|error| failed(&error.error))?;
        }
        for (value, stored) in values.iter().zip(&mut stored) {
            // Another thread may have needed the room.
            if stored.is_ok() && !hashes[..sent].contains(&value.key().hash) {
                *stored = Err(refused("the window is full"));
            }
        }
        Ok(stored)
    }

    fn get(
        &mut self,
        keys: &[TierKey],
        _bytes: usize,
        answer: &mut dyn FnMut(usize, Answer<'_>),
    ) -> Result<(), StoreError> {
        self.fetch(keys, true)?;
        for (place, key) in keys.iter().enumerate() {
            if key.fingerprint != self.fingerprint {
                answer(place, Ok(None));
                continue;
            }
            let export = self.pool().export_prefix(0, &[key.hash]).map_err(|error| failed(&error))?;
            if export.is_empty() {
                answer(place, Ok(None));
                continue;
            }
            let packed = export.packed(0, None).map_err(|error| failed(&error))?;
            let fill = |bytes: &mut [u8]| {
                bytes.copy_from_slice(&packed);
                Ok::<_, StoreError>(())
            };
            let value = TierValue::new(*key, packed.len(), fill)?;
            answer(place, Ok(Some(value.bytes())));
        }
        Ok(())
    }
}

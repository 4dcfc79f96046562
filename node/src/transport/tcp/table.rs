//! The links of an endpoint: their counts, and those whose data streams are still arriving.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use tokio::sync::mpsc;

use super::error::LinkError;
use super::lock::lock;
use super::settings::Identity;
use super::socket::Socket;
use crate::wire::Limits;

/// The part of an endpoint that its tasks share.
#[derive(Debug)]
pub(super) struct Shared {
    identity: RwLock<Arc<Identity>>,
    pub(super) limits: Limits,
    pub(super) table: Mutex<Table>,
}

impl Shared {
    pub(super) fn new(identity: Identity, limits: Limits) -> Self {
        Self { identity: RwLock::new(Arc::new(identity)), limits, table: Mutex::default() }
    }

    /// Returns what this node says of itself in handshakes that begin now.
    pub(super) fn identity(&self) -> Arc<Identity> {
        self.identity.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set_identity(&self, identity: Identity) {
        *self.identity.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(identity);
    }
}

#[derive(Debug, Default)]
pub(super) struct Table {
    /// Links whose data streams have not all arrived.
    pub(super) waiting: HashMap<u128, Waiting>,
    /// Links per peer.
    pub(super) links: HashMap<PeerKey, usize>,
}

pub(super) type PeerKey = (String, u64);

pub(super) struct Waiting {
    pub(super) peer: PeerKey,
    pub(super) streams: mpsc::Sender<(u16, Socket)>,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Place of a link in the counts of its endpoint.
pub(super) struct Slot {
    shared: Arc<Shared>,
    peer: PeerKey,
}

/// Entry in [`Table::waiting`].
pub(super) struct Expected<'a> {
    pub(super) shared: &'a Shared,
    pub(super) link: u128,
}

impl Slot {
    pub(super) fn take(shared: &Arc<Shared>, peer: PeerKey) -> Result<Self, LinkError> {
        let limits = &shared.limits;
        let mut table = lock(&shared.table);
        if table.links.values().sum::<usize>() >= limits.links {
            return Err(LinkError::Limit { what: "links", max: limits.links });
        }
        let links = table.links.entry(peer.clone()).or_default();
        if *links >= limits.links_per_peer {
            return Err(LinkError::Limit { what: "links of a peer", max: limits.links_per_peer });
        }
        *links += 1;
        drop(table);
        Ok(Self { shared: shared.clone(), peer })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut table = lock(&self.shared.table);
        if let Some(links) = table.links.get_mut(&self.peer) {
            *links -= 1;
            if *links == 0 {
                table.links.remove(&self.peer);
            }
        }
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        lock(&self.shared.table).waiting.remove(&self.link);
    }
}

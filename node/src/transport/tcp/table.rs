use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc;

use super::error::LinkError;
use super::settings::Identity;
use super::socket::Socket;
use crate::wire::Limits;

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

    pub(super) fn identity(&self) -> Arc<Identity> {
        self.identity.read().clone()
    }

    pub(super) fn set_identity(&self, identity: Identity) {
        *self.identity.write() = Arc::new(identity);
    }
}

#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) waiting: HashMap<u128, Waiting>,
    /// Number of the next one; the lowest is the oldest.
    pub(super) next: u64,
    pub(super) configured: BTreeSet<String>,
    pub(super) links: HashMap<String, usize>,
}

impl Table {
    /// Returns the places to leave free: one per unlinked configured peer, at most half of all.
    fn kept(&self, name: &str, limits: &Limits) -> usize {
        if self.configured.contains(name) {
            return 0;
        }
        let is_away = |name: &&String| !self.links.contains_key(*name);
        self.configured.iter().filter(is_away).count().min(limits.links / 2)
    }
}

pub(super) type PeerKey = (String, u64);

pub(super) struct Waiting {
    pub(super) number: u64,
    pub(super) peer: PeerKey,
    pub(super) streams: mpsc::Sender<(u16, Socket)>,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// A link's share in the counts of its endpoint.
pub(super) struct Slot {
    shared: Arc<Shared>,
    name: String,
}

/// Entry in [`Table::waiting`].
pub(super) struct Expected<'a> {
    shared: &'a Shared,
    link: u128,
}

impl<'a> Expected<'a> {
    /// Registers a link that waits for data streams. If there are too many, drops the oldest.
    pub(super) fn note(
        shared: &'a Shared,
        link: u128,
        peer: PeerKey,
        streams: mpsc::Sender<(u16, Socket)>,
    ) -> Self {
        let mut table = shared.table.lock();
        let oldest = table.waiting.iter().min_by_key(|(_, waiting)| waiting.number).map(|(&link, _)| link);
        let is_full = table.waiting.len() >= shared.limits.handshakes.max(1);
        let given_up = oldest.filter(|_| is_full).and_then(|oldest| table.waiting.remove(&oldest));
        let number = table.next;
        table.next += 1;
        table.waiting.insert(link, Waiting { number, peer, streams });
        drop(table);
        // Wakes its task: not under the lock.
        drop(given_up);
        Self { shared, link }
    }
}

impl Slot {
    pub(super) fn take(shared: &Arc<Shared>, name: &str) -> Result<Self, LinkError> {
        let limits = &shared.limits;
        let mut table = shared.table.lock();
        if table.links.values().sum::<usize>() + table.kept(name, limits) >= limits.links {
            return Err(LinkError::Limit { what: "links", max: limits.links });
        }
        let links = table.links.entry(name.to_owned()).or_default();
        if *links >= limits.links_per_peer {
            return Err(LinkError::Limit { what: "links of a peer", max: limits.links_per_peer });
        }
        *links += 1;
        drop(table);
        Ok(Self { shared: shared.clone(), name: name.to_owned() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut table = self.shared.table.lock();
        if let Some(links) = table.links.get_mut(&self.name) {
            *links -= 1;
            if *links == 0 {
                table.links.remove(&self.name);
            }
        }
    }
}

impl Drop for Expected<'_> {
    fn drop(&mut self) {
        self.shared.table.lock().waiting.remove(&self.link);
    }
}

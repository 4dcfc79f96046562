use std::collections::BTreeMap;
use std::sync::Arc;

use kvpool::transport::{PeerId, RegionId, Submission, TransferId, TransportError};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::error::LinkError;
use super::grants::{Claim, Grants};
use super::link_state::{LinkShared, Peer};
use super::region::{Region, Signal};
use super::stream::Stream;
use super::transfers::{Item, Remains, Sent, Transfers};
use crate::wire::{ItemHead, ItemStatus, Limits};

/// Reason of a failure for a peer without a link.
pub(super) const NO_LINK: &str = "no link to it is attached";

pub(super) struct Inner {
    pub(super) name: String,
    pub(super) incarnation: u64,
    pub(super) limits: Limits,
    pub(super) runtime: Handle,
    pub(super) signal: Arc<Signal>,
    pub(super) state: Mutex<State>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) closed: bool,
    pub(super) regions: Vec<Arc<Region>>,
    /// Those with a link, a grant or a transfer.
    pub(super) peers: BTreeMap<u32, PeerEntry>,
    pub(super) next_peer: u32,
    pub(super) grants: Grants,
    pub(super) transfers: Transfers,
}

pub(super) struct PeerEntry {
    pub(super) name: String,
    pub(super) incarnation: u64,
    pub(super) links: Vec<Attached>,
}

pub(super) struct Attached {
    pub(super) link: Arc<LinkShared>,
    pub(super) streams: Vec<Arc<Stream>>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("name", &self.name).finish_non_exhaustive()
    }
}

impl State {
    /// Adds a peer, and forgets those without a link, a grant and a transfer. Returns its id.
    pub(super) fn add_peer(&mut self, peer: &Peer) -> u32 {
        let Self { peers, grants, transfers, .. } = self;
        peers.retain(|&index, entry| {
            let index = PeerId(index);
            !entry.links.is_empty() || grants.has(index) || transfers.has(index)
        });
        let index = self.next_peer;
        self.next_peer += 1;
        let (name, incarnation) = (peer.name.clone(), peer.incarnation);
        self.peers.insert(index, PeerEntry { name, incarnation, links: Vec::new() });
        index
    }
}

impl Inner {
    /// Takes the next item for a stream of a link, and notes it there.
    pub(super) fn next_item(&self, peer: PeerId, link: u128, stream: &Stream) -> Option<Item> {
        let mut state = self.state.lock();
        let entry = state.peers.get(&peer.0)?;
        // Without this, an item could be noted after `end_link`.
        entry.links.iter().find(|attached| attached.link.number == link)?;
        let streams = entry.links.iter().map(|attached| attached.streams.len()).sum();
        let item = state.transfers.next_item(peer, self.limits.item_bytes, streams)?;
        stream.sending(item.sent);
        Some(item)
    }

    pub(super) fn acknowledged(&self, sent: Sent, status: ItemStatus) {
        let remains = self.state.lock().transfers.acknowledged(sent, status);
        drop(remains);
    }

    pub(super) fn fail(&self, transfer: TransferId, error: TransportError) {
        let remains = self.state.lock().transfers.fail(transfer, error);
        drop(remains);
    }

    pub(super) fn claim(&self, peer: PeerId, head: &ItemHead) -> Result<Claim, ItemStatus> {
        self.state.lock().grants.claim(peer, head)
    }

    pub(super) fn frame_bytes_max(&self) -> usize {
        self.state.lock().regions.iter().map(|region| region.frame_bytes()).max().unwrap_or(0)
    }

    /// Ends the transfers of a closed link: those with items on it, or all if it was the last.
    pub(super) fn end_link(&self, peer: PeerId, link: &LinkShared, error: &TransportError) {
        let mut state = self.state.lock();
        let State { peers, transfers, .. } = &mut *state;
        let Some(entry) = peers.get_mut(&peer.0) else { return };
        let Some(at) = entry.links.iter().position(|attached| attached.link.number == link.number) else {
            return;
        };
        let attached = entry.links.swap_remove(at);
        let mut remains: Vec<Remains> = Vec::new();
        for sent in attached.streams.iter().flat_map(|stream| stream.take_sent()) {
            remains.push(transfers.fail(sent.transfer, error.clone()));
        }
        if entry.links.is_empty() {
            remains.extend(transfers.fail_peer(peer, error));
        }
        drop(state);
        drop(remains);
    }

    pub(super) fn remove(&self, peer: PeerId, error: &TransportError) {
        let links: Vec<_> = {
            let state = self.state.lock();
            let entry = state.peers.get(&peer.0);
            entry.into_iter().flat_map(|entry| &entry.links).map(|attached| attached.link.clone()).collect()
        };
        for link in links {
            self.end_link(peer, &link, error);
            link.close(LinkError::Closed);
        }
    }

    pub(super) fn region(state: &State, region: RegionId) -> Result<Arc<Region>, TransportError> {
        let unknown = TransportError::Unknown { what: "region", number: region.0.into() };
        state.regions.get(region.0 as usize).cloned().ok_or(unknown)
    }

    pub(super) fn peer(state: &State, peer: PeerId) -> Result<&PeerEntry, TransportError> {
        let unknown = TransportError::Unknown { what: "peer", number: peer.0.into() };
        let entry = state.peers.get(&peer.0).ok_or(unknown)?;
        if entry.links.is_empty() { Err(gone(&entry.name, NO_LINK)) } else { Ok(entry) }
    }

    /// Adds a transfer. Returns the streams that may carry it.
    pub(super) fn submit(
        &self,
        submission: Submission,
    ) -> Result<(TransferId, Vec<Arc<Stream>>), TransportError> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(TransportError::Closed);
        }
        let region = Self::region(&state, submission.region)?;
        let entry = Self::peer(&state, submission.peer)?;
        let streams = entry.links.iter().flat_map(|attached| attached.streams.iter().cloned()).collect();
        let transfer = state.transfers.add(submission, region, &self.limits, self.signal.clone())?;
        Ok((transfer, streams))
    }
}

pub(super) fn gone(peer: &str, reason: &str) -> TransportError {
    TransportError::PeerGone { peer: peer.into(), reason: reason.into() }
}

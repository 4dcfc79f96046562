//! The transport of frames over links.

use std::sync::{Arc, Mutex};
use std::task::Waker;
use std::time::Instant;

use kvpool::storage::Storage;
use kvpool::transport::{
    Grant, Operation, PeerId, RegionId, SourceState, Submission, Tag, TransferId, TransferState, Transport,
    TransportError,
};
use tokio::runtime::Handle;

use super::endpoint::Endpoint;
use super::error::LinkError;
use super::grants::{Claim, Grants};
use super::link::{Link, LinkShared, lock};
use super::region::{Region, Signal};
use super::send::Stream;
use super::transfers::{Item, Remains, Sent, Transfers};
use super::{receive, send};
use crate::wire::{self, ItemHead, ItemStatus, Limits, check_name};

/// Name of the transport.
pub(super) const NAME: &str = "tcp";

/// Writes frames over the data streams of links, straight from and into memory that the processor
/// reaches.
///
/// A peer is a process: a name with an incarnation. It exists while a link to it is
/// [attached](Self::attach). Dropping the transport closes these links.
///
/// | a transfer fails with | when |
/// |---|---|
/// | [`PeerGone`](TransportError::PeerGone) | the last link to the peer, or the one that carries an item, is closed |
/// | [`Stalled`](TransportError::Stalled) | the same, because the peer was too slow |
/// | [`Unknown`](TransportError::Unknown), [`OutOfRange`](TransportError::OutOfRange) | the peer has no such grant, or the frames are outside of it |
/// | [`Unsupported`](TransportError::Unsupported) | the peer's frames have another size, or it receives them already |
/// | [`Storage`](TransportError::Storage) | either storage failed |
/// | [`Cancelled`](TransportError::Cancelled), [`Closed`](TransportError::Closed) | it was given up, or the transport dropped |
#[derive(Debug)]
pub struct TcpTransport {
    inner: Arc<Inner>,
}

/// What the loops of data streams share.
pub(super) struct Inner {
    name: String,
    incarnation: u64,
    limits: Limits,
    runtime: Handle,
    signal: Arc<Signal>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    closed: bool,
    regions: Vec<Arc<Region>>,
    peers: Vec<PeerEntry>,
    grants: Grants,
    transfers: Transfers,
}

struct PeerEntry {
    name: String,
    incarnation: u64,
    links: Vec<Attached>,
}

/// A link that carries items.
struct Attached {
    link: Arc<LinkShared>,
    streams: Vec<Arc<Stream>>,
}

impl TcpTransport {
    /// Makes a transport for the links of an endpoint. Its tasks run on the current runtime.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(endpoint: &Endpoint) -> Self {
        let shared = endpoint.shared();
        let inner = Inner {
            name: shared.identity.name.clone(),
            incarnation: shared.identity.incarnation,
            limits: shared.limits.clone(),
            runtime: Handle::current(),
            signal: Arc::default(),
            state: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Carries items over a link from now on. Returns the number of its peer.
    ///
    /// All links of one process have the same number.
    ///
    /// # Errors
    /// [`TransportError::PeerGone`] if the link is closed, or is attached to another transport;
    /// [`TransportError::Closed`].
    pub fn attach(&self, link: &Link) -> Result<PeerId, TransportError> {
        self.inner.attach(link.shared())
    }

    /// Returns the number of transfers and grants that are not over.
    pub fn live(&self) -> (usize, usize) {
        let state = lock(&self.inner.state);
        (state.transfers.live(), state.grants.live())
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        let mut state = lock(&self.inner.state);
        state.closed = true;
        let peers = 0..state.peers.len() as u32;
        drop(state);
        peers.for_each(|peer| self.inner.remove(PeerId(peer), &TransportError::Closed));
    }
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Inner {
    fn attach(self: &Arc<Self>, link: &Arc<LinkShared>) -> Result<PeerId, TransportError> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(TransportError::Closed);
        }
        let of_peer =
            |entry: &PeerEntry| entry.name == link.peer.name && entry.incarnation == link.peer.incarnation;
        let index = state.peers.iter().position(of_peer);
        if let Some(index) = index
            && state.peers[index].links.iter().any(|attached| Arc::ptr_eq(&attached.link, link))
        {
            return Ok(PeerId(index as u32));
        }
        let Some(data) = link.take_data() else {
            let reason =
                link.cause().map_or("its link has another transport".into(), |cause| cause.to_string());
            return Err(TransportError::PeerGone { peer: link.peer.name.clone(), reason });
        };
        let index = index.unwrap_or_else(|| {
            let (name, incarnation) = (link.peer.name.clone(), link.peer.incarnation);
            state.peers.push(PeerEntry { name, incarnation, links: Vec::new() });
            state.peers.len() - 1
        });
        let peer = PeerId(index as u32);
        let mut streams = Vec::with_capacity(data.len());
        for socket in data {
            let stream = Stream::new();
            let (read, write) = socket.split();
            let this = (peer, link.clone());
            self.runtime.spawn(receive::run(self.clone(), this.clone(), stream.clone(), read));
            self.runtime.spawn(send::run(self.clone(), this, stream.clone(), write));
            streams.push(stream);
        }
        let ending = Ending { inner: self.clone(), peer, link: link.clone() };
        self.runtime.spawn(async move { drop(ending.link.closed().await) });
        state.peers[index].links.push(Attached { link: link.clone(), streams });
        Ok(peer)
    }

    /// Takes the next item for a stream of a link, and notes it there.
    pub(super) fn next_item(&self, peer: PeerId, link: u128, stream: &Stream) -> Option<Item> {
        let mut state = lock(&self.state);
        let entry = state.peers.get(peer.0 as usize)?;
        // Without this, an item could be noted behind the back of `end_link`.
        entry.links.iter().find(|attached| attached.link.number == link)?;
        let item = state.transfers.next_item(peer, self.limits.item_bytes)?;
        stream.sending(item.sent);
        Some(item)
    }

    pub(super) fn acknowledged(&self, sent: Sent, status: ItemStatus) {
        let remains = lock(&self.state).transfers.acknowledged(sent, status);
        drop(remains);
    }

    pub(super) fn fail(&self, transfer: TransferId, error: TransportError) {
        let remains = lock(&self.state).transfers.fail(transfer, error);
        drop(remains);
    }

    pub(super) fn claim(&self, peer: PeerId, head: &ItemHead) -> Result<Claim, ItemStatus> {
        lock(&self.state).grants.claim(peer, head)
    }

    /// Returns the bytes of the largest frame of all storages.
    pub(super) fn frame_bytes_max(&self) -> usize {
        lock(&self.state).regions.iter().map(|region| region.frame_bytes()).max().unwrap_or(0)
    }

    /// Ends the transfers of a closed link: those with items on it, or all if it was the last.
    fn end_link(&self, peer: PeerId, link: &LinkShared, error: &TransportError) {
        let mut state = lock(&self.state);
        let State { peers, transfers, .. } = &mut *state;
        let Some(entry) = peers.get_mut(peer.0 as usize) else { return };
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

    /// Closes all links to a peer.
    fn remove(&self, peer: PeerId, error: &TransportError) {
        let links: Vec<_> = {
            let state = lock(&self.state);
            let entry = state.peers.get(peer.0 as usize);
            entry.into_iter().flat_map(|entry| &entry.links).map(|attached| attached.link.clone()).collect()
        };
        for link in links {
            self.end_link(peer, &link, error);
            link.close(LinkError::Closed);
        }
    }

    fn region(state: &State, region: RegionId) -> Result<Arc<Region>, TransportError> {
        let unknown = TransportError::Unknown { what: "region", number: region.0.into() };
        state.regions.get(region.0 as usize).cloned().ok_or(unknown)
    }

    /// Returns a peer that has a link.
    fn peer(state: &State, peer: PeerId) -> Result<&PeerEntry, TransportError> {
        let unknown = TransportError::Unknown { what: "peer", number: peer.0.into() };
        let entry = state.peers.get(peer.0 as usize).ok_or(unknown)?;
        if entry.links.is_empty() { Err(gone(&entry.name, NO_LINK)) } else { Ok(entry) }
    }

    /// Adds a transfer. Returns the streams that may carry it.
    fn submit(&self, submission: Submission) -> Result<(TransferId, Vec<Arc<Stream>>), TransportError> {
        let mut state = lock(&self.state);
        if state.closed {
            return Err(TransportError::Closed);
        }
        if submission.operation != Operation::Write {
            return Err(TransportError::Unsupported { name: NAME, what: "read frames of a peer".into() });
        }
        let region = Self::region(&state, submission.region)?;
        let entry = Self::peer(&state, submission.peer)?;
        let streams = entry.links.iter().flat_map(|attached| attached.streams.iter().cloned()).collect();
        let transfer = state.transfers.add(submission, region, &self.limits, self.signal.clone())?;
        Ok((transfer, streams))
    }
}

/// Ends a link's transfers when its task ends, also with the runtime.
struct Ending {
    inner: Arc<Inner>,
    peer: PeerId,
    link: Arc<LinkShared>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.link.close(LinkError::Closed);
        let name = &self.link.peer.name;
        let error = match self.link.cause() {
            Some(LinkError::Slow { waited_ms, .. }) => {
                TransportError::Stalled { peer: name.clone(), waited_ms }
            }
            Some(cause) => gone(name, &cause.to_string()),
            None => gone(name, "its link is closed"),
        };
        self.inner.end_link(self.peer, &self.link, &error);
    }
}

fn gone(peer: &str, reason: &str) -> TransportError {
    TransportError::PeerGone { peer: peer.into(), reason: reason.into() }
}

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn register(&self, storage: &Arc<dyn Storage>) -> Result<RegionId, TransportError> {
        let region = Arc::new(Region::new(storage.clone())?);
        let mut state = lock(&self.inner.state);
        state.regions.push(region);
        Ok(RegionId(state.regions.len() as u32 - 1))
    }

    /// Returns name and incarnation of this node: a peer that has a link attached needs no more.
    fn metadata(&self) -> Vec<u8> {
        let metadata = (&self.inner.name, self.inner.incarnation);
        wire::encode(&metadata, METADATA_MAX).expect("a name is short")
    }

    /// Returns the number of a peer to which a link is attached.
    fn add_peer(&self, metadata: &[u8]) -> Result<PeerId, TransportError> {
        let invalid = |error: wire::WireError| TransportError::Metadata(error.to_string());
        if metadata.len() > METADATA_MAX {
            return Err(TransportError::Metadata(format!("{} bytes", metadata.len())));
        }
        let (name, incarnation): (String, u64) = wire::decode(metadata).map_err(invalid)?;
        check_name(&name).map_err(invalid)?;
        let state = lock(&self.inner.state);
        let of_peer = |entry: &PeerEntry| {
            entry.name == name && entry.incarnation == incarnation && !entry.links.is_empty()
        };
        let index = state.peers.iter().position(of_peer);
        index.map(|index| PeerId(index as u32)).ok_or_else(|| gone(&name, NO_LINK))
    }

    fn remove_peer(&self, peer: PeerId) {
        self.inner.remove(peer, &TransportError::Cancelled);
    }

    unsafe fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        let mut state = lock(&self.inner.state);
        if state.closed {
            return Err(TransportError::Closed);
        }
        let region = Inner::region(&state, grant.region)?;
        Inner::peer(&state, grant.peer)?;
        let hold = grant.hold.clone();
        let added = state.grants.add(grant, region, &self.inner.limits, self.inner.signal.clone());
        drop(state);
        // The last reference, if the grant was refused: it is dropped without the lock.
        drop(hold);
        added
    }

    fn revoke(&self, tag: Tag, _source: SourceState) -> TransferState {
        let granted = lock(&self.inner.state).grants.revoke(tag);
        match granted {
            Ok(granted) => drop(granted),
            Err(unknown) => return TransferState::Failed(unknown),
        }
        lock(&self.inner.state).grants.ended(tag)
    }

    unsafe fn submit(&self, submission: Submission) -> Result<TransferId, TransportError> {
        let hold = submission.hold.clone();
        let submitted = self.inner.submit(submission);
        // As for a grant.
        drop(hold);
        let (transfer, streams) = submitted?;
        streams.iter().for_each(|stream| stream.work.notify_one());
        Ok(transfer)
    }

    fn poll(&self, transfer: TransferId, waker: Option<&Waker>) -> TransferState {
        // Wakers are user code: they are cloned and dropped without the lock.
        let over = lock(&self.inner.state).transfers.over(transfer);
        let over = over.is_some_and(|over| over.poll(waker));
        lock(&self.inner.state).transfers.state(transfer, over)
    }

    fn cancel(&self, transfer: TransferId) -> TransferState {
        self.inner.fail(transfer, TransportError::Cancelled);
        self.poll(transfer, None)
    }

    /// Waits for the transfers, then revokes all grants, and waits for those.
    fn drain(&self, deadline: Instant) -> usize {
        lock(&self.inner.state).closed = true;
        self.inner.signal.wait(deadline, || lock(&self.inner.state).transfers.live() == 0);
        let revoked = lock(&self.inner.state).grants.revoke_all();
        drop(revoked);
        self.inner.signal.wait(deadline, || lock(&self.inner.state).grants.live() == 0);
        let (transfers, grants) = self.live();
        transfers + grants
    }
}

const NO_LINK: &str = "no link to it is attached";

/// Bytes of the longest metadata.
const METADATA_MAX: usize = 256;

use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use kvpool::storage::Storage;
use kvpool::transport::{
    Grant, PeerId, RegionId, SourceState, Submission, Tag, TransferId, TransferState, Transport,
    TransportError,
};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::endpoint::Endpoint;
use super::error::LinkError;
use super::inner::{Attached, Inner, NO_LINK, PeerEntry, gone};
use super::link::Link;
use super::link_state::LinkShared;
use super::region::{NAME, Region};
use super::stream::Stream;
use super::{receive, send};
use crate::wire::{self, check_name};

/// The transport of frames over the data streams of links, directly from and to memory that the CPU
/// can access.
///
/// A peer is a process: a name with an incarnation. It exists while a link to it is
/// [attached](Self::attach). Dropping the transport closes these links.
///
/// | a transfer fails with | when |
/// |---|---|
/// | [`PeerGone`](TransportError::PeerGone) | the last link to the peer, or the one with an item in flight, is closed |
/// | [`Stalled`](TransportError::Stalled) | the same, because the peer was too slow |
/// | [`Unknown`](TransportError::Unknown), [`OutOfRange`](TransportError::OutOfRange) | the peer has no such grant, or it lacks the frames |
/// | [`Unsupported`](TransportError::Unsupported) | the peer's frames have another size, or it receives them already |
/// | [`Storage`](TransportError::Storage) | either storage failed |
/// | [`Cancelled`](TransportError::Cancelled), [`Closed`](TransportError::Closed) | it was cancelled, or the transport dropped |
#[derive(Debug)]
pub struct TcpTransport {
    inner: Arc<Inner>,
}

impl TcpTransport {
    /// Creates a transport for the links of an endpoint. Its tasks run on the current runtime.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(endpoint: &Endpoint) -> Self {
        let shared = endpoint.shared();
        let identity = shared.identity();
        let inner = Inner {
            name: identity.name.clone(),
            incarnation: identity.incarnation,
            limits: shared.limits.clone(),
            runtime: Handle::current(),
            signal: Arc::default(),
            state: Mutex::default(),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Attaches a link, which then carries items. Returns the id of its peer, which all links of
    /// one process share.
    ///
    /// # Errors
    /// [`TransportError::PeerGone`] if the link is closed, or is attached to another transport;
    /// [`TransportError::Closed`].
    pub fn attach(&self, link: &Link) -> Result<PeerId, TransportError> {
        attach(&self.inner, link.shared())
    }

    /// Returns the number of transfers and grants that are not over.
    pub fn live(&self) -> (usize, usize) {
        let state = self.inner.state.lock();
        (state.transfers.live(), state.grants.live())
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.closed = true;
        let peers: Vec<u32> = state.peers.keys().copied().collect();
        drop(state);
        peers.into_iter().for_each(|peer| self.inner.remove(PeerId(peer), &TransportError::Closed));
    }
}

fn attach(inner: &Arc<Inner>, link: &Arc<LinkShared>) -> Result<PeerId, TransportError> {
    let mut state = inner.state.lock();
    if state.closed {
        return Err(TransportError::Closed);
    }
    let of_peer =
        |entry: &PeerEntry| entry.name == link.peer.name && entry.incarnation == link.peer.incarnation;
    let known = state.peers.iter().find(|(_, entry)| of_peer(entry));
    let index = known.map(|(&index, _)| index);
    if let Some((&index, entry)) = known
        && entry.links.iter().any(|attached| Arc::ptr_eq(&attached.link, link))
    {
        return Ok(PeerId(index));
    }
    let Some(data) = link.take_data() else {
        let reason = link.cause().map_or("its link has another transport".into(), |cause| cause.to_string());
        return Err(TransportError::PeerGone { peer: link.peer.name.clone(), reason });
    };
    let index = index.unwrap_or_else(|| state.add_peer(&link.peer));
    let peer = PeerId(index);
    let streams: Vec<_> = data.iter().map(|_| Stream::new()).collect();
    if let Some(entry) = state.peers.get_mut(&index) {
        entry.links.push(Attached { link: link.clone(), streams: streams.clone() });
    }
    // A runtime that ends drops what is spawned here and now, and `Ending` takes the lock.
    drop(state);
    for (socket, stream) in data.into_iter().zip(streams) {
        let (read, write) = socket.split();
        let this = (peer, link.clone());
        inner.runtime.spawn(receive::run(inner.clone(), this.clone(), stream.clone(), read));
        inner.runtime.spawn(send::run(inner.clone(), this, stream, write));
    }
    let ending = Ending { inner: inner.clone(), peer, link: link.clone() };
    inner.runtime.spawn(async move { drop(ending.link.closed().await) });
    Ok(peer)
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

impl Transport for TcpTransport {
    fn name(&self) -> &'static str {
        NAME
    }

    fn register(&self, storage: &Arc<dyn Storage>) -> Result<RegionId, TransportError> {
        let region = Arc::new(Region::new(storage.clone())?);
        let mut state = self.inner.state.lock();
        state.regions.push(region);
        Ok(RegionId(state.regions.len() as u32 - 1))
    }

    /// Returns name and incarnation of this node: an attached peer needs no more.
    fn metadata(&self) -> Vec<u8> {
        let metadata = (&self.inner.name, self.inner.incarnation);
        wire::encode(&metadata, METADATA_MAX).expect("a name is short")
    }

    /// Returns the id of an attached peer.
    fn add_peer(&self, metadata: &[u8]) -> Result<PeerId, TransportError> {
        let invalid = |error: wire::WireError| TransportError::Metadata(error.to_string());
        if metadata.len() > METADATA_MAX {
            return Err(TransportError::Metadata(format!("{} bytes", metadata.len())));
        }
        let (name, incarnation): (String, u64) = wire::decode(metadata).map_err(invalid)?;
        check_name(&name).map_err(invalid)?;
        let state = self.inner.state.lock();
        let of_peer = |entry: &PeerEntry| {
            entry.name == name && entry.incarnation == incarnation && !entry.links.is_empty()
        };
        let known = state.peers.iter().find(|(_, entry)| of_peer(entry));
        known.map(|(&index, _)| PeerId(index)).ok_or_else(|| gone(&name, NO_LINK))
    }

    fn remove_peer(&self, peer: PeerId) {
        self.inner.remove(peer, &TransportError::Cancelled);
    }

    unsafe fn grant(&self, grant: Grant) -> Result<(), TransportError> {
        let mut state = self.inner.state.lock();
        if state.closed {
            return Err(TransportError::Closed);
        }
        let region = Inner::region(&state, grant.region)?;
        Inner::peer(&state, grant.peer)?;
        let hold = grant.hold.clone();
        let added = state.grants.add(grant, region, &self.inner.limits, self.inner.signal.clone());
        drop(state);
        // The last reference if the grant was refused: dropped without the lock.
        drop(hold);
        added
    }

    fn revoke(&self, tag: Tag, _source: SourceState) -> TransferState {
        let granted = self.inner.state.lock().grants.revoke(tag);
        match granted {
            Ok(granted) => drop(granted),
            Err(unknown) => return TransferState::Failed(unknown),
        }
        self.inner.state.lock().grants.ended(tag)
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
        let over = self.inner.state.lock().transfers.over(transfer);
        let over = over.is_some_and(|over| over.poll(waker));
        self.inner.state.lock().transfers.state(transfer, over)
    }

    fn cancel(&self, transfer: TransferId) -> TransferState {
        self.inner.fail(transfer, TransportError::Cancelled);
        self.poll(transfer, None)
    }

    /// Waits for the transfers, then revokes all grants, and waits for those.
    fn drain(&self, deadline: Instant) -> usize {
        self.inner.state.lock().closed = true;
        self.inner.signal.wait(deadline, || self.inner.state.lock().transfers.live() == 0);
        let revoked = self.inner.state.lock().grants.revoke_all();
        drop(revoked);
        self.inner.signal.wait(deadline, || self.inner.state.lock().grants.live() == 0);
        let (transfers, grants) = self.live();
        transfers + grants
    }
}

const METADATA_MAX: usize = 256;

//! The state of a link: an authenticated peer, its data streams, and whether it is closed.

use std::sync::{Mutex, OnceLock};

use tokio::sync::{mpsc, oneshot, watch};

use super::error::LinkError;
use super::lock::lock;
use super::socket::Socket;
use super::table::Slot;
use crate::wire::Limits;

/// What is known of a peer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Peer {
    /// Its name: of the certificate, if it presented one.
    pub name: String,
    /// Random number of its process. Another number means that its memory is gone.
    pub incarnation: u64,
    /// Version of the wire protocol of both sides.
    pub wire: u16,
    /// Version of the messages of both sides.
    pub messages: u16,
    /// Fingerprint of the layout of its blocks.
    pub fingerprint: [u8; 16],
}

/// The part of a link that its tasks share.
pub(super) struct LinkShared {
    pub(super) peer: Peer,
    pub(super) limits: Limits,
    /// Tells the links of a process apart.
    pub(super) number: u128,
    closing: Closing,
    pub(super) outbox: mpsc::Sender<Outgoing>,
    /// The data streams, until a transport takes them.
    data: Mutex<Option<Vec<Socket>>>,
    /// Place in the endpoint's count of links.
    slot: Mutex<Option<Slot>>,
}

impl std::fmt::Debug for LinkShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinkShared")
            .field("peer", &self.peer)
            .field("closing", &self.closing)
            .finish_non_exhaustive()
    }
}

/// An element of the queue of the control stream.
pub(super) enum Outgoing {
    /// An encoded message.
    Message(Vec<u8>),
    /// To be answered when everything before it was written.
    Flush(oneshot::Sender<()>),
}

impl LinkShared {
    pub(super) fn new(
        peer: Peer,
        limits: Limits,
        number: u128,
        outbox: mpsc::Sender<Outgoing>,
        data: Vec<Socket>,
        slot: Slot,
    ) -> Self {
        let (data, slot) = (Mutex::new(Some(data)), Mutex::new(Some(slot)));
        Self { peer, limits, number, closing: Closing::default(), outbox, data, slot }
    }

    /// Closes the link. The first cause counts.
    pub(super) fn close(&self, cause: LinkError) {
        let _ = self.closing.cause.set(cause);
        drop(lock(&self.data).take());
        drop(lock(&self.slot).take());
        // Last: the link no longer counts when its end is seen.
        self.closing.done.send_replace(true);
    }

    pub(super) async fn closed(&self) -> LinkError {
        self.closing.wait().await
    }

    pub(super) fn cause(&self) -> Option<LinkError> {
        self.closing.cause.get().cloned()
    }

    /// Takes the data streams; `None` if they were taken before, or the link is closed.
    pub(super) fn take_data(&self) -> Option<Vec<Socket>> {
        lock(&self.data).take()
    }

    /// Runs a loop of the link until it fails or the link is closed. A failure closes the link.
    pub(super) async fn run(&self, part: impl Future<Output = Result<(), LinkError>>) {
        tokio::select! {
            biased;
            _ = self.closed() => {}
            ended = part => self.close(ended.err().unwrap_or(LinkError::Ended)),
        }
    }
}

/// Whether a link is closed, and why.
#[derive(Debug)]
struct Closing {
    cause: OnceLock<LinkError>,
    done: watch::Sender<bool>,
}

impl Default for Closing {
    fn default() -> Self {
        Self { cause: OnceLock::new(), done: watch::Sender::new(false) }
    }
}

impl Closing {
    async fn wait(&self) -> LinkError {
        let mut done = self.done.subscribe();
        // The sender lives as long as `self`.
        let _ = done.wait_for(|&done| done).await;
        self.cause.get().cloned().unwrap_or(LinkError::Closed)
    }
}

//! A link: an authenticated peer, its control stream, its data streams.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot, watch};

use super::control;
use super::endpoint::Slot;
use super::error::LinkError;
use super::socket::Socket;
use crate::wire::{self, Limits};

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

/// An established link. Dropping it closes it.
#[derive(Debug)]
pub struct Link {
    shared: Arc<LinkShared>,
    inbox: tokio::sync::Mutex<mpsc::Receiver<Vec<u8>>>,
}

/// The part of a link that its tasks share.
pub(super) struct LinkShared {
    pub(super) peer: Peer,
    pub(super) limits: Limits,
    /// Tells the links of a process apart.
    pub(super) number: u128,
    closing: Closing,
    outbox: mpsc::Sender<Outgoing>,
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

/// The connections of a link that was negotiated.
pub(super) struct Connections {
    pub(super) control: Socket,
    pub(super) data: Vec<Socket>,
}

impl Link {
    /// Starts the tasks of the control stream, on the current runtime.
    pub(super) fn start(
        peer: Peer,
        limits: Limits,
        number: u128,
        connections: Connections,
        slot: Slot,
    ) -> Self {
        let (outbox, outgoing) = mpsc::channel(limits.queued_messages);
        let (incoming, inbox) = mpsc::channel(limits.queued_messages);
        let shared = Arc::new(LinkShared {
            peer,
            limits,
            number,
            closing: Closing::default(),
            outbox,
            data: Mutex::new(Some(connections.data)),
            slot: Mutex::new(Some(slot)),
        });
        let (read, write) = connections.control.split();
        tokio::spawn(control::read(shared.clone(), read, incoming));
        tokio::spawn(control::write(shared.clone(), write, outgoing));
        Self { shared, inbox: tokio::sync::Mutex::new(inbox) }
    }

    /// Returns what is known of the peer.
    pub fn peer(&self) -> &Peer {
        &self.shared.peer
    }

    pub(super) fn shared(&self) -> &Arc<LinkShared> {
        &self.shared
    }

    /// Queues a message. Waits while the queue is full.
    ///
    /// Messages arrive in order, each at most once; the last ones may be lost with the link.
    ///
    /// # Errors
    /// [`LinkError::Wire`] for a message above the limit; the cause, once the link is closed.
    pub async fn send<M: Serialize>(&self, message: &M) -> Result<(), LinkError> {
        let message = wire::encode(message, self.shared.limits.message_bytes)?;
        self.queue(Outgoing::Message(message)).await
    }

    /// Waits until all messages that were queued before are handed to the system.
    ///
    /// # Errors
    /// The cause, once the link is closed.
    pub async fn flush(&self) -> Result<(), LinkError> {
        let (done, flushed) = oneshot::channel();
        self.queue(Outgoing::Flush(done)).await?;
        match flushed.await {
            Ok(()) => Ok(()),
            Err(_) => Err(self.closed().await),
        }
    }

    async fn queue(&self, outgoing: Outgoing) -> Result<(), LinkError> {
        tokio::select! {
            biased;
            cause = self.closed() => Err(cause),
            sent = self.shared.outbox.send(outgoing) => match sent {
                Ok(()) => Ok(()),
                Err(_) => Err(self.closed().await),
            },
        }
    }

    /// Receives the next message.
    ///
    /// Messages that arrived before the link was closed are returned first. Dropping the future
    /// loses no message.
    ///
    /// # Errors
    /// [`LinkError::Wire`] for a message that cannot be decoded, which also closes the link; the
    /// cause, once the link is closed.
    pub async fn recv<M: DeserializeOwned>(&self) -> Result<M, LinkError> {
        let message = self.inbox.lock().await.recv().await;
        let Some(message) = message else { return Err(self.closed().await) };
        wire::decode(&message).map_err(|error| {
            self.shared.close(error.clone().into());
            error.into()
        })
    }

    /// Waits until the link is closed. Returns the cause.
    pub async fn closed(&self) -> LinkError {
        self.shared.closed().await
    }

    /// Returns the cause if the link is closed.
    pub fn cause(&self) -> Option<LinkError> {
        self.shared.closing.cause.get().cloned()
    }

    /// Closes the link: its connections end, and its transfers fail.
    pub fn close(&self) {
        self.shared.close(LinkError::Closed);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

impl LinkShared {
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

/// Locks a mutex whose data are consistent at any point where a holder may panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot};

use super::address::Address;
use super::control;
use super::error::LinkError;
use super::link_state::{Held, LinkShared, Outgoing, Peer, Queued, Room};
use super::socket::{Socket, SocketKind};
use super::table::Slot;
use crate::wire::{self, Denial, Limits};

/// An established link. Dropping it closes it.
#[derive(Debug)]
pub struct Link {
    shared: Arc<LinkShared>,
    kind: SocketKind,
    address: Address,
    inbox: tokio::sync::Mutex<mpsc::Receiver<Queued>>,
}

pub(super) struct Connections {
    pub(super) control: Socket,
    pub(super) data: Vec<Socket>,
    /// Of the other end, or of the Unix socket.
    pub(super) address: Address,
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
        let shared = Arc::new(LinkShared::new(peer, limits, number, outbox, connections.data, slot));
        let (kind, address) = (connections.control.kind(), connections.address);
        let (read, write) = connections.control.split();
        tokio::spawn(control::read(shared.clone(), read, incoming));
        tokio::spawn(control::write(shared.clone(), write, outgoing));
        Self { shared, kind, address, inbox: tokio::sync::Mutex::new(inbox) }
    }

    /// Returns the peer's identity.
    pub fn peer(&self) -> &Peer {
        &self.shared.peer
    }

    /// Returns the kind of its connections.
    pub fn kind(&self) -> SocketKind {
        self.kind
    }

    /// Returns the address of the other end; that of the socket, for a Unix socket.
    pub fn address(&self) -> &Address {
        &self.address
    }

    pub(super) fn shared(&self) -> &Arc<LinkShared> {
        &self.shared
    }

    /// Queues a message. Waits while the queue is full.
    ///
    /// Messages arrive in order, at most once; the last ones may be lost with the link.
    ///
    /// # Errors
    /// [`LinkError::Wire`] for a message above the limit of either side; the cause, once the link
    /// is closed.
    pub async fn send<M: Serialize>(&self, message: &M) -> Result<(), LinkError> {
        let message = wire::encode(message, self.message_max())?;
        let room = tokio::select! {
            biased;
            cause = self.closed() => return Err(cause),
            room = Room::wait(&self.shared.room.outgoing, message.len()) => room?,
        };
        self.queue(Outgoing::Message(Queued { message, room })).await
    }

    /// Queues a message if there is room.
    ///
    /// # Errors
    /// As for [`send`](Self::send); [`LinkError::Limit`] if the queue is full. The message is not
    /// sent.
    pub fn try_send<M: Serialize>(&self, message: &M) -> Result<(), LinkError> {
        if let Some(cause) = self.cause() {
            return Err(cause);
        }
        let message = wire::encode(message, self.message_max())?;
        let max = self.shared.limits.queued_bytes;
        let full = LinkError::Limit { what: "bytes of queued messages", max };
        let room = Room::take(&self.shared.room.outgoing, message.len()).ok_or(full)?;
        self.shared.outbox.try_send(Outgoing::Message(Queued { message, room })).map_err(
            |error| match error {
                mpsc::error::TrySendError::Full(_) => {
                    LinkError::Limit { what: "queued messages", max: self.shared.limits.queued_messages }
                }
                mpsc::error::TrySendError::Closed(_) => LinkError::Closed,
            },
        )
    }

    /// Returns the maximum length of a message that both sides permit.
    pub fn message_max(&self) -> usize {
        self.shared.message_max()
    }

    /// Waits until all messages queued before are written to the system.
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

    /// Receives the next message. Cancel safe.
    ///
    /// Messages that arrived before the link was closed are returned first.
    ///
    /// # Errors
    /// [`LinkError::Wire`] for a message that cannot be decoded, which also closes the link; the
    /// cause, once the link is closed.
    pub async fn recv<M: DeserializeOwned>(&self) -> Result<M, LinkError> {
        self.recv_held().await.map(|(message, _)| message)
    }

    /// Like [`recv`](Self::recv); also returns the message's share of the receive budget.
    pub(crate) async fn recv_held<M: DeserializeOwned>(&self) -> Result<(M, Held), LinkError> {
        let message = self.inbox.lock().await.recv().await;
        let Some(Queued { message, room }) = message else { return Err(self.closed().await) };
        let decoded = wire::decode_of(&message, self.peer().versions.is_some()).map_err(|error| {
            self.shared.close(error.clone().into());
            LinkError::from(error)
        })?;
        Ok((decoded, room))
    }

    /// Waits until the link is closed. Returns the cause.
    pub async fn closed(&self) -> LinkError {
        self.shared.closed().await
    }

    /// Returns the cause if the link is closed.
    pub fn cause(&self) -> Option<LinkError> {
        self.shared.cause()
    }

    /// Closes the link: its connections end, and its transfers fail.
    pub fn close(&self) {
        self.shared.close(LinkError::Closed);
    }

    pub(crate) fn denied(&self, denial: Denial) {
        self.shared.close(LinkError::Denied(denial));
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.close();
    }
}

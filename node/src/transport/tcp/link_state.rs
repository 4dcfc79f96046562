use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::sleep;

use super::error::LinkError;
use super::socket::Socket;
use super::table::Slot;
use crate::wire::{Limits, Statement, Versions};

/// Identity of a peer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct Peer {
    /// Its name, from the certificate if it presented one.
    pub name: String,
    /// Random number of its process. Another number means that the former memory is gone.
    pub incarnation: u64,
    /// Version of the messages of the link.
    pub messages: u16,
    /// Versions of the messages that the peer states; without any, it speaks exactly one.
    pub versions: Option<Versions>,
    /// Fingerprint of the layout of its blocks.
    pub fingerprint: [u8; 16],
    /// Its statement.
    pub statement: Statement,
}

pub(super) struct LinkShared {
    pub(super) peer: Peer,
    pub(super) limits: Limits,
    /// Distinguishes the links of a process.
    pub(super) number: u128,
    closing: Closing,
    pub(super) outbox: mpsc::Sender<Outgoing>,
    pub(super) room: Room,
    data: Mutex<Option<Vec<Socket>>>,
    /// Its place in the endpoint's count of links.
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

pub(super) enum Outgoing {
    Message(Queued),
    /// Answered when everything before it is written.
    Flush(oneshot::Sender<()>),
}

pub(super) struct Queued {
    pub(super) message: Vec<u8>,
    pub(super) room: Held,
}

/// Share of a message in a budget of queued bytes, released on drop.
#[derive(Debug)]
pub(crate) struct Held(#[expect(dead_code, reason = "only dropped")] OwnedSemaphorePermit);

pub(super) struct Room {
    pub(super) outgoing: Arc<Semaphore>,
    pub(super) incoming: Arc<Semaphore>,
}

impl Room {
    fn new(limits: &Limits) -> Self {
        // One message of any permitted length fits.
        let bytes = limits.queued_bytes.max(limits.message_bytes).min(Semaphore::MAX_PERMITS);
        let room = || Arc::new(Semaphore::new(bytes));
        Self { outgoing: room(), incoming: room() }
    }

    /// Waits for a share for a message of a permitted length.
    pub(super) async fn wait(room: &Arc<Semaphore>, bytes: usize) -> Result<Held, LinkError> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        room.clone().acquire_many_owned(bytes).await.map(Held).map_err(|_| LinkError::Closed)
    }

    /// Takes a share if it is free.
    pub(super) fn take(room: &Arc<Semaphore>, bytes: usize) -> Option<Held> {
        room.clone().try_acquire_many_owned(u32::try_from(bytes).unwrap_or(u32::MAX)).ok().map(Held)
    }
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
        let (data, slot, room) = (Mutex::new(Some(data)), Mutex::new(Some(slot)), Room::new(&limits));
        Self { peer, limits, number, closing: Closing::default(), outbox, room, data, slot }
    }

    /// Returns the maximum length of a message that both sides permit.
    pub(super) fn message_max(&self) -> usize {
        self.limits.message_bytes.min(self.peer.statement.message_bytes as usize)
    }

    /// Closes the link. The first cause counts.
    pub(super) fn close(&self, cause: LinkError) {
        let _ = self.closing.cause.set(cause);
        drop(self.data.lock().take());
        drop(self.slot.lock().take());
        // Last, so that the link no longer counts when its end is visible.
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
        self.data.lock().take()
    }

    /// Runs a loop of the link until it fails or the link is closed. A failure closes the link.
    pub(super) async fn run(&self, part: impl Future<Output = Result<(), LinkError>>) {
        tokio::select! {
            biased;
            _ = self.closed() => {}
            ended = part => self.close(ended.err().unwrap_or(LinkError::Ended)),
        }
    }

    /// Like [`run`](Self::run), for a loop other than the reader. If the peer is gone, the reader
    /// has `time` to read what the peer sent before, and to close the link itself.
    pub(super) async fn run_beside(&self, time: Duration, part: impl Future<Output = Result<(), LinkError>>) {
        self.run(async {
            let ended = part.await;
            if ended == Err(LinkError::Ended) {
                sleep(time).await;
            }
            ended
        })
        .await;
    }
}

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
        // `self` keeps the sender alive.
        let _ = done.wait_for(|&done| done).await;
        self.cause.get().cloned().unwrap_or(LinkError::Closed)
    }
}

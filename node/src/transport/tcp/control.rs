use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::error::LinkError;
use super::handshake::within;
use super::link_state::{LinkShared, Outgoing, Queued, Room};
use super::socket::{ReadSide, WriteSide};
use crate::wire::{FRAME_HEAD, FrameHead, FrameKind};

/// Increment by which memory for a message grows as its bytes arrive.
const GROWTH: usize = 64 << 10;

/// Reads frames until the link is closed. Closes it if the peer is silent, or slow in a frame.
pub(super) async fn read(link: Arc<LinkShared>, mut socket: ReadSide, inbox: mpsc::Sender<Queued>) {
    link.run(read_frames(&link, &mut socket, inbox)).await;
    if link.closed().await == LinkError::Closed {
        drain(socket, link.limits.heartbeat).await;
    }
}

/// Discards what still arrives, for a short time. Closing a connection with unread bytes resets it,
/// and the peer loses what it has not read: the last messages of this side.
async fn drain(mut socket: ReadSide, time: Duration) {
    let ended = async {
        let mut bytes = [0; 1 << 10];
        while matches!(socket.read(&mut bytes).await, Ok(1..)) {}
    };
    let _ = timeout(time, ended).await;
}

async fn read_frames(
    link: &LinkShared,
    socket: &mut ReadSide,
    inbox: mpsc::Sender<Queued>,
) -> Result<(), LinkError> {
    let limits = &link.limits;
    let failed = |error| LinkError::io("read from the control stream", error);
    loop {
        let mut head = [0; FRAME_HEAD];
        let first = within(limits.silence, "send a heartbeat", async {
            socket.read(&mut head).await.map_err(failed)
        });
        let first = first.await?;
        let head = within(limits.item, "complete a message", async {
            socket.read_exact(&mut head[first..]).await.map_err(failed)?;
            Ok(FrameHead::decode(&head, limits.message_bytes)?)
        });
        let head = head.await?;
        if head.kind == FrameKind::Heartbeat {
            continue;
        }
        // A full inbox stops reading (backpressure), but does not disconnect the peer.
        let room = Room::wait(&link.room.incoming, head.length).await?;
        let message = within(limits.item, "complete a message", async {
            let mut message = Vec::new();
            while message.len() < head.length {
                let (start, end) = (message.len(), head.length.min(message.len() + GROWTH));
                message.resize(end, 0);
                socket.read_exact(&mut message[start..]).await.map_err(failed)?;
            }
            Ok(message)
        });
        let message = message.await?;
        if inbox.send(Queued { message, room }).await.is_err() {
            return Err(LinkError::Closed);
        }
    }
}

/// Writes frames until the link is closed, and a heartbeat whenever the queue stays empty.
pub(super) async fn write(link: Arc<LinkShared>, mut socket: WriteSide, mut queue: mpsc::Receiver<Outgoing>) {
    // The reader ends the link of a peer that is gone, once it has read everything before.
    link.run_beside(link.limits.silence, write_frames(&link, &mut socket, &mut queue)).await;
    let _ = timeout(link.limits.heartbeat, socket.shutdown()).await;
}

async fn write_frames(
    link: &LinkShared,
    socket: &mut WriteSide,
    queue: &mut mpsc::Receiver<Outgoing>,
) -> Result<(), LinkError> {
    let limits = &link.limits;
    // Short at first, so that the peer knows at once that this side is up.
    let mut wait = limits.heartbeat / 8;
    loop {
        // Writing a message releases its room.
        let (kind, message, _room) = match timeout(wait, queue.recv()).await {
            Err(_) => (FrameKind::Heartbeat, Vec::new(), None),
            Ok(Some(Outgoing::Message(Queued { message, room }))) => {
                (FrameKind::Message, message, Some(room))
            }
            Ok(Some(Outgoing::Flush(done))) => {
                let _ = done.send(());
                continue;
            }
            // The link's senders are dropped with it.
            Ok(None) => return Err(LinkError::Closed),
        };
        wait = limits.heartbeat;
        let head = FrameHead { kind, length: message.len() };
        let frame = [&head.encode()[..], &message].concat();
        let written = within(limits.item, "read a message", async {
            let written = async {
                socket.write_all(&frame).await?;
                socket.flush().await
            };
            written.await.map_err(|error| LinkError::io("write to the control stream", error))
        });
        written.await?;
    }
}

/// Pauses, for loops that must not spin on a system error.
pub(super) async fn pause() {
    sleep(Duration::from_millis(20)).await;
}

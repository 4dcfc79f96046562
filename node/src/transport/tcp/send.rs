//! The loop that writes a data stream: acknowledgements first, then items.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex};

use kvpool::transport::{PeerId, TransportError};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout_at};

use super::error::LinkError;
use super::frames::Inner;
use super::handshake::within;
use super::link::{LinkShared, lock};
use super::region::{From, Held};
use super::socket::WriteSide;
use super::transfers::{Item, Sent};
use crate::wire::{Ack, Form, StreamHead};

/// Acknowledgements that a peer may leave unread.
const ACKS_MAX: usize = 1024;

/// Written instead of frames that were given up while they were being sent.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// The part of a data stream that its two loops share.
pub(super) struct Stream {
    /// Wakes the loop that writes.
    pub(super) work: Notify,
    out: Mutex<Out>,
}

struct Out {
    acks: VecDeque<Ack>,
    /// In the order in which they were sent.
    sent: VecDeque<Sent>,
    /// Time of the last item or acknowledgement.
    progress: Instant,
}

/// What the loop does next.
enum Work {
    Ack(Ack),
    Item(Item),
    /// Nothing, before this time if items wait for their acknowledgement.
    Idle(Option<Instant>),
}

impl Stream {
    pub(super) fn new() -> Arc<Self> {
        let out = Out { acks: VecDeque::new(), sent: VecDeque::new(), progress: Instant::now() };
        Arc::new(Self { work: Notify::new(), out: Mutex::new(out) })
    }

    /// Queues an acknowledgement for the peer.
    pub(super) fn acknowledge(&self, ack: Ack) -> Result<(), LinkError> {
        let mut out = lock(&self.out);
        if out.acks.len() >= ACKS_MAX {
            return Err(LinkError::Limit { what: "unread acknowledgements", max: ACKS_MAX });
        }
        out.acks.push_back(ack);
        drop(out);
        self.work.notify_one();
        Ok(())
    }

    /// Takes the oldest unacknowledged item, which must be the acknowledged one.
    pub(super) fn acknowledged(&self, ack: Ack) -> Option<Sent> {
        let mut out = lock(&self.out);
        out.sent.front().filter(|sent| sent.item == ack.item)?;
        out.progress = Instant::now();
        let sent = out.sent.pop_front();
        drop(out);
        self.work.notify_one();
        sent
    }

    /// Takes all unacknowledged items.
    pub(super) fn take_sent(&self) -> VecDeque<Sent> {
        std::mem::take(&mut lock(&self.out).sent)
    }

    /// Notes an item as sent, before its first byte is.
    pub(super) fn sending(&self, sent: Sent) {
        let mut out = lock(&self.out);
        out.progress = Instant::now();
        out.sent.push_back(sent);
    }

    fn next(self: &Arc<Self>, inner: &Inner, peer: PeerId, link: &LinkShared) -> Work {
        let limits = &link.limits;
        let (full, idle) = {
            let mut out = lock(&self.out);
            if let Some(ack) = out.acks.pop_front() {
                return Work::Ack(ack);
            }
            let waits = !out.sent.is_empty();
            (out.sent.len() >= limits.window.max(1), waits.then(|| out.progress + limits.item))
        };
        if full {
            return Work::Idle(idle);
        }
        inner.next_item(peer, link.number, self).map_or(Work::Idle(idle), Work::Item)
    }
}

/// Writes until the link is closed.
pub(super) async fn run(
    inner: Arc<Inner>,
    (peer, link): (PeerId, Arc<LinkShared>),
    stream: Arc<Stream>,
    mut socket: WriteSide,
) {
    link.run(async {
        loop {
            match stream.next(&inner, peer, &link) {
                Work::Ack(ack) => {
                    let head = StreamHead::Ack(ack).encode();
                    let written = async { socket.write_all(&head).await.map_err(failed) };
                    within(link.limits.item, "read an acknowledgement", written).await?;
                }
                Work::Item(item) => {
                    within(link.limits.item, "read a data item", write(&inner, &mut socket, item)).await?;
                }
                Work::Idle(deadline) => {
                    let flushed = async { socket.flush().await.map_err(failed) };
                    within(link.limits.item, "read a data stream", flushed).await?;
                    let Some(deadline) = deadline else {
                        stream.work.notified().await;
                        continue;
                    };
                    if timeout_at(deadline, stream.work.notified()).await.is_err() {
                        let waited_ms = link.limits.item.as_millis() as u64;
                        return Err(LinkError::Slow { what: "acknowledge a data item", waited_ms });
                    }
                }
            }
        }
    })
    .await;
}

fn failed(error: std::io::Error) -> LinkError {
    LinkError::io("write to a data stream", error)
}

/// Writes an item. The rest of one that is given up meanwhile is filled with zeros.
async fn write(inner: &Inner, socket: &mut WriteSide, item: Item) -> Result<(), LinkError> {
    socket.write_all(&StreamHead::Item(item.head).encode()).await.map_err(failed)?;
    let Some(mut pieces) = item.region.pieces(item.local, item.head.form) else {
        let bytes = pack(inner, &item).await.unwrap_or_else(|| vec![0; item.head.bytes as usize]);
        return socket.write_all(&bytes).await.map_err(failed);
    };
    while pieces.left() > 0 {
        let mut memory = From { source: &item.source, pieces: &pieces };
        match poll_fn(|cx| socket.poll_from(cx, &mut memory)).await.map_err(failed)? {
            Some(written) => pieces.advance(written),
            None => {
                let bytes = &ZEROS[..pieces.left().min(ZEROS.len())];
                socket.write_all(bytes).await.map_err(failed)?;
                pieces.advance(bytes.len());
            }
        }
    }
    Ok(())
}

/// Packs the frames of an item, on a thread that may wait for a device. `None` if the transfer was
/// given up or the storage failed; then the transfer has ended.
async fn pack(inner: &Inner, item: &Item) -> Option<Vec<u8>> {
    debug_assert_eq!(item.head.form, Form::Packed, "a storage without planes");
    let (source, run, bytes) = (item.source.clone(), item.local, item.head.bytes as usize);
    let packed = tokio::task::spawn_blocking(move || {
        let source: Arc<Held> = source.upgrade()?;
        let mut packed = vec![0; bytes];
        // SAFETY: `source` has the hold, which keeps the frames' bytes.
        let result = unsafe { source.region.storage().pack(&[run], &mut packed) };
        Some(result.map(|()| packed))
    });
    match packed.await.ok()?? {
        Ok(packed) => Some(packed),
        Err(error) => {
            inner.fail(item.sent.transfer, TransportError::Storage(error.to_string()));
            None
        }
    }
}

//! The loop that writes a data stream: acknowledgements first, then items.

use std::future::poll_fn;
use std::sync::Arc;

use kvpool::transport::{PeerId, TransportError};
use tokio::time::timeout_at;

use super::error::LinkError;
use super::handshake::within;
use super::inner::Inner;
use super::link_state::LinkShared;
use super::region::{From, Held};
use super::socket::WriteSide;
use super::stream::{Stream, Work};
use super::transfers::Item;
use crate::wire::{Form, StreamHead};

/// Sent instead of the rest of a cancelled item.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

pub(super) async fn run(
    inner: Arc<Inner>,
    (peer, link): (PeerId, Arc<LinkShared>),
    stream: Arc<Stream>,
    mut socket: WriteSide,
) {
    link.run_beside(link.limits.heartbeat, async {
        loop {
            match stream.next(&link.limits, || inner.next_item(peer, link.number, &stream)) {
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

/// Writes an item. The rest of one that is cancelled meanwhile is filled with zeros.
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

/// Packs the frames of an item on a blocking thread. `None` if the transfer was cancelled or the
/// storage failed; the transfer has then ended.
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

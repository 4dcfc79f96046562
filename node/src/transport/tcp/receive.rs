//! The loop that reads a data stream: items into granted frames, and acknowledgements.

use std::future::poll_fn;
use std::sync::Arc;

use kvpool::Run;
use kvpool::transfer::Arriving;
use kvpool::transport::PeerId;

use super::error::LinkError;
use super::grants::Claim;
use super::handshake::within;
use super::inner::Inner;
use super::link_state::LinkShared;
use super::region::{Into, Pieces};
use super::socket::ReadSide;
use super::stream::Stream;
use crate::wire::{Ack, Form, ITEM_HEAD, ItemHead, ItemStatus, StreamHead, WireError};

/// Size of the buffer for discarded bytes.
const SINK: usize = 64 << 10;

pub(super) async fn run(
    inner: Arc<Inner>,
    (peer, link): (PeerId, Arc<LinkShared>),
    stream: Arc<Stream>,
    mut socket: ReadSide,
) {
    link.run_beside(link.limits.heartbeat, async {
        loop {
            let mut head = [0; ITEM_HEAD];
            // Between items a stream may be idle; the control stream detects a dead peer.
            let first = socket.read(&mut head).await.map_err(failed)?;
            let ack = within(link.limits.item, "complete a data item", async {
                socket.read_exact(&mut head[first..]).await.map_err(failed)?;
                match StreamHead::decode(&head)? {
                    StreamHead::Ack(ack) => {
                        let Some(sent) = stream.acknowledged(ack) else {
                            let what = "the number of an acknowledged item";
                            return Err(WireError::Invalid { what, got: ack.item }.into());
                        };
                        inner.acknowledged(sent, ack.status);
                        Ok(None)
                    }
                    StreamHead::Item(head) => {
                        let status = receive(&inner, peer, &link, &mut socket, &head).await?;
                        Ok(Some(Ack { item: head.item, status }))
                    }
                }
            });
            if let Some(ack) = ack.await? {
                stream.acknowledge(ack)?;
            }
        }
    })
    .await;
}

fn failed(error: std::io::Error) -> LinkError {
    LinkError::io("read from a data stream", error)
}

async fn receive(
    inner: &Inner,
    peer: PeerId,
    link: &LinkShared,
    socket: &mut ReadSide,
    head: &ItemHead,
) -> Result<ItemStatus, LinkError> {
    let max = link.limits.item_bytes.max(inner.frame_bytes_max());
    if head.bytes as usize > max {
        return Err(
            WireError::TooLarge { what: "a data item", got: head.bytes.into(), max: max as u64 }.into()
        );
    }
    let claim = match inner.claim(peer, head) {
        Ok(claim) => claim,
        Err(status) => {
            discard(socket, head.bytes as usize).await?;
            return Ok(status);
        }
    };
    match claim.region.pieces(head.run, head.form) {
        Some(pieces) => into_frames(socket, &claim, head.run, pieces).await,
        None => through_buffer(socket, claim, head).await,
    }
}

async fn into_frames(
    socket: &mut ReadSide,
    claim: &Claim,
    run: Run,
    mut pieces: Pieces,
) -> Result<ItemStatus, LinkError> {
    let granted = claim.granted.upgrade();
    let mut arriving = granted.and_then(|granted| Arriving::begin(granted.held.hold(), run));
    while pieces.left() > 0 {
        let mut memory = Into { grant: &claim.granted, pieces: &pieces };
        match poll_fn(|cx| socket.poll_into(cx, &mut memory)).await.map_err(failed)? {
            Some(read) => {
                let granted = claim.granted.upgrade();
                let mut sums = arriving.as_mut().filter(|_| granted.is_some());
                pieces.advance_with(read, |frame, start, bytes| {
                    if let Some(sums) = &mut sums {
                        // SAFETY: as in `Into`. The bytes are still in the CPU cache.
                        sums.add(frame, unsafe { std::slice::from_raw_parts(start, bytes) });
                    }
                });
            }
            None => {
                discard(socket, pieces.left()).await?;
                return Ok(ItemStatus::UnknownGrant);
            }
        }
    }
    // If the grant was revoked meanwhile, the import reads all frames.
    if let (Some(arriving), Some(granted)) = (arriving, claim.granted.upgrade()) {
        arriving.finish(granted.held.hold());
    }
    Ok(ItemStatus::Written)
}

/// Receives into a buffer, which a blocking thread unpacks.
async fn through_buffer(
    socket: &mut ReadSide,
    claim: Claim,
    head: &ItemHead,
) -> Result<ItemStatus, LinkError> {
    let mut bytes = vec![0; head.bytes as usize];
    socket.read_exact(&mut bytes).await.map_err(failed)?;
    let (run, form) = (head.run, head.form);
    let unpacked = tokio::task::spawn_blocking(move || {
        if form == Form::Planes {
            bytes = claim.region.to_packed(&bytes);
        }
        let Some(granted) = claim.granted.upgrade() else { return ItemStatus::UnknownGrant };
        // SAFETY: granted frames: `granted` has the hold, so no other thread accesses them; the
        // claim on the run, which is dropped later, excludes other items of the peer.
        let result = unsafe { granted.held.region.storage().unpack(&[run], &bytes) };
        drop(granted);
        drop(claim);
        result.map_or(ItemStatus::Storage, |()| ItemStatus::Written)
    });
    Ok(unpacked.await.unwrap_or(ItemStatus::Storage))
}

async fn discard(socket: &mut ReadSide, mut bytes: usize) -> Result<(), LinkError> {
    let mut sink = vec![0; bytes.min(SINK)];
    while bytes > 0 {
        let sink = &mut sink[..bytes.min(SINK)];
        bytes -= socket.read(sink).await.map_err(failed)?;
    }
    Ok(())
}

//! Connections that end at every point of a data item.

use std::time::Duration;

use kvpool::storage::Storage;
use kvpool::transfer::Piece;
use kvpool::transport::{RegionId, SourceState, Tag, TransferState, Transport, TransportError};
use kvpool::{Pool, SequenceId};
use kvpool_node::wire::{Ack, Form, ITEM_HEAD, ItemHead, ItemStatus, StreamHead};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::*;

/// Frames of the item.
const FRAMES: u32 = 2;

/// Returns the bytes of an item whose frames carry the pattern.
pub fn item(storage: &dyn Storage, number: u64, tag: u64, start: u32, seed: u64) -> Vec<u8> {
    let body: Vec<u8> = (start..start + FRAMES).flat_map(|frame| pattern(storage, seed, frame)).collect();
    let (run, bytes) = (run(start, FRAMES), body.len() as u32);
    let head = ItemHead { item: number, tag: Tag(tag), run, form: Form::Packed, bytes };
    [&StreamHead::Item(head).encode()[..], &body].concat()
}

/// Points at which an item of this length is cut: those around its head, and others.
fn points(length: usize) -> impl Iterator<Item = usize> {
    (0..=ITEM_HEAD + 1).chain((ITEM_HEAD + 2..length - 1).step_by(61)).chain([length - 1, length])
}

/// Revokes a grant, and waits until it is over.
pub async fn revoke(node: &Node, tag: u64) {
    loop {
        match node.transport.revoke(Tag(tag), SourceState::Unknown) {
            TransferState::Done => return,
            TransferState::Quarantined(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            state => panic!("{state:?}"),
        }
    }
}

/// The sender of an item is cut at every point. Afterwards the receiver's frames are its own.
#[tokio::test(flavor = "multi_thread")]
async fn an_item_is_cut_at_every_point_on_its_way_in() {
    let endpoint = listen(identity("b"), loopback(), limits()).await;
    let to = storage(&layout(), 8);
    let length = item(&*to, 0, 0, 2, 1).len();
    for cut in points(length) {
        let (raw, link) = Raw::link(&endpoint, 2).await;
        let transport = kvpool_node::transport::tcp::TcpTransport::new(&endpoint);
        let peer = transport.attach(&link).unwrap();
        let region = transport.register(&to).unwrap();
        fill(&*to, 0..8, 5);
        let (hold, held) = hold();
        let runs = vec![run(2, FRAMES)];
        // SAFETY: the frames are touched after the grant only.
        unsafe { transport.grant(kvpool::transport::Grant { tag: Tag(1), region, runs, peer, hold }) }
            .unwrap();
        let mut raw = raw;
        raw.data[1].write_all(&item(&*to, 0, 1, 2, 9)[..cut]).await.unwrap();
        if cut == length {
            let ack = Ack { item: 0, status: ItemStatus::Written };
            assert_eq!(read_head(&mut raw.data[1]).await, StreamHead::Ack(ack));
        }
        drop(raw);
        link.closed().await;
        assert!(held.is_held(), "a lost link ends no grant");
        until("the grant is over", || {
            matches!(transport.revoke(Tag(1), SourceState::Unknown), TransferState::Done)
        })
        .await;
        assert!(!held.is_held());
        for frame in 0..8 {
            let complete = cut == length && (2..2 + FRAMES).contains(&frame);
            let expected = pattern(&*to, if complete { 9 } else { 5 }, frame);
            let partial = cut > ITEM_HEAD && (2..2 + FRAMES).contains(&frame);
            assert!(partial && !complete || bytes(&*to, frame) == expected, "cut at {cut}, frame {frame}");
        }
    }
    assert_eq!(endpoint.links(), 0);
}

/// A right item arrives, and then a part of a wrong one in the same frames: the blocks are read
/// again, although the checksum of the right one was computed while it arrived.
#[tokio::test(flavor = "multi_thread")]
async fn a_checksum_that_was_computed_on_arrival_is_void_after_a_further_write() {
    let endpoint = listen(identity("b"), loopback(), limits()).await;
    let [from, to] = [9, 5].map(|seed| {
        let pool = Pool::builder(layout()).blocks(8).build().unwrap();
        fill(&**pool.storage().unwrap(), 0..9, seed);
        pool
    });
    let mut sequence = from.sequence(SequenceId(1)).tokens(&[1]).unwrap();
    let mut batch = from.begin_batch();
    batch.append(&mut sequence, FRAMES as usize * layout().block_tokens()).unwrap();
    batch.finish();
    let export = from.export(sequence).unwrap();
    let manifest = export.manifest().unwrap();
    let body: Vec<u8> = (0..FRAMES).flat_map(|place| export.packed(place).unwrap()).collect();
    // A cut may overtake what was sent before it: then less of the wrong item has arrived.
    let mut parts = vec![(0, 0), (ITEM_HEAD, 0), (ITEM_HEAD + 1, 1), (ITEM_HEAD + body.len() - 1, 2)];
    let mut attempts = 0..100;
    while let Some((part, bad)) = parts.pop() {
        attempts.next().expect("some parts arrive before the cut");
        let mut import = to.import(&manifest).unwrap();
        let (mut raw, link) = Raw::link(&endpoint, 2).await;
        let transport = kvpool_node::transport::tcp::TcpTransport::new(&endpoint);
        let peer = transport.attach(&link).unwrap();
        let region = transport.register(import.storage()).unwrap();
        let Piece { runs, hold, .. } = import.piece(&[0, 1]).unwrap();
        let (run, bytes) = (runs[0], body.len() as u32);
        // SAFETY: the import's frames.
        unsafe { transport.grant(kvpool::transport::Grant { tag: Tag(1), region, runs, peer, hold }) }
            .unwrap();
        let head = |item| ItemHead { item, tag: Tag(1), run, form: Form::Packed, bytes };
        let item = |item, body: &[u8]| [&StreamHead::Item(head(item)).encode()[..], body].concat();
        raw.data[1].write_all(&item(0, &body)).await.unwrap();
        let ack = Ack { item: 0, status: ItemStatus::Written };
        assert_eq!(read_head(&mut raw.data[1]).await, StreamHead::Ack(ack));
        let frames = || run.frames().map(|frame| crate::support::bytes(&**to.storage().unwrap(), frame.0));
        let right: Vec<_> = frames().collect();
        let wrong: Vec<u8> = body.iter().map(|byte| !byte).collect();
        raw.data[1].write_all(&item(1, &wrong)[..part]).await.unwrap();
        drop(raw);
        link.closed().await;
        until("the grant is over", || {
            matches!(transport.revoke(Tag(1), SourceState::Unknown), TransferState::Done)
        })
        .await;
        let arrived = frames().zip(right).filter(|(now, right)| now != right).count();
        assert_eq!(import.verify().unwrap().len(), arrived, "{part} bytes of the wrong item");
        assert!(arrived <= bad, "{part} bytes of the wrong item");
        if arrived < bad {
            parts.push((part, bad));
        }
    }
}

/// The receiver of an item is cut at every point. The transfer fails, and the source has its
/// frames back.
#[tokio::test(flavor = "multi_thread")]
async fn an_item_is_cut_at_every_point_on_its_way_out() {
    let endpoint = listen(identity("b"), loopback(), limits()).await;
    let from = storage(&layout(), 8);
    fill(&*from, 0..8, 3);
    let length = ITEM_HEAD + FRAMES as usize * from.layout().packed_bytes();
    for cut in points(length) {
        let (mut raw, link) = Raw::link(&endpoint, 1).await;
        let transport = kvpool_node::transport::tcp::TcpTransport::new(&endpoint);
        let peer = transport.attach(&link).unwrap();
        let region = transport.register(&from).unwrap();
        let (hold, held) = hold();
        let submission = kvpool::transport::Submission {
            region,
            peer,
            remote_region: RegionId(0),
            local: vec![run(1, FRAMES)],
            remote: vec![run(2, FRAMES)],
            tag: Tag(1),
            hold,
        };
        // SAFETY: no one writes the frames.
        let transfer = unsafe { transport.submit(submission) }.unwrap();
        let mut read = vec![0; cut];
        raw.data[0].read_exact(&mut read).await.unwrap();
        assert!(matches!(transport.poll(transfer, None), TransferState::InFlight));
        assert!(held.is_held());
        drop(raw);
        let error = failure(&transport, transfer).await;
        assert!(matches!(error, TransportError::PeerGone { .. }), "{error:?}");
        assert!(!held.is_held());
        assert_eq!(transport.live(), (0, 0));
    }
}

/// A grant is revoked at every point of an item. The rest is thrown away, and answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_is_revoked_at_every_point_of_an_item() {
    let (node, mut data) = with_raw(limits(), 1).await;
    let stream: &mut TcpStream = &mut data[0];
    let to = storage(&layout(), 8);
    let region = node.register(&to);
    let length = item(&*to, 0, 0, 2, 1).len();
    for (number, cut) in points(length - 1).enumerate() {
        let tag = number as u64;
        let granted = node.grant(tag, region, &[run(2, FRAMES)]).unwrap();
        let whole = item(&*to, tag, tag, 2, 9);
        stream.write_all(&whole[..cut]).await.unwrap();
        if number % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
        revoke(&node, tag).await;
        assert!(!granted.is_held());
        fill(&*to, 0..8, 5);
        stream.write_all(&whole[cut..]).await.unwrap();
        let ack = Ack { item: tag, status: ItemStatus::UnknownGrant };
        assert_eq!(read_head(stream).await, StreamHead::Ack(ack), "cut at {cut}");
        for frame in 0..8 {
            assert_eq!(bytes(&*to, frame), pattern(&*to, 5, frame), "cut at {cut}, frame {frame}");
        }
    }
    // The stream is as good as new.
    let _granted = node.grant(9999, region, &[run(2, FRAMES)]).unwrap();
    stream.write_all(&item(&*to, 1, 9999, 2, 9)).await.unwrap();
    let ack = Ack { item: 1, status: ItemStatus::Written };
    assert_eq!(read_head(stream).await, StreamHead::Ack(ack));
}

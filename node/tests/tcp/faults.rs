//! Peers that break the protocol of data streams, and transfers that are given up.

use std::sync::Arc;
use std::time::Duration;

use kvpool::KvLayout;
use kvpool::storage::Storage;
use kvpool::transport::{Tag, TransferState, Transport, TransportError};
use kvpool_node::transport::tcp::{LinkError, TcpTransport};
use kvpool_node::wire::{Ack, Form, ITEM_HEAD, ItemHead, ItemStatus, StreamHead, WireError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::cuts::{item, revoke};
use crate::support::*;

/// Frames of 2 MiB, more than a socket buffers.
fn large(frames: usize) -> Arc<dyn Storage> {
    let layout = KvLayout::builder().layers(16).kv_heads(8).head_dim(256).block_tokens(16).build().unwrap();
    storage(&layout, frames)
}

/// Two items never write one frame at the same time, on whichever streams they come.
#[tokio::test(flavor = "multi_thread")]
async fn a_frame_is_not_received_twice_at_a_time() {
    let (node, mut data) = with_raw(limits(), 2).await;
    let to = storage(&layout(), 8);
    let region = node.register(&to);
    let _granted = node.grant(1, region, &[run(0, 8)]).unwrap();
    let written = |item| StreamHead::Ack(Ack { item, status: ItemStatus::Written });
    let (first, second) = (item(&*to, 1, 1, 2, 7), |number| item(&*to, number, 1, 3, 8));
    data[0].write_all(&first[..100]).await.unwrap();
    // Until the node has read the head of the first one, others are written.
    let mut number = 2;
    loop {
        data[1].write_all(&second(number)).await.unwrap();
        let answer = read_head(&mut data[1]).await;
        if answer == StreamHead::Ack(Ack { item: number, status: ItemStatus::Overlap }) {
            break;
        }
        assert_eq!(answer, written(number));
        number += 1;
    }
    data[0].write_all(&first[100..]).await.unwrap();
    assert_eq!(read_head(&mut data[0]).await, written(1));
    assert_eq!(bytes(&*to, 3), pattern(&*to, 7, 3));
    data[1].write_all(&second(number)).await.unwrap();
    assert_eq!(read_head(&mut data[1]).await, written(number));
    assert_eq!(bytes(&*to, 3), pattern(&*to, 8, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_on_a_data_stream_ends_the_link() {
    let head = |bytes| {
        let head = ItemHead { item: 1, tag: Tag(1), run: run(0, 1), form: Form::Packed, bytes };
        StreamHead::Item(head).encode()
    };
    let huge = LinkError::Wire(WireError::TooLarge {
        what: "a data item",
        got: u32::MAX.into(),
        max: limits().item_bytes as u64,
    });
    let unasked = StreamHead::Ack(Ack { item: 3, status: ItemStatus::Written }).encode();
    let invalid = |what, got| LinkError::Wire(WireError::Invalid { what, got });
    let cases = [
        (head(u32::MAX), huge),
        (unasked, invalid("the number of an acknowledged item", 3)),
        ([0xee; ITEM_HEAD], invalid("a spare byte of an item", 0xee)),
    ];
    for (bytes, expected) in cases {
        let (node, mut data) = with_raw(limits(), 2).await;
        let region = node.register(&storage(&layout(), 8));
        let granted = node.grant(1, region, &[run(0, 8)]).unwrap();
        data[1].write_all(&bytes).await.unwrap();
        assert_eq!(node.link.closed().await, expected);
        assert!(granted.is_held());
        revoke(&node, 1).await;
        assert!(!granted.is_held());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promised_item_that_does_not_come_is_cut() {
    let (node, mut data) = with_raw(hasty_items(), 1).await;
    let to = storage(&layout(), 8);
    let region = node.register(&to);
    let granted = node.grant(1, region, &[run(0, 8)]).unwrap();
    let slow = async {
        // A byte now and then is no progress.
        for byte in item(&*to, 1, 1, 2, 7) {
            if data[0].write_all(&[byte]).await.is_err() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    };
    let (cause, ()) = tokio::join!(node.link.closed(), slow);
    assert!(matches!(cause, LinkError::Slow { what: "complete a data item", .. }), "{cause:?}");
    revoke(&node, 1).await;
    assert!(!granted.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_reads_no_items_is_cut_and_a_transfer_can_be_given_up_before() {
    let (node, _data) = with_raw(hasty_items(), 1).await;
    let region = node.register(&large(8));
    let (first, first_held) = node.submit(1, region, &[run(0, 8)], &[run(0, 8)]).unwrap();
    let (second, second_held) = node.submit(1, region, &[run(0, 8)], &[run(0, 8)]).unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(first_held.is_held() && second_held.is_held());
    // The first one is in the middle of an item.
    match node.transport.cancel(first) {
        TransferState::Failed(error) => assert_eq!(error, TransportError::Cancelled),
        state => panic!("{state:?}"),
    }
    assert!(!first_held.is_held());
    assert!(matches!(node.transport.poll(second, None), TransferState::InFlight));
    let error = failure(&node.transport, second).await;
    assert!(matches!(error, TransportError::Stalled { waited_ms: 1500, .. }), "{error:?}");
    assert!(!second_held.is_held());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_acknowledges_nothing_is_cut() {
    let (node, mut data) = with_raw(hasty_items(), 1).await;
    let region = node.register(&storage(&layout(), 8));
    let (transfer, held) = node.submit(1, region, &[run(0, 8)], &[run(0, 8)]).unwrap();
    let mut stream = data.pop().unwrap();
    tokio::spawn(async move { tokio::io::copy(&mut stream, &mut tokio::io::sink()).await });
    let error = failure(&node.transport, transfer).await;
    assert!(matches!(error, TransportError::Stalled { .. }), "{error:?}");
    assert!(!held.is_held());
    assert!(matches!(node.link.closed().await, LinkError::Slow { what: "acknowledge a data item", .. }));
}

/// The rest of an item that was given up is zeros, so that the stream goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_outlives_a_cancelled_transfer() {
    let (node, mut data) = with_raw(limits(), 1).await;
    let from = large(4);
    fill(&*from, 0..4, 1);
    let region = node.register(&from);
    let (first, _) = node.submit(1, region, &[run(0, 4)], &[run(0, 4)]).unwrap();
    let (second, _) = node.submit(1, region, &[run(0, 1)], &[run(0, 1)]).unwrap();
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(matches!(node.transport.cancel(first), TransferState::Failed(_)));
    // From here on the frames are another owner's.
    fill(&*from, 1..4, 2);
    let stream = &mut data[0];
    let mut items = 0;
    while !matches!(node.transport.poll(second, None), TransferState::Done) {
        let StreamHead::Item(head) = read_head(stream).await else { panic!("an acknowledgement") };
        let mut body = vec![0; head.bytes as usize];
        stream.read_exact(&mut body).await.unwrap();
        let other = pattern(&*from, 2, 1);
        assert!(!body.windows(64).any(|bytes| bytes == &other[..64]), "bytes of the next owner were sent");
        let ack = Ack { item: head.item, status: ItemStatus::Written };
        stream.write_all(&StreamHead::Ack(ack).encode()).await.unwrap();
        items += 1;
        if items == 2 {
            until("the second is done", || !matches!(node.transport.live(), (1.., _))).await;
        }
    }
    assert_eq!(items, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_link_carries_on() {
    let pair = Pair::new(Path::Plain, limits()).await;
    let (second, there) = link(&pair.a.endpoint, &pair.b.endpoint).await;
    assert_eq!(pair.a.transport.attach(&second), Ok(pair.a.peer));
    assert_eq!(pair.b.transport.attach(&there), Ok(pair.b.peer));
    pair.a.link.close();
    pair.b.link.closed().await;
    let (from, to) = (storage(&layout(), 64), storage(&layout(), 64));
    fill(&*from, 0..64, 1);
    let (source, target) = (pair.a.register(&from), pair.b.register(&to));
    let _granted = pair.b.grant(1, target, &[run(0, 64)]).unwrap();
    let (transfer, _) = pair.a.submit(1, source, &[run(0, 64)], &[run(0, 64)]).unwrap();
    assert!(matches!(end(&pair.a.transport, transfer).await, TransferState::Done));
    (0..64).for_each(|frame| assert_eq!(bytes(&*to, frame), pattern(&*from, 1, frame)));
    second.close();
    let (transfer, held) = match pair.a.submit(1, source, &[run(0, 64)], &[run(0, 64)]) {
        Ok(submitted) => submitted,
        Err(error) => return assert!(matches!(error, TransportError::PeerGone { .. })),
    };
    assert!(matches!(failure(&pair.a.transport, transfer).await, TransportError::PeerGone { .. }));
    assert!(!held.is_held());
}

/// Transfers and grants are given up and links cut at random. Frames that are not granted never
/// change, every hold is dropped, and nothing is left.
#[tokio::test(flavor = "multi_thread")]
async fn a_storm_leaves_nothing() {
    for seed in 0..6 {
        let mut random = fastrand::Rng::with_seed(seed);
        let path = [Path::Plain, Path::Unix, Path::Tls][seed as usize % 3];
        let mut limits = limits();
        limits.item_bytes = 3000;
        let pair = Pair::new(path, limits).await;
        let (from, to) = (storage(&layout(), 64), storage(&layouts(false)[1], 64));
        let (source, target) = (pair.a.register(&from), pair.b.register(&to));
        fill(&*from, 0..64, 1);
        let mut links = Vec::new();
        let mut cut = false;
        for tag in 0..60 {
            if cut {
                // The link is gone on one side at least; the peers stay the same.
                let (here, there) = link(&pair.a.endpoint, &pair.b.endpoint).await;
                assert_eq!(pair.a.transport.attach(&here), Ok(pair.a.peer));
                assert_eq!(pair.b.transport.attach(&there), Ok(pair.b.peer));
                links.push((here, there));
                cut = false;
            }
            fill(&*to, 0..64, 2);
            let frames = [run(random.u32(0..8), 8 + random.u32(0..8)), run(30 + random.u32(0..4), 20)];
            let count = frames[0].len + frames[1].len;
            let granted = pair.b.grant(tag, target, &frames).unwrap();
            let submitted = pair.a.submit(tag, source, &[run(5, count)], &frames);
            if random.u8(..) < 100 {
                tokio::time::sleep(Duration::from_micros(random.u64(..400))).await;
            }
            let action = random.u8(..20);
            let (transfer, sent) = submitted.unwrap();
            if action < 5 {
                pair.a.transport.cancel(transfer);
            } else if action == 19 {
                cut = true;
                links.last().map_or(&pair.b.link, |(_, there)| there).close();
            }
            let revoked_early = action >= 14;
            if revoked_early {
                revoke(&pair.b, tag).await;
                fill(&*to, 0..64, 3);
            }
            let state = end(&pair.a.transport, transfer).await;
            until("the source has its frames", || !sent.is_held()).await;
            if !revoked_early {
                revoke(&pair.b, tag).await;
            }
            assert!(!granted.is_held());
            let mut source_frame = 5;
            for frame in 0..64 {
                let seed = if revoked_early { 3 } else { 2 };
                let is_granted = frames.iter().any(|run| (run.start.0..run.end()).contains(&frame));
                let expected = match (is_granted, &state) {
                    (true, TransferState::Done) if !revoked_early => pattern(&*from, 1, source_frame),
                    (true, _) if !revoked_early => bytes(&*to, frame),
                    _ => pattern(&*to, seed, frame),
                };
                source_frame += u32::from(is_granted);
                assert_eq!(bytes(&*to, frame), expected, "seed {seed}, tag {tag}, frame {frame}");
            }
        }
        until("all is over", || (pair.a.transport.live(), pair.b.transport.live()) == ((0, 0), (0, 0))).await;
    }
}

/// A runtime that has ended drops the tasks of a link where they are spawned: they end the link.
#[tokio::test(flavor = "multi_thread")]
async fn a_link_is_attached_when_the_runtime_has_ended() {
    let endpoint = listen(identity("b"), loopback(), limits()).await;
    let (_raw, link) = Raw::link(&endpoint, 2).await;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let transport = {
        let _entered = runtime.enter();
        TcpTransport::new(&endpoint)
    };
    runtime.shutdown_background();
    let (attached, is_attached) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let peer = transport.attach(&link);
        attached.send((peer.is_ok(), transport.live())).unwrap();
    });
    let outcome = is_attached.recv_timeout(Duration::from_secs(30));
    assert_eq!(outcome, Ok((true, (0, 0))), "it waits for itself");
}

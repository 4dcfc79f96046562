//! Frames arrive as they were, and nowhere else.

use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use kvpool::storage::Storage;
use kvpool::transport::{
    PeerId, RegionId, SourceState, Tag, TransferId, TransferState, Transport, TransportError,
};
use kvpool::{DeviceId, KvLayout, Run, StorageError};

use crate::hooked::{Access, Hooked};
use crate::support::*;

/// Where a thread waits while it is shut.
#[derive(Debug, Default)]
struct Gate {
    /// Whether it is shut, and how many threads wait.
    state: Mutex<(bool, usize)>,
    opened: Condvar,
}

impl Gate {
    fn shut(&self) {
        self.state.lock().unwrap().0 = true;
    }

    fn open(&self) {
        self.state.lock().unwrap().0 = false;
        self.opened.notify_all();
    }

    fn waiting(&self) -> usize {
        self.state.lock().unwrap().1
    }

    fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        let mut state = self.opened.wait_while(state, |(shut, _)| *shut).unwrap();
        state.1 -= 1;
    }
}

/// A storage whose memory the transport does not reach, as that of a device. Unpacking waits for
/// the gate.
fn remote(layout: &KvLayout, frames: usize, fails: bool) -> (Arc<dyn Storage>, Arc<Gate>) {
    let gate = Arc::new(Gate::default());
    let of_hook = gate.clone();
    let hook = move |access| match (fails, access) {
        (true, _) => Err(StorageError::Unsupported { device: DeviceId::Host, what: "planes" }),
        (false, Access::Pack) => Ok(()),
        (false, Access::Unpack) => {
            of_hook.pass();
            Ok(())
        }
    };
    (Arc::new(Hooked::new(layout, frames, DeviceId::Cuda(0), hook)), gate)
}

/// Sends scattered frames, and checks every frame of the target.
async fn sends(pair: &Pair, tag: u64, from: &Arc<dyn Storage>, to: &Arc<dyn Storage>) {
    let (source, target) = (pair.a.register(from), pair.b.register(to));
    fill(&**from, 0..64, tag);
    fill(&**to, 0..64, 1 << 20 | tag);
    let local = [run(3, 5), run(20, 1), run(40, 10), run(9, 0)];
    let remote = [run(60, 4), run(0, 2), run(30, 10)];
    let granted = pair.b.grant(tag, target, &[run(58, 6), run(0, 1), run(1, 1), run(30, 10)]).unwrap();
    let (transfer, sent) = pair.a.submit(tag, source, &local, &remote).unwrap();
    assert!(matches!(end(&pair.a.transport, transfer).await, TransferState::Done));
    assert!(!sent.is_held() && granted.is_held());
    assert!(matches!(pair.b.transport.revoke(Tag(tag), SourceState::Unknown), TransferState::Done));
    assert!(!granted.is_held());
    let mut expected: Vec<_> = (0..64).map(|frame| pattern(&**to, 1 << 20 | tag, frame)).collect();
    let frames = |runs: &[Run]| runs.iter().flat_map(|run| run.frames()).collect::<Vec<_>>();
    for (from_frame, to_frame) in frames(&local).into_iter().zip(frames(&remote)) {
        expected[to_frame.index()] = pattern(&**from, tag, from_frame.0);
    }
    for (frame, expected) in expected.iter().enumerate() {
        assert_eq!(&bytes(&**to, frame as u32), expected, "frame {frame}");
    }
}

/// All pairs of memory layouts of one packed form, and memory out of reach, over every path.
#[tokio::test(flavor = "multi_thread")]
async fn frames_arrive_between_all_layouts_over_all_paths() {
    for path in [Path::Plain, Path::Unix, Path::Tls] {
        let mut limits = limits();
        limits.item_bytes = 1500;
        let pair = Pair::new(path, limits).await;
        let mut tag = 0;
        for scales in [false, true] {
            let layouts = layouts(scales);
            let all = |frames| -> Vec<Arc<dyn Storage>> {
                let mut all: Vec<_> = layouts.iter().map(|layout| storage(layout, frames)).collect();
                all.push(remote(&layouts[0], frames, false).0);
                all
            };
            for from in &all(64) {
                for to in &all(64) {
                    tag += 1;
                    sends(&pair, tag, from, to).await;
                }
            }
        }
        assert_eq!((pair.a.transport.live(), pair.b.transport.live()), ((0, 0), (0, 0)));
    }
}

/// Large items, several at a time, in both directions at once.
#[tokio::test(flavor = "multi_thread")]
async fn both_directions_carry_many_transfers_at_once() {
    for path in [Path::Plain, Path::Unix, Path::Tls] {
        let layout =
            KvLayout::builder().layers(4).kv_heads(8).head_dim(128).block_tokens(16).build().unwrap();
        let pair = Pair::new(path, limits()).await;
        let storages = [storage(&layout, 64), storage(&layout, 64)];
        let nodes = [&pair.a, &pair.b];
        let regions = [0, 1].map(|at| nodes[at].register(&storages[at]));
        for storage in &storages {
            fill(&**storage, 0..32, 1);
        }
        let mut transfers = Vec::new();
        for tag in 0..8 {
            let frames = [run(tag as u32 * 4, 4)];
            let there = [run(32 + tag as u32 * 4, 4)];
            for (from, to) in [(0, 1), (1, 0)] {
                let granted = nodes[to].grant(tag, regions[to], &there).unwrap();
                let (transfer, _) = nodes[from].submit(tag, regions[from], &frames, &there).unwrap();
                transfers.push((from, transfer, granted));
            }
        }
        for (from, transfer, granted) in &transfers {
            let state = end(&nodes[*from].transport, *transfer).await;
            assert!(matches!(state, TransferState::Done), "{state:?}");
            assert!(granted.is_held());
        }
        for (node, storage) in nodes.into_iter().zip(&storages) {
            (0..8).for_each(|tag| {
                assert!(matches!(node.transport.revoke(Tag(tag), SourceState::Unknown), TransferState::Done))
            });
            for frame in 0..32 {
                assert_eq!(bytes(&**storage, 32 + frame), pattern(&**storage, 1, frame), "frame {frame}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_name_what_is_wrong_and_drop_the_hold() {
    let pair = Pair::new(Path::Plain, limits()).await;
    let (from, to) = (storage(&layout(), 16), storage(&layout(), 16));
    let (source, target) = (pair.a.register(&from), pair.b.register(&to));
    let submit = |local: &[Run], remote: &[Run]| pair.a.submit(1, source, local, remote).map(drop);
    let differ = |local, remote| Err(TransportError::FramesDiffer { local, remote });
    assert_eq!(submit(&[run(0, 2)], &[run(0, 3)]), differ(2, 3));
    assert_eq!(submit(&[], &[]), differ(0, 0));
    let outside = |start, end, of| Err(TransportError::OutOfRange { start, end, of });
    assert_eq!(submit(&[run(15, 2)], &[run(0, 2)]), outside(15, 17, "the storage"));
    assert_eq!(
        submit(&[run(u32::MAX, 2)], &[run(0, 2)]),
        outside(u32::MAX.into(), (1 << 32) + 1, "the storage")
    );
    assert_eq!(
        submit(&[run(0, 2)], &[run(u32::MAX, 2)]),
        outside(u32::MAX.into(), (1 << 32) + 1, "the grant")
    );
    let unknown = |what, number| Err(TransportError::Unknown { what, number });
    assert_eq!(pair.a.submit(1, RegionId(9), &[run(0, 1)], &[run(0, 1)]).map(drop), unknown("region", 9));
    assert_eq!(pair.b.grant(1, RegionId(9), &[run(0, 1)]).map(drop), unknown("region", 9));
    assert_eq!(pair.b.grant(1, target, &[run(16, 1)]).map(drop), outside(16, 17, "the storage"));
    let granted = pair.b.grant(1, target, &[run(0, 4)]).unwrap();
    let twice = pair.b.grant(1, target, &[run(4, 4)]).map(drop);
    assert!(matches!(twice, Err(TransportError::Unsupported { .. })), "{twice:?}");
    assert!(granted.is_held());
    let poll = pair.a.transport.poll(TransferId(99), None);
    assert!(matches!(poll, TransferState::Failed(TransportError::Unknown { number: 99, .. })));
    let revoke = pair.b.transport.revoke(Tag(99), SourceState::Unknown);
    assert!(matches!(revoke, TransferState::Failed(TransportError::Unknown { number: 99, .. })));
    assert_eq!((pair.a.transport.live(), pair.b.transport.live()), ((0, 0), (0, 1)));
}

/// The receiver refuses, answers, and the stream stays usable.
#[tokio::test(flavor = "multi_thread")]
async fn the_receiver_checks_every_item_against_the_grant() {
    let pair = Pair::new(Path::Plain, limits()).await;
    let (from, to) = (storage(&layout(), 32), storage(&layout(), 32));
    let (source, target) = (pair.a.register(&from), pair.b.register(&to));
    fill(&*to, 0..32, 9);
    let _granted = pair.b.grant(1, target, &[run(4, 4), run(10, 2)]).unwrap();
    for remote in [run(3, 1), run(8, 1), run(7, 2), run(9, 3), run(4, 5), run(31, 1), run(200, 1)] {
        let (transfer, sent) = pair.a.submit(1, source, &[run(0, remote.len)], &[remote]).unwrap();
        let (start, end) = (remote.start.0.into(), remote.end().into());
        let expected = TransportError::OutOfRange { start, end, of: "the peer's grant" };
        assert_eq!(failure(&pair.a.transport, transfer).await, expected);
        assert!(!sent.is_held());
    }
    let (transfer, _) = pair.a.submit(2, source, &[run(0, 1)], &[run(4, 1)]).unwrap();
    let expected = TransportError::Unknown { what: "the peer's tag", number: 2 };
    assert_eq!(failure(&pair.a.transport, transfer).await, expected);
    // Frames of another size.
    let wide = KvLayout::builder().layers(2).kv_heads(3).head_dim(8).block_tokens(4).build().unwrap();
    let wide = pair.a.register(&storage(&wide, 4));
    let (transfer, _) = pair.a.submit(1, wide, &[run(0, 1)], &[run(4, 1)]).unwrap();
    let error = failure(&pair.a.transport, transfer).await;
    assert!(matches!(error, TransportError::Unsupported { .. }), "{error:?}");
    for frame in 0..32 {
        assert_eq!(bytes(&*to, frame), pattern(&*to, 9, frame), "frame {frame}");
    }
    let (transfer, _) = pair.a.submit(1, source, &[run(0, 4)], &[run(4, 4)]).unwrap();
    assert!(matches!(end(&pair.a.transport, transfer).await, TransferState::Done));
}

/// A grant is for one peer; another peer that knows its tag is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_of_another_peer_is_unknown() {
    let pair = Pair::new(Path::Unix, limits()).await;
    let third = silent(identity("c"), limits()).await;
    let (here, there) = link(&third, &pair.b.endpoint).await;
    let other = pair.b.transport.attach(&there).unwrap();
    assert_ne!(other, pair.b.peer);
    let third = Node::new(third, here);
    let (from, to) = (storage(&layout(), 8), storage(&layout(), 8));
    let (source, target) = (third.register(&from), pair.b.register(&to));
    let _granted = pair.b.grant(1, target, &[run(0, 8)]).unwrap();
    let (transfer, _) = third.submit(1, source, &[run(0, 8)], &[run(0, 8)]).unwrap();
    let expected = TransportError::Unknown { what: "the peer's tag", number: 1 };
    assert_eq!(failure(&third.transport, transfer).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn quotas_hold_for_each_peer() {
    let mut few = limits();
    few.grants_per_peer = 2;
    few.granted_bytes_per_peer = 10 * layout().packed_bytes() as u64;
    few.transfers_per_peer = 1;
    let pair = Pair::new(Path::Plain, few).await;
    let to = storage(&layout(), 64);
    let target = pair.b.register(&to);
    let quota = |grant: Result<Watch, TransportError>| match grant.map(drop) {
        Err(TransportError::Quota { what, .. }) => what,
        grant => panic!("{grant:?}"),
    };
    let _one = pair.b.grant(1, target, &[run(0, 6)]).unwrap();
    assert_eq!(quota(pair.b.grant(2, target, &[run(6, 6)])), "bytes of grants of the peer");
    let _two = pair.b.grant(2, target, &[run(6, 4)]).unwrap();
    assert_eq!(quota(pair.b.grant(3, target, &[run(10, 0)])), "grants of the peer");
    assert!(matches!(pair.b.transport.revoke(Tag(1), SourceState::Unknown), TransferState::Done));
    let _three = pair.b.grant(3, target, &[run(0, 6)]).unwrap();
    // A transfer whose target waits at the gate.
    let (remote, gate) = remote(&layout(), 8, false);
    gate.shut();
    let target = pair.a.register(&remote);
    let _granted = pair.a.grant(7, target, &[run(0, 1)]).unwrap();
    let source = pair.b.register(&to);
    let (first, _) = pair.b.submit(7, source, &[run(0, 1)], &[run(0, 1)]).unwrap();
    let second = pair.b.submit(7, source, &[run(0, 1)], &[run(0, 1)]);
    assert!(matches!(second, Err(TransportError::Quota { what: "transfers to the peer", .. })));
    gate.open();
    assert!(matches!(end(&pair.b.transport, first).await, TransferState::Done));
}

/// A revoked grant stays quarantined, with its frames, until the storage lets go of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_is_quarantined_while_a_copy_into_it_runs() {
    let pair = Pair::new(Path::Plain, limits()).await;
    let from = storage(&layout(), 8);
    let (remote, gate) = remote(&layout(), 8, false);
    let source = pair.a.register(&from);
    let target = pair.b.register(&remote);
    let granted = pair.b.grant(1, target, &[run(0, 4)]).unwrap();
    gate.shut();
    let (transfer, _) = pair.a.submit(1, source, &[run(0, 4)], &[run(0, 4)]).unwrap();
    until("the copy runs", || gate.waiting() == 1).await;
    assert!(matches!(pair.b.transport.revoke(Tag(1), SourceState::Unknown), TransferState::Quarantined(_)));
    assert!(granted.is_held());
    assert_eq!(pair.b.transport.live(), (0, 1));
    assert_eq!(pair.b.transport.drain(Instant::now()), 1);
    // Cutting the peer does not help either.
    pair.b.transport.remove_peer(pair.b.peer);
    assert!(granted.is_held());
    gate.open();
    until("the hold is dropped", || !granted.is_held()).await;
    assert!(matches!(pair.b.transport.revoke(Tag(1), SourceState::Unknown), TransferState::Done));
    assert_eq!(pair.b.transport.live(), (0, 0));
    assert!(matches!(failure(&pair.a.transport, transfer).await, TransportError::PeerGone { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storage_that_fails_fails_the_transfer() {
    for fails in [[true, false], [false, true]] {
        let pair = Pair::new(Path::Plain, limits()).await;
        let [from, to] = fails.map(|fails| remote(&layout(), 8, fails).0);
        let (source, target) = (pair.a.register(&from), pair.b.register(&to));
        let _granted = pair.b.grant(1, target, &[run(0, 4)]).unwrap();
        let (transfer, sent) = pair.a.submit(1, source, &[run(0, 4)], &[run(0, 4)]).unwrap();
        assert!(matches!(failure(&pair.a.transport, transfer).await, TransportError::Storage(_)));
        assert!(!sent.is_held());
        assert_eq!(pair.a.link.cause(), None);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_are_known_by_name_and_incarnation() {
    let pair = Pair::new(Path::Plain, limits()).await;
    let metadata = pair.b.transport.metadata();
    assert_eq!(pair.a.transport.add_peer(&metadata), Ok(pair.a.peer));
    let gone = pair.b.transport.add_peer(&metadata);
    assert!(matches!(gone, Err(TransportError::PeerGone { .. })), "{gone:?}");
    assert!(matches!(pair.a.transport.add_peer(b"x"), Err(TransportError::Metadata(_))));
    assert!(matches!(pair.a.transport.add_peer(&[0; 10_000]), Err(TransportError::Metadata(_))));
    // A second link of the same process is the same peer; of another process, another one.
    let (again, _there) = link(&pair.a.endpoint, &pair.b.endpoint).await;
    assert_eq!(pair.a.transport.attach(&again), Ok(pair.a.peer));
    assert_eq!(pair.a.transport.attach(&again), Ok(pair.a.peer));
    let restarted = listen(identity("b"), loopback(), limits()).await;
    let (other, _there) = link(&pair.a.endpoint, &restarted).await;
    assert_ne!(pair.a.transport.attach(&other), Ok(pair.a.peer));
    pair.a.transport.remove_peer(pair.a.peer);
    assert!(matches!(pair.a.transport.add_peer(&metadata), Err(TransportError::PeerGone { .. })));
    let unknown = TransportError::Unknown { what: "peer", number: 50 };
    let (hold, _) = hold();
    let region = pair.a.register(&storage(&layout(), 4));
    let runs = vec![run(0, 1)];
    let grant = kvpool::transport::Grant { tag: Tag(1), region, runs, peer: PeerId(50), hold };
    // SAFETY: refused.
    assert_eq!(unsafe { pair.a.transport.grant(grant) }, Err(unknown));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drained_transport_ends_what_runs_and_accepts_nothing() {
    let pair = Pair::new(Path::Plain, limits()).await;
    let (from, to) = (storage(&layout(), 64), storage(&layout(), 64));
    let (source, target) = (pair.a.register(&from), pair.b.register(&to));
    let granted = pair.b.grant(1, target, &[run(0, 64)]).unwrap();
    let (transfer, _) = pair.a.submit(1, source, &[run(0, 64)], &[run(0, 64)]).unwrap();
    let Pair { a, b } = pair;
    let (a, live) = tokio::task::spawn_blocking(move || {
        let live = a.transport.drain(Instant::now() + Duration::from_secs(10));
        (a, live)
    })
    .await
    .unwrap();
    assert_eq!(live, 0);
    assert!(matches!(end(&a.transport, transfer).await, TransferState::Done));
    let refused = a.submit(1, source, &[run(0, 1)], &[run(0, 1)]).map(drop);
    assert_eq!(refused, Err(TransportError::Closed));
    assert!(granted.is_held());
    assert_eq!(b.transport.drain(Instant::now()), 0);
    assert!(!granted.is_held());
}

//! Conformance suite of transports: bytes arrive bit for bit, only where they were granted, and a
//! hold is dropped exactly when the transfer is over.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvpool::storage::{Arrangement, Dtype, HostStorage, KvLayout, KvPlanes, Scales, Storage};
use kvpool::transport::{
    Grant, Hold, PeerId, RegionId, SourceState, Submission, Tag, TransferId, TransferState, Transport,
    TransportError,
};
use kvpool::{FrameId, Run};

use crate::rng::Rng;

/// Creates an end of the transport. Ends are connected by their metadata.
pub type Make<'a> = &'a dyn Fn() -> Arc<dyn Transport>;

/// Longer than a transfer of this suite takes.
const LIMIT: Duration = Duration::from_secs(30);
const FRAMES: usize = 24;

/// Runs the whole suite.
///
/// # Panics
///
/// If the transport does not conform.
pub fn all(make: Make<'_>) {
    bytes_arrive(make);
    refusals(make);
    holds_end_with_the_transfer(make);
    cancelled(make);
    many_threads(make);
    removed_peers(make);
    drained(make);
}

/// A source and a target, connected, each with a registered storage.
struct Rig {
    source: Arc<dyn Transport>,
    target: Arc<dyn Transport>,
    from: Arc<dyn Storage>,
    to: Arc<dyn Storage>,
    region: RegionId,
    into: RegionId,
    /// The target, as the source knows it.
    peer: PeerId,
    /// The source, as the target knows it.
    writer: PeerId,
}

impl Rig {
    fn new(make: Make<'_>, from: KvLayout, to: KvLayout) -> Self {
        let (source, target) = (make(), make());
        let [from, to] = [from, to].map(|layout| -> Arc<dyn Storage> {
            Arc::new(HostStorage::new(layout, FRAMES, FRAMES).expect("memory for a few frames"))
        });
        let region = source.register(&from).expect("host memory can be registered");
        let into = target.register(&to).expect("host memory can be registered");
        let peer = source.add_peer(&target.metadata()).expect("the peer lives");
        let writer = target.add_peer(&source.metadata()).expect("the peer lives");
        Self { source, target, from, to, region, into, peer, writer }
    }

    fn plain(make: Make<'_>) -> Self {
        Self::new(make, layout(KvPlanes::Separate, Arrangement::LayerFirst), large())
    }

    fn grant(&self, tag: u64, runs: &[Run]) -> Result<Watched, TransportError> {
        let (watched, hold) = Watched::new();
        let grant = Grant { tag: Tag(tag), region: self.into, runs: runs.to_vec(), peer: self.writer, hold };
        // SAFETY: the suite accesses the frames only after the hold is gone.
        unsafe { self.target.grant(grant) }.map(|()| watched)
    }

    fn submit(
        &self,
        tag: u64,
        local: &[Run],
        remote: &[Run],
    ) -> Result<(TransferId, Watched), TransportError> {
        self.submit_as(self.submission(tag, local, remote))
    }

    fn submission(&self, tag: u64, local: &[Run], remote: &[Run]) -> Submission {
        Submission {
            region: self.region,
            peer: self.peer,
            remote_region: self.into,
            local: local.to_vec(),
            remote: remote.to_vec(),
            tag: Tag(tag),
            hold: Arc::new(()),
        }
    }

    fn submit_as(&self, submission: Submission) -> Result<(TransferId, Watched), TransportError> {
        let (watched, hold) = Watched::new();
        // SAFETY: the suite does not write the source's frames.
        let submitted = unsafe { self.source.submit(Submission { hold, ..submission }) };
        match submitted {
            Ok(transfer) => Ok((transfer, watched)),
            Err(error) => {
                watched.is_gone("the submission was refused");
                Err(error)
            }
        }
    }

    /// Transfers, and waits for the end.
    fn transfer(&self, tag: u64, local: &[Run], remote: &[Run]) -> Result<(), TransportError> {
        let (transfer, hold) = self.submit(tag, local, remote)?;
        let end = wait(&*self.source, transfer);
        hold.is_gone("the transfer is over");
        end
    }

    fn revoke(&self, tag: u64, hold: &Watched) {
        let began = Instant::now();
        match self.target.revoke(Tag(tag), SourceState::Over) {
            TransferState::Done => hold.is_gone("the grant was revoked"),
            TransferState::Quarantined(_) => {
                while hold.0.strong_count() > 0 {
                    assert!(began.elapsed() < LIMIT, "a quarantined grant never ends");
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            state => panic!("a grant was revoked: {state:?}"),
        }
    }
}

/// Tells whether a hold was dropped.
struct Watched(Weak<()>);

impl Watched {
    fn new() -> (Self, Hold) {
        let hold = Arc::new(());
        (Self(Arc::downgrade(&hold)), hold)
    }

    fn is_gone(&self, when: &str) {
        assert_eq!(self.0.strong_count(), 0, "a hold is kept although {when}");
    }

    fn is_there(&self, when: &str) {
        assert_eq!(self.0.strong_count(), 1, "a hold is gone although {when}");
    }
}

/// Polls a transfer until it is over.
fn wait(transport: &dyn Transport, transfer: TransferId) -> Result<(), TransportError> {
    let began = Instant::now();
    loop {
        match transport.poll(transfer, None) {
            TransferState::Done => return Ok(()),
            TransferState::Failed(error) => return Err(error),
            state => assert!(began.elapsed() < LIMIT, "a transfer does not end: {state:?}"),
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn layout(parts: KvPlanes, arrangement: Arrangement) -> KvLayout {
    builder(parts, arrangement).build().expect("a valid layout")
}

fn builder(parts: KvPlanes, arrangement: Arrangement) -> kvpool::storage::KvLayoutBuilder {
    let builder = KvLayout::builder().layers(3).kv_heads(2).head_dim(64).block_tokens(16);
    builder.parts(parts).arrangement(arrangement)
}

fn large() -> KvLayout {
    layout(KvPlanes::Joined, Arrangement::BlockFirst)
}

const fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

fn fill(storage: &dyn Storage, rng: &mut Rng) -> Vec<u8> {
    let bytes = rng.bytes(FRAMES * storage.layout().packed_bytes());
    // SAFETY: no transfer is under way.
    unsafe { storage.unpack(&[run(0, FRAMES as u32)], &bytes) }.expect("all frames can be unpacked");
    bytes
}

fn packed(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; FRAMES * storage.layout().packed_bytes()];
    // SAFETY: no transfer is under way.
    unsafe { storage.pack(&[run(0, FRAMES as u32)], &mut bytes) }.expect("all frames can be packed");
    bytes
}

fn frames(runs: &[Run]) -> Vec<usize> {
    runs.iter().flat_map(|run| run.frames()).map(FrameId::index).collect()
}

/// Returns `count` distinct frames in random runs.
fn some_runs(rng: &mut Rng, count: usize) -> Vec<Run> {
    let mut all: Vec<u32> = (0..FRAMES as u32).collect();
    for place in 0..all.len() {
        let other = place + rng.below(all.len() - place);
        all.swap(place, other);
    }
    let mut chosen = all[..count].to_vec();
    // Longer runs, half of the time.
    if rng.below(2) == 0 {
        chosen.sort_unstable();
    }
    let mut runs = Vec::<Run>::new();
    for frame in chosen {
        match runs.last_mut() {
            Some(last) if last.end() == frame => last.len += 1,
            _ => runs.push(run(frame, 1)),
        }
    }
    runs
}

/// Runs that are cut differently at both ends arrive, between all arrangements; no other frame
/// changes.
fn bytes_arrive(make: Make<'_>) {
    let mut rng = Rng(1);
    let scaled = |parts, arrangement| {
        let builder = builder(parts, arrangement).dtype(Dtype::Fp8E4M3).scales(Scales::PerTokenHead);
        builder.build().expect("a valid layout")
    };
    let (separate, joined) = (KvPlanes::Separate, KvPlanes::Joined);
    let (layers, blocks) = (Arrangement::LayerFirst, Arrangement::BlockFirst);
    for (from, to) in [
        (layout(separate, layers), layout(separate, layers)),
        (layout(separate, layers), layout(joined, blocks)),
        (layout(joined, blocks), layout(joined, blocks)),
        (scaled(joined, blocks), scaled(separate, layers)),
    ] {
        let rig = Rig::new(make, from, to);
        for tag in 1..=6 {
            let count = 1 + rng.below(FRAMES);
            let (local, remote) = (some_runs(&mut rng, count), some_runs(&mut rng, count));
            let (sent, mut want) = (fill(&*rig.from, &mut rng), fill(&*rig.to, &mut rng));
            let bytes = rig.from.layout().packed_bytes();
            for (src, dst) in frames(&local).into_iter().zip(frames(&remote)) {
                want[dst * bytes..][..bytes].copy_from_slice(&sent[src * bytes..][..bytes]);
            }
            let hold = rig.grant(tag, &remote).expect("the frames exist");
            rig.transfer(tag, &local, &remote).expect("both ends live");
            rig.revoke(tag, &hold);
            assert!(packed(&*rig.to) == want, "{local:?} to {remote:?}");
            assert!(packed(&*rig.from) == sent, "the source was written");
        }
    }
}

/// Submissions and grants that are refused, at once or in the end, move no byte.
fn refusals(make: Make<'_>) {
    let rig = Rig::plain(make);
    let mut rng = Rng(2);
    fill(&*rig.from, &mut rng);
    let before = fill(&*rig.to, &mut rng);
    let hold = rig.grant(1, &[run(2, 3), run(8, 2)]).expect("the frames exist");
    let out = run(FRAMES as u32 - 1, 2);
    let refused = |what: &str, outcome: Result<(), TransportError>| {
        let error = outcome.expect_err(what);
        assert!(!error.to_string().is_empty());
        hold.is_there(what);
        error
    };
    let differ = refused("other numbers of frames", rig.transfer(1, &[run(0, 2)], &[run(2, 1)]));
    assert_eq!(differ, TransportError::FramesDiffer { local: 2, remote: 1 });
    let empty = refused("no frames", rig.transfer(1, &[], &[]));
    assert_eq!(empty, TransportError::FramesDiffer { local: 0, remote: 0 });
    let outside = refused("local frames outside of the storage", rig.transfer(1, &[out], &[run(2, 2)]));
    assert!(matches!(outside, TransportError::OutOfRange { .. }), "{outside}");
    for remote in [run(1, 1), run(4, 2), run(5, 1), run(10, 1), out, run(u32::MAX, 1)] {
        refused("frames outside of the grant", rig.transfer(1, &[run(0, remote.len)], &[remote]));
    }
    refused("a tag that was not granted", rig.transfer(2, &[run(0, 1)], &[run(2, 1)]));
    let with = |change: fn(&mut Submission)| {
        let mut submission = rig.submission(1, &[run(0, 1)], &[run(2, 1)]);
        change(&mut submission);
        rig.submit_as(submission).map(drop)
    };
    let unknown = refused("an unknown region", with(|submission| submission.region = RegionId(99)));
    assert!(matches!(unknown, TransportError::Unknown { .. }), "{unknown}");
    let unknown = refused("an unknown peer", with(|submission| submission.peer = PeerId(99)));
    assert!(matches!(unknown, TransportError::Unknown { .. }), "{unknown}");

    // Another end must not write into the grant.
    let stranger = make();
    let region = stranger.register(&rig.from).expect("host memory can be registered");
    let peer = stranger.add_peer(&rig.target.metadata()).expect("the peer lives");
    rig.target.add_peer(&stranger.metadata()).expect("the peer lives");
    let strange = Rig { source: stranger, region, peer, ..Rig::plain(make) };
    refused("the grant of another peer", strange.transfer(1, &[run(0, 1)], &[run(2, 1)]));

    assert!(rig.grant(3, &[out]).is_err(), "frames outside of the storage were granted");
    assert!(rig.grant(1, &[run(12, 1)]).is_err(), "a tag was granted twice");
    assert!(matches!(rig.target.revoke(Tag(9), SourceState::Over), TransferState::Failed(_)));
    assert!(matches!(rig.source.poll(TransferId(u64::MAX), None), TransferState::Failed(_)));
    assert!(rig.source.add_peer(b"no metadata").is_err());
    assert_eq!(rig.source.add_peer(&rig.target.metadata()), Ok(rig.peer), "the same peer, the same number");
    rig.revoke(1, &hold);
    let late = rig.transfer(1, &[run(0, 1)], &[run(2, 1)]);
    assert!(late.is_err(), "a revoked grant was written");
    assert!(packed(&*rig.to) == before, "a refused transfer moved bytes");
}

/// The source's hold ends with the transfer, the target's with the grant.
fn holds_end_with_the_transfer(make: Make<'_>) {
    let rig = Rig::plain(make);
    let granted = rig.grant(7, &[run(0, 8)]).expect("the frames exist");
    for part in 0..4 {
        let (transfer, hold) = rig.submit(7, &[run(part, 2)], &[run(2 * part, 2)]).expect("both live");
        wait(&*rig.source, transfer).expect("both ends live");
        hold.is_gone("the transfer is done");
        granted.is_there("the grant was not revoked");
        let again = rig.source.poll(transfer, None);
        assert!(matches!(again, TransferState::Failed(TransportError::Unknown { .. })), "{again:?}");
    }
    rig.revoke(7, &granted);
}

/// A cancelled transfer is over at once, or quarantined with its hold until it is.
fn cancelled(make: Make<'_>) {
    let rig = Rig::plain(make);
    for tag in 1..=20 {
        let granted = rig.grant(tag, &[run(0, FRAMES as u32)]).expect("the frames exist");
        let all = [run(0, FRAMES as u32)];
        let (transfer, hold) = rig.submit(tag, &all, &all).expect("both ends live");
        match rig.source.cancel(transfer) {
            TransferState::Done | TransferState::Failed(_) => hold.is_gone("the transfer was cancelled"),
            TransferState::Quarantined(_) | TransferState::InFlight => {
                let _ = wait(&*rig.source, transfer);
                hold.is_gone("the transfer is over");
            }
            state => panic!("a transfer was cancelled: {state:?}"),
        }
        rig.revoke(tag, &granted);
        // No late byte: the frames belong to their next owner.
        let mine = fill(&*rig.to, &mut Rng(tag));
        std::thread::sleep(Duration::from_millis(1));
        assert!(packed(&*rig.to) == mine, "bytes arrived after the end of the grant");
    }
}

/// Threads that submit at once do not disturb each other.
fn many_threads(make: Make<'_>) {
    let rig = Rig::plain(make);
    let sent = fill(&*rig.from, &mut Rng(5));
    crate::threads::scope(|scope| {
        for lane in 0..4u32 {
            let rig = &rig;
            scope.spawn(move || {
                for round in 0..8u64 {
                    let (tag, own) = (100 + u64::from(lane) * 8 + round, run(lane * 6, 6));
                    let granted = rig.grant(tag, &[own]).expect("the frames exist");
                    rig.transfer(tag, &[own], &[own]).expect("both ends live");
                    rig.revoke(tag, &granted);
                }
            });
        }
    });
    assert!(packed(&*rig.to) == sent);
}

/// A peer that was removed is unknown; what it may have written is over.
fn removed_peers(make: Make<'_>) {
    let rig = Rig::plain(make);
    let granted = rig.grant(1, &[run(0, 2)]).expect("the frames exist");
    rig.target.remove_peer(rig.writer);
    assert!(rig.transfer(1, &[run(0, 2)], &[run(0, 2)]).is_err(), "a removed peer has written");
    rig.revoke(1, &granted);
    assert!(rig.grant(2, &[run(0, 2)]).is_err(), "granted to a removed peer");
    rig.source.remove_peer(rig.peer);
    assert!(rig.submit(2, &[run(0, 2)], &[run(0, 2)]).is_err(), "submitted to a removed peer");
}

/// After a drain nothing is under way, and nothing begins.
fn drained(make: Make<'_>) {
    let rig = Rig::plain(make);
    let granted = rig.grant(1, &[run(0, 4)]).expect("the frames exist");
    let (transfer, hold) = rig.submit(1, &[run(0, 4)], &[run(0, 4)]).expect("both ends live");
    assert_eq!(rig.source.drain(Instant::now() + LIMIT), 0);
    hold.is_gone("the source was drained");
    assert!(!matches!(rig.source.poll(transfer, None), TransferState::InFlight));
    assert_eq!(rig.submit(1, &[run(0, 4)], &[run(0, 4)]).map(drop), Err(TransportError::Closed));
    assert_eq!(rig.target.drain(Instant::now() + LIMIT), 0);
    granted.is_gone("the target was drained");
    assert!(rig.grant(2, &[run(0, 1)]).is_err(), "granted after a drain");
}

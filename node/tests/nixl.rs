//! Transfers by NIXL between two processes, over whatever UCX finds between them.
//!
//! Needs the Python package `nixl-cu12`, and `KVPOOL_NIXL` naming the folder of packages in which
//! it is. Without, the tests say that they were skipped.
#![cfg(all(feature = "nixl", target_os = "linux"))]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvpool::storage::{HostStorage, Storage};
use kvpool::transport::{
    Grant, PeerId, RegionId, SourceState, Submission, Tag, TransferId, TransferState, Transport,
    TransportError,
};
use kvpool::{Dtype, FrameId, KvLayout, Run};
use kvpool_node::transport::nixl::{LOCATION, NixlSettings, NixlTransport};

const FRAMES: usize = 512;

/// Says that this process is the target of another one's test.
const ROLE: &str = "KVPOOL_NIXL_TEST_CHILD";

const LONG: Duration = Duration::from_secs(60);

fn is_there() -> bool {
    let is_there = std::env::var_os(LOCATION).is_some();
    if !is_there {
        eprintln!("SKIPPED: {LOCATION} does not name the folder in which the Python package nixl-cu12 is");
    }
    is_there
}

fn storage() -> Arc<dyn Storage> {
    let layout = KvLayout::builder().layers(4).kv_heads(8).head_dim(64).block_tokens(16).dtype(Dtype::F16);
    Arc::new(HostStorage::new(layout.build().unwrap(), FRAMES, FRAMES).unwrap())
}

fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

fn frames(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len as usize).sum()
}

fn pattern(storage: &dyn Storage, frames: usize, seed: u8) -> Vec<u8> {
    let len = frames * storage.layout().packed_bytes();
    (0..len).map(|place| (place as u64).wrapping_mul(2_654_435_761).to_le_bytes()[2] ^ seed).collect()
}

fn fill(storage: &dyn Storage, runs: &[Run], seed: u8) {
    let bytes = pattern(storage, frames(runs), seed);
    // SAFETY: no other thread uses these frames.
    unsafe { storage.unpack(runs, &bytes) }.unwrap();
}

fn read(storage: &dyn Storage, runs: &[Run]) -> Vec<u8> {
    let mut bytes = vec![0; frames(runs) * storage.layout().packed_bytes()];
    // SAFETY: no other thread writes these frames.
    unsafe { storage.pack(runs, &mut bytes) }.unwrap();
    bytes
}

/// A process with a storage of its own, which answers each line that it reads with a line.
struct Target {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    metadata: Vec<u8>,
}

impl Target {
    fn start() -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, "target")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut target = Self { child, to, from, metadata: Vec::new() };
        target.metadata = from_hex(&target.answer());
        target
    }

    /// Returns the next answer. The test harness of the child prints lines of its own.
    fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.from.read_line(&mut line).unwrap() > 0, "the target ended");
            if let Some((_, answer)) = line.split_once("answer ") {
                return answer.trim().to_owned();
            }
        }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.to, "{line}").unwrap();
        self.answer()
    }

    fn signal(&self, signal: i32) {
        // SAFETY: a signal to our own child.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|place| u8::from_str_radix(&text[2 * place..][..2], 16).unwrap()).collect()
}

/// Not a test by itself: the target's process.
#[test]
fn child() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let transport = NixlTransport::new(&NixlSettings::default()).unwrap();
    let storage = storage();
    let region = transport.register(&storage).unwrap();
    println!("answer {}", to_hex(&transport.metadata()));
    let (mut peer, mut hold) = (None, Weak::<()>::new());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let answer = match line.split(' ').collect::<Vec<_>>()[..] {
            ["peer", hex] => {
                peer = Some(transport.add_peer(&from_hex(hex)).unwrap());
                "known".to_owned()
            }
            ["grant", tag, start, len] => {
                let kept = Arc::new(());
                hold = Arc::downgrade(&kept);
                let runs = vec![run(start.parse().unwrap(), len.parse().unwrap())];
                let (tag, peer) = (Tag(tag.parse().unwrap()), peer.unwrap());
                // SAFETY: this process uses the frames only after the revoke.
                format!("{:?}", unsafe { transport.grant(Grant { tag, region, runs, peer, hold: kept }) })
            }
            ["revoke", tag, source] => {
                let source = if source == "over" { SourceState::Over } else { SourceState::Unknown };
                let state = transport.revoke(Tag(tag.parse().unwrap()), source);
                format!("{state:?} held={}", hold.strong_count() > 0)
            }
            ["check", start, len, seed] => {
                let runs = [run(start.parse().unwrap(), len.parse().unwrap())];
                let wanted = pattern(&*storage, frames(&runs), seed.parse().unwrap());
                (read(&*storage, &runs) == wanted).to_string()
            }
            _ => panic!("unknown line {line}"),
        };
        println!("answer {answer}");
    }
}

/// A source, and a target in another process, which know each other.
struct Pair {
    transport: NixlTransport,
    storage: Arc<dyn Storage>,
    region: RegionId,
    peer: PeerId,
    target: Target,
}

impl Pair {
    fn new(patience: Duration) -> Self {
        let mut settings = NixlSettings::default();
        settings.patience = patience;
        let transport = NixlTransport::new(&settings).unwrap();
        let storage = storage();
        let region = transport.register(&storage).unwrap();
        let mut target = Target::start();
        assert_eq!(target.ask(&format!("peer {}", to_hex(&transport.metadata()))), "known");
        let peer = transport.add_peer(&target.metadata).unwrap();
        Self { transport, storage, region, peer, target }
    }

    fn write(&self, local: &[Run], remote: &[Run]) -> Result<(TransferId, Weak<()>), TransportError> {
        let hold = Arc::new(());
        let held = Arc::downgrade(&hold);
        let submission = Submission {
            region: self.region,
            peer: self.peer,
            remote_region: RegionId(0),
            local: local.to_vec(),
            remote: remote.to_vec(),
            tag: Tag(1),
            hold,
        };
        // SAFETY: the frames are not written before the hold is dropped.
        unsafe { self.transport.submit(submission) }.map(|id| (id, held))
    }

    fn wait(&self, id: TransferId) -> TransferState {
        let began = Instant::now();
        loop {
            match self.transport.poll(id, None) {
                TransferState::InFlight if began.elapsed() < LONG => {
                    std::thread::sleep(Duration::from_micros(200));
                }
                state => return state,
            }
        }
    }
}

#[test]
fn runs_arrive_bit_for_bit_in_another_process() {
    if !is_there() {
        return;
    }
    let mut pair = Pair::new(LONG);
    assert_eq!(pair.target.ask("grant 1 100 200"), "Ok(())");
    let local = [run(0, 30), run(50, 100), run(300, 70)];
    fill(&*pair.storage, &local, 7);
    let (id, held) = pair.write(&local, &[run(100, 5), run(105, 195)]).unwrap();
    let state = pair.wait(id);
    assert!(matches!(state, TransferState::Done), "{state:?}");
    assert_eq!(held.strong_count(), 0, "the hold is dropped before the end is reported");
    assert_eq!(pair.target.ask("revoke 1 over"), "Done held=false");
    assert_eq!(pair.target.ask("check 100 200 7"), "true");
    let again = pair.transport.poll(id, None);
    assert!(matches!(again, TransferState::Failed(TransportError::Unknown { what: "transfer", .. })));
    assert_eq!(pair.transport.drain(Instant::now()), 0);
    assert!(matches!(pair.write(&local, &local), Err(TransportError::Closed)));
}

#[test]
fn a_transfer_to_a_stopped_target_keeps_its_hold_until_it_is_over() {
    if !is_there() {
        return;
    }
    let mut pair = Pair::new(Duration::from_millis(300));
    assert_eq!(pair.target.ask("grant 1 0 512"), "Ok(())");
    let all = [run(0, FRAMES as u32)];
    fill(&*pair.storage, &all, 9);
    pair.target.signal(libc::SIGSTOP);
    let (id, held) = pair.write(&all, &all).unwrap();
    match pair.wait(id) {
        // Through shared memory the source copies without the target's help.
        TransferState::Done => eprintln!("the stopped target was written all the same"),
        TransferState::Quarantined(TransportError::Stalled { .. }) => {
            assert_eq!(held.strong_count(), 1, "a quarantined transfer keeps its hold");
            assert!(pair.transport.drain(Instant::now()) > 0);
            pair.target.signal(libc::SIGCONT);
            let began = Instant::now();
            while held.strong_count() > 0 {
                assert!(began.elapsed() < LONG, "never over");
                std::thread::sleep(Duration::from_millis(1));
            }
            // The hold is dropped before the end is reported.
            let mut state = pair.wait(id);
            while matches!(state, TransferState::Quarantined(_)) && began.elapsed() < LONG {
                std::thread::sleep(Duration::from_millis(1));
                state = pair.wait(id);
            }
            assert!(matches!(state, TransferState::Failed(TransportError::Stalled { .. })), "{state:?}");
        }
        other => panic!("{other:?}"),
    }
    pair.target.signal(libc::SIGCONT);
    let revoked = pair.target.ask("revoke 1 unknown");
    assert!(revoked.starts_with("Quarantined") && revoked.ends_with("held=true"), "{revoked}");
    assert_eq!(pair.target.ask("revoke 1 over"), "Done held=false");
}

#[test]
fn a_transfer_to_a_killed_target_ends_or_is_quarantined() {
    if !is_there() {
        return;
    }
    let mut pair = Pair::new(Duration::from_millis(300));
    assert_eq!(pair.target.ask("grant 1 0 512"), "Ok(())");
    let all = [run(0, FRAMES as u32)];
    pair.target.signal(libc::SIGKILL);
    let _ = pair.target.child.wait();
    let Ok((id, held)) = pair.write(&all, &all) else { return };
    match pair.wait(id) {
        TransferState::Failed(_) => assert_eq!(held.strong_count(), 0),
        TransferState::Quarantined(_) => assert_eq!(held.strong_count(), 1),
        other => panic!("{other:?}"),
    }
    // With the agent, everything that was in flight is gone.
    drop(pair.transport);
    assert_eq!(held.strong_count(), 0);
}

#[test]
fn impossible_submissions_are_refused() {
    if !is_there() {
        return;
    }
    let mut pair = Pair::new(LONG);
    let refused = |local: &[Run], remote: &[Run]| pair.write(local, remote).unwrap_err();
    assert!(matches!(
        refused(&[run(0, 2)], &[run(0, 3)]),
        TransportError::FramesDiffer { local: 2, remote: 3 }
    ));
    assert!(matches!(refused(&[], &[]), TransportError::FramesDiffer { .. }));
    assert!(matches!(refused(&[run(511, 2)], &[run(0, 2)]), TransportError::OutOfRange { end: 513, .. }));
    assert!(matches!(refused(&[run(0, 2)], &[run(u32::MAX, 2)]), TransportError::OutOfRange { .. }));
    pair.peer = PeerId(9);
    let unknown = pair.write(&[run(0, 1)], &[run(0, 1)]).unwrap_err();
    assert!(matches!(unknown, TransportError::Unknown { what: "peer", number: 9 }));
    assert!(matches!(pair.transport.add_peer(b"garbage"), Err(TransportError::Metadata(_))));
    let revoked = pair.transport.revoke(Tag(77), SourceState::Over);
    assert!(matches!(revoked, TransferState::Failed(_)));
}

#[test]
fn a_missing_library_is_named() {
    let mut settings = NixlSettings::default();
    settings.location = Some("/nonexistent/libnixl_capi.so".into());
    let Err(error) = NixlTransport::new(&settings) else { panic!("nothing is there") };
    let text = error.to_string();
    assert!(text.contains("/nonexistent/libnixl_capi.so") && text.contains(LOCATION), "{text}");
}

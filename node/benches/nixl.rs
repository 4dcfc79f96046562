//! Rate of transfers by NIXL beside NIXL's own C interface with the same descriptors, between two
//! processes, in turns: over shared memory, and over TCP.
//!
//! Each process has a storage, the transport, and an agent of its own for the baseline, both
//! registered with the same memory. The baseline builds its lists, posts one request with all
//! descriptors and polls until it is done, while its target polls; the transport cuts the same
//! descriptors into requests. Each process is pinned to a core of its own. The target checks every
//! byte after each transfer, outside of the measured time; the bytes of each are different.
//!
//! Needs the Python package `nixl-cu12`, and `KVPOOL_NIXL` naming the folder of packages in which it
//! is. Without it, the bench prints that it was skipped.

#[path = "nixl/raw.rs"]
mod raw;
mod support;
#[path = "nixl/target.rs"]
mod target;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::storage::{HostStorage, Storage};
use kvpool::transport::{PeerId, RegionId, Submission, Tag, TransferId, TransferState, Transport};
use kvpool::{FrameId, KvLayout, Run};
use kvpool_node::transport::nixl::{NixlSettings, NixlTransport, check};

use raw::{Agent, Piece};
use target::Target;

/// What a process does: absent for the one that starts the others.
const ROLE: &str = "KVPOOL_NIXL_BENCH_ROLE";

const FRAMES: u32 = 96;
const ROUNDS: u64 = 9;

/// Frames per run. The target's frames are in another order than the source's.
const RUN_LENGTHS: [u32; 2] = [20, 2];

fn main() {
    match std::env::var(ROLE).as_deref() {
        Ok("target") => return target::serve(),
        Ok(_) => return source(),
        Err(_) => {}
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("nixl: to measure, run `cargo bench -p kvpool-node --features nixl --bench nixl`");
        return;
    }
    if let Err(error) = check(None) {
        println!("SKIPPED: {error}");
        return;
    }
    let bytes = u64::from(FRAMES) * layout().packed_bytes() as u64;
    println!("{} MiB, MiB/s, medians of {ROUNDS} rounds, one core for each process", bytes >> 20);
    println!("{:<16} {:>11} {:>10} {:>10} {:>22}", "", "descriptors", "transport", "plain", "ratio");
    println!("{:<16} {:>11} {:>10} {:>10} {:>22}", "", "", "", "", "(least to most)");
    // UCX accepts shared memory only beside a transport that notices the end of a peer.
    for (name, transports) in [("shared memory", "tcp,sm,self"), ("tcp", "tcp,self")] {
        let program = std::env::current_exe().expect("a path");
        let mut source = std::process::Command::new(program);
        let ended = source.env(ROLE, name).env("UCX_TLS", transports).status().expect("a process");
        assert!(ended.success(), "{name}: {ended}");
    }
}

/// One rank of a model of 8 billion parameters: 64 tensors.
fn layout() -> KvLayout {
    KvLayout::builder().head_dim(128).block_tokens(16).layers(32).kv_heads(8).build().expect("a valid layout")
}

fn storage() -> Arc<dyn Storage> {
    let frames = FRAMES as usize;
    Arc::new(HostStorage::new(layout(), frames, frames).expect("memory"))
}

fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

/// The tensors of a storage: address of the first frame, and bytes from one frame to the next.
fn tensors(storage: &dyn Storage) -> Vec<(usize, usize)> {
    let planes = storage.planes().expect("host memory");
    let tensors = planes.tensors().inspect(|tensor| assert!(tensor.is_contiguous()));
    tensors.map(|tensor| (tensor.data.addr(), tensor.frame_bytes())).collect()
}

fn contents(frame: u32, round: u64, packed: &mut [u8]) {
    let mut random = fastrand::Rng::with_seed(round << 32 | u64::from(frame));
    packed.chunks_mut(8).for_each(|word| word.copy_from_slice(&random.u64(..).to_le_bytes()[..word.len()]));
}

/// Returns runs that cover all frames, each followed in the source by the one that precedes it in
/// the target: no two of them touch on both sides.
fn runs(len: u32) -> (Vec<Run>, Vec<Run>) {
    let local: Vec<Run> =
        (0..FRAMES).step_by(len as usize).map(|start| run(start, len.min(FRAMES - start))).collect();
    let mut end = FRAMES;
    let place = |local: &Run| {
        end -= local.len;
        run(end, local.len)
    };
    let remote = local.iter().map(place).collect();
    (local, remote)
}

/// Both ends of the transfers, as the source has them.
struct Source {
    transport: NixlTransport,
    storage: Arc<dyn Storage>,
    region: RegionId,
    peer: PeerId,
    agent: Agent,
    target: Target,
}

impl Source {
    fn start() -> Self {
        let storage = storage();
        let transport = NixlTransport::new(&NixlSettings::default()).expect("the library is there");
        let region = transport.register(&storage).expect("host memory");
        let agent = Agent::new("plain-source", &tensors(&*storage), FRAMES as usize);
        let mut target = Target::start();
        target.meet(&transport.metadata(), &agent.metadata());
        let peer = transport.add_peer(&target.metadata).expect("the target's metadata");
        agent.load(&target.agent);
        Self { transport, storage, region, peer, agent, target }
    }

    fn fill(&self, round: u64) {
        let mut packed = vec![0; self.storage.layout().packed_bytes()];
        for frame in 0..FRAMES {
            contents(frame, round, &mut packed);
            // SAFETY: no transfer is under way.
            unsafe { self.storage.unpack(&[run(frame, 1)], &packed) }.expect("a frame");
        }
    }

    /// Transfers all frames by the transport.
    fn by_transport(&mut self, tag: u64, (local, remote): &(Vec<Run>, Vec<Run>)) -> Duration {
        self.target.grant(tag);
        let start = Instant::now();
        let submission = Submission {
            region: self.region,
            peer: self.peer,
            remote_region: RegionId(0),
            local: local.clone(),
            remote: remote.clone(),
            tag: Tag(tag),
            hold: Arc::new(()),
        };
        // SAFETY: the frames are written after the transfer only.
        let transfer = unsafe { self.transport.submit(submission) }.expect("frames of both storages");
        wait(&self.transport, transfer);
        let time = start.elapsed();
        self.target.revoke(tag);
        time
    }

    /// Transfers all frames by the C interface.
    fn by_agent(&mut self, (local, remote): &(Vec<Run>, Vec<Run>)) -> Duration {
        let here = tensors(&*self.storage);
        let there = self.target.tensors.clone();
        self.target.poll(true);
        let start = Instant::now();
        let pieces = here.iter().zip(&there).flat_map(|(&(here, bytes), &(there, _))| {
            local.iter().zip(remote).map(move |(local, remote)| Piece {
                local: here + local.start.index() * bytes,
                remote: there + remote.start.index() * bytes,
                len: local.len as usize * bytes,
            })
        });
        self.agent.write(pieces);
        let time = start.elapsed();
        self.target.poll(false);
        time
    }
}

/// Waits for the end of a transfer, asleep: the transport's thread wakes this one.
fn wait(transport: &NixlTransport, transfer: TransferId) {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Arc::new(Unpark(std::thread::current())).into();
    loop {
        match transport.poll(transfer, Some(&waker)) {
            TransferState::InFlight => std::thread::park(),
            TransferState::Done => return,
            state => panic!("{state:?}"),
        }
    }
}

fn source() {
    let name = std::env::var(ROLE).expect("a name");
    assert!(support::pin(0) || support::core_count() == 0, "pinned, if the system reports cores");
    let mut source = Source::start();
    let bytes = u64::from(FRAMES) * source.storage.layout().packed_bytes() as u64;
    let rate = |time: Duration| bytes as f64 / f64::from(1 << 20) / time.as_secs_f64();
    let mut seed = 0;
    for len in RUN_LENGTHS {
        let runs = runs(len);
        let (mut ours, mut plain, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let mut times = [Duration::ZERO; 2];
            // They take turns in being the first.
            for way in [round as usize % 2, (round as usize + 1) % 2] {
                seed += 1;
                source.fill(seed);
                times[way] = if way == 0 { source.by_transport(seed, &runs) } else { source.by_agent(&runs) };
                source.target.check(seed, len);
            }
            // The first round only warms up.
            if round > 0 {
                ours.push(rate(times[0]));
                plain.push(rate(times[1]));
                ratios.push(times[1].as_secs_f64() / times[0].as_secs_f64());
            }
        }
        let descriptors = runs.0.len() * tensors(&*source.storage).len();
        let [ours, plain, ratio] =
            [&mut ours, &mut plain, &mut ratios].map(|figures| support::median(figures));
        let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
        println!(
            "{name:<16} {descriptors:>11} {ours:>10.0} {plain:>10.0} {ratio:>7.2} ({least:.2} to {most:.2})"
        );
    }
}

//! Throughput of the transport, and of whole replications between two nodes, beside plain copies of
//! the same bytes over as many streams, on tasks of the same runtime, in turns. Both ends are in
//! this process; each worker of the runtime is pinned to a core of its own.
//!
//! A plain copy has on each stream one writer with a contiguous part of the bytes, in one call of
//! `write_all`, and one reader, which acknowledges its part by one byte: no headers, no frames to
//! collect and to scatter, no check. It therefore makes the largest system calls that the sockets
//! take. Its memory is on huge pages, as a storage's is. Under TLS both have the same provider and
//! versions; a node's certificates are mutual.
//!
//! A ratio is the median over rounds of one transfer and one plain copy each, which take turns in
//! being the first. That of processor time is of the whole process, with the system's part: it
//! depends less on what else the machine does. The transport computes no checksums; a replication
//! reserves, pins, computes a checksum of each block on both sides, and ends when its answer and
//! the copied sequence are there. A migration does the same, and closes the source's sequence.

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvpool::storage::{HostStorage, Storage};
use kvpool::transport::{Grant, RegionId, SourceState, Submission, Tag, TransferState, Transport};
use kvpool::{FrameId, KvLayout, Pool, Run, Sequence, SequenceId};
use kvpool_node::transport::tcp::{
    Address, Endpoint, Identity, ListenSettings, PeerSettings, TcpTransport, Tls,
};
use kvpool_node::wire::Limits;
use kvpool_node::{Arrivals, Node};
use memmap2::{Advice, MmapMut};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

const STREAMS: usize = 4;
const ROUNDS: usize = 15;

#[derive(Clone, Copy)]
enum Path {
    Tcp,
    Unix,
    Tls,
}

struct Certificates {
    authority: String,
    chain: String,
    key: String,
}

impl Certificates {
    fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let authority = params.self_signed(&key).unwrap().pem();
        let issuer = rcgen::Issuer::new(params, key);
        let key = rcgen::KeyPair::generate().unwrap();
        let params = rcgen::CertificateParams::new(vec!["a".to_owned(), "b".to_owned()]).unwrap();
        let chain = params.signed_by(&key, &issuer).unwrap().pem();
        Self { authority, chain, key: key.serialize_pem() }
    }

    fn node(&self) -> Tls {
        Tls::mutual(self.chain.as_bytes(), self.key.as_bytes(), self.authority.as_bytes()).unwrap()
    }

    /// The same TLS as a node's, without client certificates.
    fn raw(&self) -> (TlsAcceptor, TlsConnector) {
        let provider = || Arc::new(rustls::crypto::ring::default_provider());
        let chain = vec![CertificateDer::from_pem_slice(self.chain.as_bytes()).unwrap()];
        let key = PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.authority.as_bytes()).unwrap()).unwrap();
        let server = rustls::ServerConfig::builder_with_provider(provider());
        let server = server.with_protocol_versions(rustls::DEFAULT_VERSIONS).unwrap();
        let server = server.with_no_client_auth().with_single_cert(chain, key).unwrap();
        let client = rustls::ClientConfig::builder_with_provider(provider());
        let client = client.with_protocol_versions(rustls::DEFAULT_VERSIONS).unwrap();
        let client = client.with_root_certificates(roots).with_no_client_auth();
        (TlsAcceptor::from(Arc::new(server)), TlsConnector::from(Arc::new(client)))
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// Pairs of connected streams.
async fn raw_streams(path: Path, certificates: &Certificates) -> Vec<[Box<dyn Stream>; 2]> {
    let mut streams: Vec<[Box<dyn Stream>; 2]> = Vec::new();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let (acceptor, connector) = certificates.raw();
    let file = socket_path("raw");
    let unix = UnixListener::bind(&file).unwrap();
    for _ in 0..STREAMS {
        if let Path::Unix = path {
            let (here, there) = tokio::join!(UnixStream::connect(&file), unix.accept());
            streams.push([Box::new(here.unwrap()), Box::new(there.unwrap().0)]);
            continue;
        }
        let (here, there) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (here, there) = (here.unwrap(), there.unwrap().0);
        here.set_nodelay(true).unwrap();
        there.set_nodelay(true).unwrap();
        if let Path::Tls = path {
            let name = ServerName::try_from("b").unwrap();
            let (here, there) = tokio::join!(connector.connect(name, here), acceptor.accept(there));
            streams.push([Box::new(here.unwrap()), Box::new(there.unwrap())]);
        } else {
            streams.push([Box::new(here), Box::new(there)]);
        }
    }
    std::fs::remove_file(file).unwrap();
    streams
}

fn socket_path(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("kvpool-bench-{name}-{}.sock", std::process::id()))
}

/// A piece of plain memory on huge pages.
fn memory(bytes: usize, fill: u8) -> MmapMut {
    let mut memory = MmapMut::map_anon(bytes).expect("memory");
    // Advice only.
    let _ = memory.advise(Advice::HugePage);
    memory.fill(fill);
    memory
}

/// Times of one copy.
#[derive(Clone, Copy)]
struct Times {
    elapsed: Duration,
    processor: Duration,
}

/// Measures from its creation on.
struct Clock(Instant, Duration);

impl Clock {
    fn start() -> Self {
        Self(Instant::now(), support::processor_time())
    }

    fn stop(self) -> Times {
        Times { elapsed: self.0.elapsed(), processor: support::processor_time() - self.1 }
    }
}

/// Copies once over all streams.
async fn raw_copy(
    streams: &mut Vec<[Box<dyn Stream>; 2]>,
    parts: &mut Vec<(Arc<MmapMut>, MmapMut)>,
) -> Times {
    let clock = Clock::start();
    let mut tasks = Vec::new();
    for ([mut here, mut there], (source, mut target)) in streams.drain(..).zip(parts.drain(..)) {
        let from = source.clone();
        let write = tokio::spawn(async move {
            here.write_all(&from).await.unwrap();
            here.flush().await.unwrap();
            assert_eq!(here.read_u8().await.unwrap(), 1);
            here
        });
        let read = tokio::spawn(async move {
            there.read_exact(&mut target).await.unwrap();
            there.write_u8(1).await.unwrap();
            there.flush().await.unwrap();
            (there, target)
        });
        tasks.push((source, write, read));
    }
    let mut done = Vec::new();
    for (source, write, read) in tasks {
        done.push((source, write.await.unwrap(), read.await.unwrap()));
    }
    let times = clock.stop();
    for (source, here, (there, target)) in done {
        streams.push([here, there]);
        parts.push((source, target));
    }
    times
}

struct Nodes {
    transports: [TcpTransport; 2],
    storages: [Arc<dyn Storage>; 2],
    regions: [kvpool::transport::RegionId; 2],
    peers: [kvpool::transport::PeerId; 2],
    frames: u32,
    tag: u64,
    _links: [kvpool_node::transport::tcp::Link; 2],
    _endpoints: [Endpoint; 2],
}

impl Nodes {
    async fn new(path: Path, layout: &KvLayout, frames: u32, certificates: &Certificates) -> Self {
        let identity = |name| {
            let identity = Identity::new(name, 4).unwrap();
            if let Path::Tls = path { identity.tls(certificates.node()) } else { identity }
        };
        let address = match path {
            Path::Unix => Address::Unix(socket_path("node")),
            _ => Address::Tcp("127.0.0.1:0".parse().unwrap()),
        };
        let mut limits = Limits::default();
        limits.streams = STREAMS as u16;
        let a = Endpoint::bind(ListenSettings::default(), identity("a"), limits.clone()).await.unwrap();
        let b = Endpoint::bind(ListenSettings::on(address), identity("b"), limits).await.unwrap();
        let peer = PeerSettings::new("b", b.addresses()[0].clone());
        let (here, there) = tokio::join!(a.connect(&peer), b.accept());
        let (here, there) = (here.unwrap(), there.unwrap());
        let transports = [TcpTransport::new(&a), TcpTransport::new(&b)];
        let peers = [transports[0].attach(&here).unwrap(), transports[1].attach(&there).unwrap()];
        let storages = [7u8, 0].map(|seed| -> Arc<dyn Storage> {
            let storage = HostStorage::new(layout.clone(), frames as usize, frames as usize).unwrap();
            for frame in 0..frames {
                // SAFETY: the storage is new.
                unsafe { storage.unpack(&[run(frame, 1)], &contents(layout, seed, frame)) }.unwrap();
            }
            Arc::new(storage)
        });
        let regions = [0, 1].map(|at| transports[at].register(&storages[at]).unwrap());
        let (_links, _endpoints) = ([here, there], [a, b]);
        Self { transports, storages, regions, peers, frames, tag: 0, _links, _endpoints }
    }

    /// Transfers all frames.
    async fn transfer(&mut self) -> Times {
        self.tag += 1;
        let (tag, runs) = (Tag(self.tag), vec![run(0, self.frames)]);
        let clock = Clock::start();
        let [source, target] = &self.transports;
        let grant = Grant {
            tag,
            region: self.regions[1],
            runs: runs.clone(),
            peer: self.peers[1],
            hold: Arc::new(()),
        };
        // SAFETY: the frames are read after the grant.
        unsafe { target.grant(grant) }.unwrap();
        let submission = Submission {
            region: self.regions[0],
            peer: self.peers[0],
            remote_region: RegionId(0),
            local: runs.clone(),
            remote: runs,
            tag,
            hold: Arc::new(()),
        };
        // SAFETY: no one writes the frames.
        let transfer = unsafe { source.submit(submission) }.unwrap();
        let state = std::future::poll_fn(|cx| match source.poll(transfer, Some(cx.waker())) {
            TransferState::InFlight => std::task::Poll::Pending,
            state => std::task::Poll::Ready(state),
        });
        assert!(matches!(state.await, TransferState::Done));
        assert!(matches!(target.revoke(tag, SourceState::Over), TransferState::Done));
        clock.stop()
    }

    /// Compares all frames.
    fn check(&self, layout: &KvLayout) {
        let mut packed = vec![0; layout.packed_bytes()];
        for frame in 0..self.frames {
            // SAFETY: no transfer is under way.
            unsafe { self.storages[1].pack(&[run(frame, 1)], &mut packed) }.unwrap();
            assert!(packed == contents(layout, 7, frame), "frame {frame}");
        }
    }
}

/// Two nodes, and a sequence of the first one.
struct Whole {
    nodes: [(Node, Arrivals); 2],
    sequence: Sequence,
    frames: u32,
}

impl Whole {
    async fn new(path: Path, layout: &KvLayout, frames: u32, certificates: &Certificates) -> Self {
        let start = async |name, listen: Option<Address>, peers| {
            let pool = Pool::builder(layout.clone()).blocks(frames as usize).build().unwrap();
            // Frame 0 belongs to no block.
            for frame in 1..=frames {
                let seed = if name == "a" { 7 } else { 0 };
                // SAFETY: no block is allocated.
                unsafe { pool.storage().unwrap().unpack(&[run(frame, 1)], &contents(layout, seed, 0)) }
                    .unwrap();
            }
            let node = Node::builder(pool).name(name).peers(peers);
            let node = if let Path::Tls = path { node.tls(certificates.node()) } else { node };
            let node = if let Some(address) = listen { node.listen(address) } else { node };
            node.start().await.unwrap()
        };
        let address = match path {
            Path::Unix => Address::Unix(socket_path("whole")),
            _ => Address::Tcp("127.0.0.1:0".parse().unwrap()),
        };
        let b = start("b", Some(address), Vec::new()).await;
        let a = start("a", None, vec![PeerSettings::new("b", b.0.addresses()[0].clone())]).await;
        while !a.0.peers().await.unwrap().contains(&("b".to_owned(), true)) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let tokens: Vec<u32> = (0..frames * layout.block_tokens() as u32).collect();
        let sequence = a.0.pool().sequence(SequenceId(1)).tokens(&tokens).unwrap();
        let mut sequence = sequence;
        let mut batch = a.0.pool().begin_batch();
        batch.append(&mut sequence, tokens.len()).unwrap();
        batch.finish();
        Self { nodes: [a, b], sequence, frames }
    }

    /// Copies the sequence, and closes the copy.
    async fn copy(&mut self) -> Times {
        let [(a, _), (b, arrivals)] = &mut self.nodes;
        let clock = Clock::start();
        let report = a.pool().replicate_to_node(&self.sequence, "b").await.unwrap();
        let arrived = arrivals.recv().await.unwrap().sequence;
        let times = clock.stop();
        assert_eq!(report.carried.blocks, self.frames as usize);
        drop(arrived);
        // The next copy has the same id; its predecessor is forgotten first.
        while b.pool().sequence_count() > 0 || b.pool().stats().used > 0 {
            tokio::task::yield_now().await;
        }
        times
    }

    fn check(&self, layout: &KvLayout) {
        let mut packed = vec![0; layout.packed_bytes()];
        for frame in 1..=self.frames {
            // SAFETY: no transfer is under way.
            unsafe { self.nodes[1].0.pool().storage().unwrap().pack(&[run(frame, 1)], &mut packed) }.unwrap();
            assert!(packed == contents(layout, 7, 0), "frame {frame}");
        }
    }
}

/// What is compared to the plain copy.
enum Ours {
    Transport(Box<Nodes>),
    Whole(Box<Whole>),
}

impl Ours {
    async fn copy(&mut self) -> Times {
        match self {
            Self::Transport(nodes) => nodes.transfer().await,
            Self::Whole(whole) => whole.copy().await,
        }
    }

    fn check(&self, layout: &KvLayout) {
        match self {
            Self::Transport(nodes) => nodes.check(layout),
            Self::Whole(whole) => whole.check(layout),
        }
    }
}

fn contents(layout: &KvLayout, seed: u8, frame: u32) -> Vec<u8> {
    (0..layout.packed_bytes())
        .map(|at| (at as u32 ^ at as u32 >> 7 ^ frame.wrapping_mul(31)) as u8 ^ seed)
        .collect()
}

fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

async fn compare(path: Path, is_whole: bool, name: &str, layout: &KvLayout, frames: u32) {
    let certificates = Certificates::new();
    let bytes = frames as usize * layout.packed_bytes();
    let mut nodes = if is_whole {
        Ours::Whole(Box::new(Whole::new(path, layout, frames, &certificates).await))
    } else {
        Ours::Transport(Box::new(Nodes::new(path, layout, frames, &certificates).await))
    };
    let mut streams = raw_streams(path, &certificates).await;
    assert_eq!(bytes % STREAMS, 0, "the plain copy has the same bytes");
    let part = |_| (Arc::new(memory(bytes / STREAMS, 7)), memory(bytes / STREAMS, 1));
    let mut parts: Vec<_> = (0..STREAMS).map(part).collect();
    let (mut ours, mut raw, mut ratios, mut processor) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let rate = |time: Duration| bytes as f64 / (1 << 20) as f64 / time.as_secs_f64();
    for round in 0..=ROUNDS {
        let (one, other) = if round % 2 == 0 {
            let one = nodes.copy().await;
            (one, raw_copy(&mut streams, &mut parts).await)
        } else {
            let other = raw_copy(&mut streams, &mut parts).await;
            (nodes.copy().await, other)
        };
        // The first round only warms up.
        if round > 0 {
            ours.push(rate(one.elapsed));
            raw.push(rate(other.elapsed));
            ratios.push(other.elapsed.as_secs_f64() / one.elapsed.as_secs_f64());
            processor.push(other.processor.as_secs_f64() / one.processor.as_secs_f64());
        }
    }
    assert!(parts.iter().all(|(source, target)| source[..] == target[..]));
    nodes.check(layout);
    let [ours, raw, ratio, processor] =
        [&mut ours, &mut raw, &mut ratios, &mut processor].map(|figures| support::median(figures));
    let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
    println!("{name:<36} {ours:>7.0} {raw:>7.0} {ratio:>7.2} ({least:.2} to {most:.2}) {processor:>9.2}");
}

/// A runtime with two workers, each on a core of its own if the system allows it. Its threads for
/// blocking work come later, and run anywhere.
fn runtime() -> tokio::runtime::Runtime {
    let started = AtomicUsize::new(0);
    let pin = move || match started.fetch_add(1, Relaxed) {
        worker @ 0..2 => _ = support::pin(worker),
        _ => support::unpin(),
    };
    let builder = &mut tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().on_thread_start(pin).build().unwrap()
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("transport: to measure, run `cargo bench -p kvpool-node --bench transport`");
        return;
    }
    let runtime = runtime();
    let builder = || KvLayout::builder().head_dim(128).block_tokens(16);
    // One rank of a model of 8 billion parameters, and of one of 70 billion over 8 ranks.
    let large = builder().layers(32).kv_heads(8).build().unwrap();
    let small = builder().layers(80).kv_heads(1).build().unwrap();
    println!(
        "{STREAMS} streams, two workers on {} cores, MiB/s, medians of {ROUNDS} rounds",
        support::core_count()
    );
    println!("{:<36} {:>7} {:>7} {:>22} {:>9}", "", "kvpool", "plain", "ratio", "processor");
    println!("{:<36} {:>7} {:>7} {:>22} {:>9}", "", "", "", "(least to most)", "time");
    // Words after `--bench --`: only paths whose name contains one of them.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| !word.starts_with('-')).collect();
    for (path, name) in [(Path::Tcp, "TCP"), (Path::Unix, "Unix socket"), (Path::Tls, "TLS")] {
        for (layout, tile, frames) in [(&large, "32 KiB", 96), (&small, "4 KiB", 320)] {
            for (is_whole, what) in [(false, "transport"), (true, "replication")] {
                let name = format!("{what}, {name}, tiles of {tile}");
                if words.is_empty() || words.iter().any(|word| name.contains(word.as_str())) {
                    runtime.block_on(compare(path, is_whole, &name, layout, frames));
                }
            }
        }
    }
}

//! Endpoints, certificates, storages, and peers that speak the protocol byte by byte.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvpool::storage::{Arrangement, Dtype, HostStorage, KvPlanes, Scales, Storage};
use kvpool::transport::{
    Grant, Hold, PeerId, RegionId, Submission, Tag, TransferId, TransferState, Transport, TransportError,
};
use kvpool::{FrameId, KvLayout, Run};
use kvpool_node::transport::tcp::{
    Address, Endpoint, Identity, Link, LinkError, ListenSettings, PeerSettings, TcpTransport, Tls, Token,
};
use kvpool_node::wire::{
    self, FrameHead, FrameKind, HEADER, Header, Hello, ITEM_HEAD, Limits, PROOF, Proof, Role, Statement,
    StreamHead, StreamPlace, Versions, WIRE_VERSION, Welcome,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Times that no step of a test exceeds, on a busy machine either.
pub fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.handshake = Duration::from_secs(20);
    limits.heartbeat = Duration::from_millis(100);
    limits.silence = Duration::from_secs(20);
    limits.item = Duration::from_secs(20);
    limits.streams = 2;
    limits
}

/// The same, with less patience for a peer that sends no heartbeat.
pub fn hasty_silence() -> Limits {
    let mut limits = limits();
    limits.silence = Duration::from_secs(2);
    limits
}

/// The same, with less patience for a message or a data item that does not proceed.
pub fn hasty_items() -> Limits {
    let mut limits = limits();
    limits.item = Duration::from_millis(1500);
    limits
}

pub fn identity(name: &str) -> Identity {
    Identity::new(name, Versions::UNSTATED).unwrap()
}

pub fn token(text: &str) -> Token {
    Token::new(format!("{text}, of sixteen bytes").as_bytes()).unwrap()
}

pub fn loopback() -> Address {
    Address::Tcp("127.0.0.1:0".parse().unwrap())
}

/// A path for a Unix socket that no other test has.
pub fn socket_path() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("kvpool-node-{}-{number}.sock", std::process::id()))
}

pub async fn listen(identity: Identity, address: Address, limits: Limits) -> Endpoint {
    Endpoint::bind(ListenSettings::on(address), identity, limits).await.unwrap()
}

pub async fn silent(identity: Identity, limits: Limits) -> Endpoint {
    Endpoint::bind(ListenSettings::default(), identity, limits).await.unwrap()
}

pub fn peer_at(name: &str, endpoint: &Endpoint) -> PeerSettings {
    PeerSettings::new(name, endpoint.addresses()[0].clone())
}

/// Connects `source` to `target`, whose name is `b`. Returns both ends.
pub async fn link(source: &Endpoint, target: &Endpoint) -> (Link, Link) {
    let peer = peer_at("b", target);
    let (here, there) = tokio::join!(source.connect(&peer), target.accept());
    (here.unwrap(), there.unwrap())
}

/// Connects where one side is expected to refuse. Returns both results; the target's is awaited
/// only for a moment, because it may not learn of the attempt.
pub async fn refused(
    source: &Endpoint,
    target: &Endpoint,
    peer: &PeerSettings,
) -> (LinkError, Option<LinkError>) {
    let accept = tokio::time::timeout(Duration::from_secs(3), target.accept());
    let (here, there) = tokio::join!(source.connect(peer), accept);
    let there = there.ok().map(|there| there.expect_err("the acceptor accepted"));
    (here.expect_err("the connector connected"), there)
}

/// How two endpoints are connected.
#[derive(Clone, Copy, Debug)]
pub enum Path {
    Plain,
    Unix,
    Tls,
}

/// Two nodes, `a` and `b`, with a link and a transport each.
pub struct Pair {
    pub a: Node,
    pub b: Node,
}

pub struct Node {
    pub endpoint: Endpoint,
    pub transport: TcpTransport,
    pub link: Link,
    /// The other node.
    pub peer: PeerId,
}

impl Pair {
    pub async fn new(path: Path, limits: Limits) -> Self {
        let (mut a, mut b) = (identity("a"), identity("b"));
        if let Path::Tls = path {
            let authority = Authority::new();
            a = a.tls(authority.mutual("a"));
            b = b.tls(authority.mutual("b"));
        }
        let address = if let Path::Unix = path { Address::Unix(socket_path()) } else { loopback() };
        let (a, b) = (silent(a, limits.clone()).await, listen(b, address, limits).await);
        let (here, there) = link(&a, &b).await;
        Self { a: Node::new(a, here), b: Node::new(b, there) }
    }
}

impl Node {
    pub fn new(endpoint: Endpoint, link: Link) -> Self {
        let transport = TcpTransport::new(&endpoint);
        let peer = transport.attach(&link).unwrap();
        Self { endpoint, transport, link, peer }
    }

    pub fn register(&self, storage: &Arc<dyn Storage>) -> RegionId {
        self.transport.register(storage).unwrap()
    }

    pub fn grant(&self, tag: u64, region: RegionId, runs: &[Run]) -> Result<Watch, TransportError> {
        let (hold, token) = hold();
        let grant = Grant { tag: Tag(tag), region, runs: runs.to_vec(), peer: self.peer, hold };
        // SAFETY: the tests touch granted frames only before the grant and after its end.
        unsafe { self.transport.grant(grant) }.map(|()| token)
    }

    pub fn submit(
        &self,
        tag: u64,
        region: RegionId,
        local: &[Run],
        remote: &[Run],
    ) -> Result<(TransferId, Watch), TransportError> {
        let (hold, token) = hold();
        let submission = Submission {
            region,
            peer: self.peer,
            remote_region: RegionId(0),
            local: local.to_vec(),
            remote: remote.to_vec(),
            tag: Tag(tag),
            hold,
        };
        // SAFETY: the tests do not write submitted frames before the end of the transfer.
        unsafe { self.transport.submit(submission) }.map(|transfer| (transfer, token))
    }
}

/// Says whether a hold lives.
pub struct Watch(std::sync::Weak<dyn std::any::Any + Send + Sync>);

impl Watch {
    pub fn is_held(&self) -> bool {
        self.0.strong_count() > 0
    }
}

pub fn hold() -> (Hold, Watch) {
    let hold: Hold = Arc::new(());
    let token = Watch(Arc::downgrade(&hold));
    (hold, token)
}

/// Waits for the end of a transfer.
pub async fn end(transport: &TcpTransport, transfer: TransferId) -> TransferState {
    let ended = std::future::poll_fn(|cx| match transport.poll(transfer, Some(cx.waker())) {
        TransferState::Done => std::task::Poll::Ready(TransferState::Done),
        TransferState::Failed(error) => std::task::Poll::Ready(TransferState::Failed(error)),
        _ => std::task::Poll::Pending,
    });
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("a transfer ends by its deadline")
}

pub async fn failure(transport: &TcpTransport, transfer: TransferId) -> TransportError {
    match end(transport, transfer).await {
        TransferState::Failed(error) => error,
        state => panic!("expected a failure, and the transfer is {state:?}"),
    }
}

/// Waits until a condition holds.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("after ten seconds, not: {what}");
}

pub fn run(start: u32, len: u32) -> Run {
    Run { start: FrameId(start), len }
}

/// Layouts of one packed form, 512 bytes, that lie in memory in every way.
pub fn layouts(scales: bool) -> Vec<KvLayout> {
    let mut all = Vec::new();
    for parts in [KvPlanes::Separate, KvPlanes::Joined] {
        for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
            let builder = KvLayout::builder().layers(2).kv_heads(1).head_dim(8).block_tokens(4);
            let builder = builder.parts(parts).arrangement(arrangement);
            let builder = match scales {
                true => builder.dtype(Dtype::Fp8E4M3).scales(Scales::PerTokenHead),
                false => builder.dtype(Dtype::F32),
            };
            all.push(builder.build().unwrap());
        }
    }
    all
}

pub fn layout() -> KvLayout {
    layouts(false).swap_remove(0)
}

pub fn storage(layout: &KvLayout, frames: usize) -> Arc<dyn Storage> {
    Arc::new(HostStorage::new(layout.clone(), frames, frames).unwrap())
}

/// Fills frames with bytes that depend on the seed and the frame.
pub fn fill(storage: &dyn Storage, frames: std::ops::Range<u32>, seed: u64) {
    for frame in frames {
        // SAFETY: the tests own the frame now.
        unsafe { storage.unpack(&[run(frame, 1)], &pattern(storage, seed, frame)) }.unwrap();
    }
}

pub fn pattern(storage: &dyn Storage, seed: u64, frame: u32) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed << 32 | u64::from(frame));
    (0..storage.layout().packed_bytes()).map(|_| random.u8(..)).collect()
}

pub fn bytes(storage: &dyn Storage, frame: u32) -> Vec<u8> {
    let mut bytes = vec![0; storage.layout().packed_bytes()];
    // SAFETY: the tests own the frame now.
    unsafe { storage.pack(&[run(frame, 1)], &mut bytes) }.unwrap();
    bytes
}

/// A certificate authority.
pub struct Authority {
    issuer: rcgen::Issuer<'static, rcgen::KeyPair>,
    pub pem: String,
}

pub struct Certificate {
    pub chain: String,
    pub key: String,
}

impl Authority {
    pub fn new() -> Self {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self { issuer: rcgen::Issuer::new(params, key), pem }
    }

    pub fn certificate(&self, name: &str) -> Certificate {
        self.until(name, 4000)
    }

    /// Signs a certificate that expires at the beginning of a year.
    pub fn until(&self, name: &str, year: i32) -> Certificate {
        let key = rcgen::KeyPair::generate().unwrap();
        let mut params = rcgen::CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2000, 1, 1);
        params.not_after = rcgen::date_time_ymd(year, 1, 1);
        let chain = params.signed_by(&key, &self.issuer).unwrap().pem();
        Certificate { chain, key: key.serialize_pem() }
    }

    pub fn mutual(&self, name: &str) -> Tls {
        self.trusting(&self.certificate(name))
    }

    /// Mutual TLS with a certificate that may come from elsewhere.
    pub fn trusting(&self, certificate: &Certificate) -> Tls {
        let Certificate { chain, key } = certificate;
        Tls::mutual(chain.as_bytes(), key.as_bytes(), self.pem.as_bytes()).unwrap()
    }

    /// TLS for an acceptor whose peers have a token.
    pub fn acceptor(&self, certificate: &Certificate) -> Tls {
        let Certificate { chain, key } = certificate;
        Tls::with_token(Some((chain.as_bytes(), key.as_bytes())), Some(self.pem.as_bytes())).unwrap()
    }

    /// TLS for a connector that has a token.
    pub fn connector(&self) -> Tls {
        Tls::with_token(None, Some(self.pem.as_bytes())).unwrap()
    }
}

/// A peer that speaks the protocol in plain text, byte by byte. Its name is `raw`.
pub struct Raw {
    pub control: TcpStream,
    pub data: Vec<TcpStream>,
}

pub const RAW_INCARNATION: u64 = 77;

pub fn raw_header(role: Role) -> Header {
    Header { version: WIRE_VERSION, role, has_token: false, incarnation: RAW_INCARNATION, nonce: [5; 32] }
}

pub fn address_of(endpoint: &Endpoint) -> SocketAddr {
    match &endpoint.addresses()[0] {
        Address::Tcp(address) => *address,
        address => panic!("{address} is not a TCP address"),
    }
}

/// Opens one connection and introduces itself.
pub async fn raw_connection(endpoint: &Endpoint, place: StreamPlace) -> (TcpStream, Welcome) {
    let mut stream = TcpStream::connect(address_of(endpoint)).await.unwrap();
    let role = if matches!(place, StreamPlace::Control { .. }) { Role::Control } else { Role::Data };
    let mut header = [0; HEADER];
    stream.read_exact(&mut header).await.unwrap();
    Header::decode(&header).unwrap();
    stream.write_all(&raw_header(role).encode()).await.unwrap();
    stream.write_all(Proof::NONE.as_bytes()).await.unwrap();
    stream.read_exact(&mut [0; 1 + PROOF]).await.unwrap();
    let statement = Statement { message_bytes: 4 << 20, ..Statement::default() };
    let hello = Hello {
        name: "raw".into(),
        messages: Versions::UNSTATED.max,
        fingerprint: [0; 16],
        statement,
        place,
    };
    stream.write_all(&frame(&wire::encode(&hello, 1024).unwrap())).await.unwrap();
    let mut head = [0; wire::FRAME_HEAD];
    stream.read_exact(&mut head).await.unwrap();
    let mut message = vec![0; FrameHead::decode(&head, 1024).unwrap().length];
    stream.read_exact(&mut message).await.unwrap();
    (stream, wire::decode(&message).unwrap())
}

pub fn frame(message: &[u8]) -> Vec<u8> {
    let head = FrameHead { kind: FrameKind::Message, length: message.len() };
    [&head.encode()[..], message].concat()
}

impl Raw {
    /// Establishes a link with this many data streams. Returns the other end, too.
    pub async fn link(endpoint: &Endpoint, streams: u16) -> (Self, Link) {
        let (control, welcome) = raw_connection(endpoint, StreamPlace::Control { streams }).await;
        let Welcome::Accepted { link, .. } = welcome else { panic!("{welcome:?}") };
        let mut data = Vec::new();
        for index in 0..streams {
            let (stream, welcome) = raw_connection(endpoint, StreamPlace::Data { link, index }).await;
            assert!(matches!(welcome, Welcome::Accepted { .. }), "{welcome:?}");
            data.push(stream);
        }
        (Self { control, data }, endpoint.accept().await.unwrap())
    }

    /// Keeps the control stream alive, on a task of its own.
    pub fn beat(self) -> Vec<TcpStream> {
        let mut control = self.control;
        tokio::spawn(async move {
            let (mut read, mut write) = control.split();
            let beats = async {
                let beat = FrameHead { kind: FrameKind::Heartbeat, length: 0 }.encode();
                while write.write_all(&beat).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            };
            let drained = async { tokio::io::copy(&mut read, &mut tokio::io::sink()).await };
            tokio::select! { _ = drained => {}, () = beats => {} }
        });
        self.data
    }
}

/// A node with a raw peer.
pub async fn with_raw(limits: Limits, streams: u16) -> (Node, Vec<TcpStream>) {
    let endpoint = listen(identity("b"), loopback(), limits).await;
    let (raw, link) = Raw::link(&endpoint, streams).await;
    (Node::new(endpoint, link), raw.beat())
}

pub async fn read_head(stream: &mut TcpStream) -> StreamHead {
    let mut head = [0; ITEM_HEAD];
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read_exact(&mut head));
    read.await.expect("a head arrives").unwrap();
    StreamHead::decode(&head).unwrap()
}

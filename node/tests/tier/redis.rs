//! A real server, and one that lies.
//!
//! Needs the program `redis-server`. Without it the tests that need it say that they were skipped.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use kvpool_node::tier::{
    Outcome, Redis, SharedTier, StoreError, TierFailure, TierPolicy, TierSettings, ValueError, value_bytes,
};

use super::kv;
use super::load::Cluster;
use super::support::{
    SLACK, WAIT, all, bring_back, get, hasty, idle, keys, packed_bytes, patient, put, reads, soon, tier,
    tiered, value,
};

const LIMIT: Duration = Duration::from_millis(500);

/// A server with a bounded memory, on a port of the loopback.
struct Server {
    child: Child,
    port: u16,
    memory: &'static str,
}

fn spawn(port: u16, memory: &str) -> Option<Child> {
    let arguments = [
        "--port",
        &port.to_string(),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--appendonly",
        "no",
        "--maxmemory",
        memory,
        "--maxmemory-policy",
        "allkeys-lru",
        "--dir",
        "/",
    ];
    let mut command = Command::new("redis-server");
    let child = command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match child.spawn() {
        Ok(child) => Some(child),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            eprintln!("SKIPPED: there is no program redis-server; Debian's package has this name too");
            None
        }
        Err(error) => panic!("redis-server: {error}"),
    }
}

/// Waits until a server answers.
fn answers(port: u16) {
    let began = Instant::now();
    loop {
        let is_up = std::net::TcpStream::connect(("127.0.0.1", port)).and_then(|mut stream| {
            stream.set_read_timeout(Some(LIMIT))?;
            stream.write_all(b"PING\r\n")?;
            let mut pong = [0; 7];
            stream.read_exact(&mut pong)?;
            Ok(&pong == b"+PONG\r\n")
        });
        if matches!(is_up, Ok(true)) {
            return;
        }
        assert!(began.elapsed() < WAIT, "the server does not answer: {is_up:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Server {
    fn start(memory: &'static str) -> Option<Self> {
        // Free now; another process could take it before the server does.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let child = spawn(port, memory)?;
        answers(port);
        Some(Self { child, port, memory })
    }

    fn store(&self) -> Redis {
        Redis::new(&format!("redis://127.0.0.1:{}", self.port), None, LIMIT).unwrap()
    }

    fn tier(&self, settings: TierSettings) -> Arc<SharedTier> {
        tier(self.store(), settings)
    }

    fn signal(&self, signal: i32) {
        // SAFETY: of a child that was not waited for, so that its number is its own.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.kill();
        self.child = spawn(self.port, self.memory).expect("it was there before");
        answers(self.port);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let Some(server) = Server::start("64mb") else { return };
    super::conformance::suite(&server.tier(patient())).await;
}

/// A full server evicts; no put fails, and what is left is right.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_server() {
    let Some(server) = Server::start("3mb") else { return };
    let shared = server.tier(patient());
    let many = keys(0..6000);
    for some in many.chunks(60) {
        assert_eq!(put(&shared, some).await, all(Outcome::Stored, some));
    }
    let mut hits = 0;
    for some in many.chunks(60) {
        hits += get(&shared, some).await.iter().filter(|outcome| **outcome == Outcome::Hit).count();
    }
    assert!((100..6000).contains(&hits), "{hits} of {} bytes", value_bytes(packed_bytes()));
    assert_eq!(shared.counters().failed, 0);
}

/// A server that refuses writes is no reason to fail; reads go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_refuses_writes() {
    let Some(server) = Server::start("64mb") else { return };
    let shared = server.tier(hasty());
    let some = keys(0..4);
    put(&shared, &some).await;
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    stream.write_all(b"CONFIG SET maxmemory-policy noeviction\r\nCONFIG SET maxmemory 1\r\n").unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    let refused = put(&shared, &keys(10..12)).await;
    let is_refused = |outcome: &Outcome| {
        matches!(outcome, Outcome::Failed(TierFailure::Store(StoreError::Refused { .. })))
    };
    assert!(refused.iter().all(is_refused), "{refused:?}");
    assert_eq!(get(&shared, &some).await, all(Outcome::Hit, &some));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_of_two_pools() {
    let Some(server) = Server::start("64mb") else { return };
    let shared = server.tier(patient());
    let (a, b) = kv::pools(50);
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(&a, 7, &tokens).unwrap());
    let report = tiered(&a, &shared, TierPolicy::Manual).offload(100, soon()).await.unwrap();
    assert_eq!(report.moved_blocks, 10);
    let report = bring_back(&tiered(&b, &shared, TierPolicy::Manual), &tokens, WAIT).await;
    assert_eq!((report.cached_blocks, report.moved_blocks), (10, 10));
    assert_eq!(kv::cached(&b, &tokens), 10);
    for pool in [&a, &b] {
        idle(pool).await;
    }
}

/// A value of another program under a key, far longer than a block: no more of it is read than is
/// needed to see that it is too long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_with_a_huge_value() {
    let Some(server) = Server::start("64mb") else { return };
    let shared = server.tier(hasty());
    let key = keys(0..1);
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let text = key[0].to_string();
    write!(stream, "*4\r\n$8\r\nSETRANGE\r\n${}\r\n{text}\r\n$8\r\n16777216\r\n$1\r\nx\r\n", text.len())
        .unwrap();
    stream.read_exact(&mut [0; 11]).unwrap();
    let want = value_bytes(packed_bytes());
    let size = Outcome::Failed(ValueError::Size { got: want + 1, want }.into());
    assert_eq!(get(&shared, &key).await, [size]);
    assert_eq!(put(&shared, &key).await, [Outcome::Stored]);
    assert_eq!(get(&shared, &key).await, [Outcome::Hit]);
}

/// A server that stands still: the call ends at its deadline; afterwards no late answer is taken for
/// another key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_stands_still() {
    let Some(server) = Server::start("64mb") else { return };
    let shared = server.tier(hasty());
    let some = keys(0..40);
    put(&shared, &some).await;
    server.signal(libc::SIGSTOP);
    let (late, memory) = reads(&some);
    let deadline = Instant::now() + Duration::from_millis(100);
    let outcomes = shared.get(late, deadline).await;
    assert!(Instant::now() < deadline + SLACK);
    assert!(outcomes.iter().all(|outcome| !matches!(outcome, Outcome::Hit | Outcome::Miss)), "{outcomes:?}");
    server.signal(libc::SIGCONT);
    let began = Instant::now();
    let others: Vec<_> = some.iter().rev().copied().collect();
    while get(&shared, &others).await != all(Outcome::Hit, &others) {
        assert!(began.elapsed() < WAIT, "{:?}", shared.counters());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    super::support::until("memory is given back", || memory.iter().all(|own| Arc::strong_count(own) == 1))
        .await;
}

/// Killed, stopped and started again while four clients use it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_dies_and_returns_under_load() {
    let Some(mut server) = Server::start("16mb") else { return };
    let shared = server.tier(hasty());
    let cluster = Cluster::start(&shared);
    let pause = || tokio::time::sleep(Duration::from_millis(400));
    for _ in 0..3 {
        pause().await;
        server.signal(libc::SIGSTOP);
        pause().await;
        server.signal(libc::SIGCONT);
        pause().await;
        server.restart();
        pause().await;
        // Also while it stands still.
        server.signal(libc::SIGSTOP);
        pause().await;
        server.restart();
    }
    let (before, began) = (cluster.fetched.load(Relaxed), Instant::now());
    while cluster.fetched.load(Relaxed) < before + 20 {
        assert!(began.elapsed() < WAIT, "{:?}", shared.counters());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.stop().await;
}

/// A server of the test: answers every question with the same bytes.
fn liar(answer: Vec<u8>, stays: bool) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (Ok(mut stream), answer) = (stream, answer.clone()) else { return };
            std::thread::spawn(move || {
                let mut question = [0; 65536];
                while let Ok(1..) = stream.read(&mut question) {
                    if stream.write_all(&answer).is_err() || !stays {
                        return;
                    }
                }
            });
        }
    });
    port
}

fn bulk(bytes: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", bytes.len()).as_bytes(), bytes, b"\r\n"].concat()
}

/// Answers that are short, long, foreign, of another kind, broken or endless: never a hit, never a wait
/// beyond the deadline, and the process lives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_lies() {
    let some = keys(0..4);
    let foreign = value(&keys(9..10)[0], 0);
    let own = value(&some[0], 0);
    let cut = &bulk(own.bytes())[..200];
    let answers: Vec<(&str, Vec<u8>)> = vec![
        ("short", bulk(&own.bytes()[..own.bytes().len() - 1])),
        ("long", bulk(&[own.bytes(), &[0; 5]].concat())),
        ("empty", bulk(&[])),
        ("foreign", bulk(foreign.bytes())),
        ("a number", b":1\r\n".to_vec()),
        ("an array", b"*2\r\n:1\r\n$1\r\nx\r\n".to_vec()),
        ("an error", b"-ERR no\r\n".to_vec()),
        ("loading", b"-LOADING Redis is loading the dataset in memory\r\n".to_vec()),
        ("no protocol", b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec()),
        ("an endless length", b"$9223372036854775807\r\nabc".to_vec()),
        ("a negative length", b"$-5\r\n".to_vec()),
        ("an endless array", b"*2147483647\r\n".to_vec()),
        ("deep arrays", b"*1\r\n".repeat(10_000)),
        ("cut", cut.to_vec()),
        ("nothing", Vec::new()),
    ];
    for (name, answer) in answers {
        for stays in [true, false] {
            let port = liar(answer.clone(), stays);
            let store =
                Redis::new(&format!("redis://127.0.0.1:{port}"), None, Duration::from_millis(200)).unwrap();
            let shared = tier(store, hasty());
            let (reads, memory) = reads(&some);
            let deadline = Instant::now() + Duration::from_millis(400);
            let outcomes = shared.get(reads, deadline).await;
            assert!(Instant::now() < deadline + SLACK, "{name}");
            assert!(!outcomes.contains(&Outcome::Hit), "{name}: {outcomes:?}");
            let deadline = Instant::now() + Duration::from_millis(400);
            let stored = shared.put(vec![own.clone()], deadline).await;
            assert_ne!(stored, [Outcome::Stored], "{name}");
            assert!(Instant::now() < deadline + SLACK, "{name}");
            drop(shared);
            super::support::until(name, || memory.iter().all(|own| Arc::strong_count(own) == 1)).await;
        }
    }
}

/// No server at all.
#[tokio::test]
async fn an_address_without_a_server() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let store = Redis::new(&format!("redis://127.0.0.1:{port}"), None, LIMIT).unwrap();
    let shared = tier(store, hasty());
    let outcomes = get(&shared, &keys(0..3)).await;
    let is_unreachable = |outcome: &Outcome| {
        matches!(outcome, Outcome::Failed(TierFailure::Store(StoreError::Unreachable { .. })))
    };
    assert!(outcomes.iter().all(is_unreachable), "{outcomes:?}");
}

/// A server over TLS that notes what it is asked first, and refuses it. Returns its port, the
/// authority that signed its certificate, and the questions.
fn encrypted() -> (u16, String, std::sync::mpsc::Receiver<String>) {
    use rustls::pki_types::{PrivateKeyDer, pem::PemObject};
    let key = rcgen::KeyPair::generate().unwrap();
    let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let key = PrivateKeyDer::from_pem_slice(key.serialize_pem().as_bytes()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let config = config.unwrap().with_no_client_auth();
    let config = Arc::new(config.with_single_cert(vec![certificate.der().clone()], key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, questions) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let connection = rustls::ServerConnection::new(config.clone()).unwrap();
            let mut stream = rustls::StreamOwned::new(connection, stream);
            let mut bytes = [0; 512];
            // A client that does not trust the certificate ends the handshake.
            while let Ok(read @ 1..) = stream.read(&mut bytes) {
                let asked = String::from_utf8_lossy(&bytes[..read]).into_owned();
                let commands = asked.matches("\n*").count() + usize::from(asked.starts_with('*'));
                let _ = sender.send(asked);
                let _ = stream.write_all(&b"-WRONGPASS invalid password\r\n".repeat(commands));
            }
        }
    });
    (port, certificate.pem(), questions)
}

/// User and password go to a server whose certificate is trusted, and to no other.
#[tokio::test]
async fn credentials_go_to_a_trusted_server_over_tls() {
    let (port, authority, questions) = encrypted();
    let address = format!("rediss://user-1:secret-1@localhost:{port}/2");
    let reason = async |authorities: Option<&[u8]>| {
        let shared = tier(Redis::new(&address, authorities, WAIT).unwrap(), patient());
        let outcomes = get(&shared, &keys(0..1)).await;
        let Outcome::Failed(TierFailure::Store(StoreError::Unreachable { reason, .. })) = &outcomes[0] else {
            panic!("{outcomes:?}")
        };
        assert!(!reason.contains("secret-1"), "{reason}");
        reason.clone()
    };
    let (_, other, _) = encrypted();
    for authorities in [None, Some(other.as_bytes())] {
        let reason = reason(authorities).await;
        assert!(reason.to_lowercase().contains("certificate"), "{reason}");
        assert!(questions.try_recv().is_err(), "nothing was said to it");
    }
    let reason = reason(Some(authority.as_bytes())).await;
    assert!(reason.contains("WRONGPASS") || reason.contains("AuthenticationFailed"), "{reason}");
    let asked = questions.recv_timeout(LIMIT).unwrap();
    assert!(asked.contains("AUTH") && asked.contains("user-1") && asked.contains("secret-1"), "{asked}");
}

//! Misbehaving callers with real sockets: none locks others out, none stays.

use std::time::Instant;

use kvpool::compact::Snapshot;
use tokio::net::TcpSocket;
use tokio::time::interval;

use super::super::interface::Answer;
use super::*;
use crate::hints::{HintsAnswer, HintsEnvelope};
use crate::metrics::Scrape;
use crate::topology::{PeerLink, TopologyReport};

const NEVER: Duration = Duration::from_secs(120);

/// Observable time that a caller exceeds.
const SHORT: Duration = Duration::from_millis(300);

/// Limits of this many connections, without short timeouts.
fn patient(connections: usize) -> Limits {
    Limits { connections, header: NEVER, body: NEVER, answer: NEVER, write: NEVER, ..Limits::default() }
}

/// Requests the statistics, which must come soon.
async fn is_served(served: &Served) {
    let client = served.client(None);
    let asked = timeout(Duration::from_secs(10), client.get("/stats")).await;
    asked.expect("others are kept out").unwrap();
}

/// Waits for the end of a connection, and returns the bytes before it.
async fn until_the_end(stream: &mut TcpStream) -> usize {
    let (mut count, mut bytes) = (0, vec![0; 64 << 10]);
    let end = async {
        // The end may be a reset.
        while let Ok(read @ 1..) = stream.read(&mut bytes).await {
            count += read;
        }
    };
    timeout(Duration::from_secs(20), end).await.expect("the connection ends");
    count
}

/// Sends a byte now and then until the connection ends; returns the time that it took.
async fn dribble(served: &Served, first: &str) -> Duration {
    let begun = Instant::now();
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    stream.write_all(first.as_bytes()).await.unwrap();
    let (mut read, mut write) = stream.split();
    let mut beats = interval(Duration::from_millis(20));
    let slowly = async {
        loop {
            beats.tick().await;
            if write.write_all(b" ").await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    };
    let mut answer = Vec::new();
    let over = async {
        tokio::select! {
            _ = read.read_to_end(&mut answer) => {}
            () = slowly => {}
        }
    };
    timeout(Duration::from_secs(20), over).await.expect("it is cut");
    begun.elapsed()
}

#[tokio::test]
async fn silent_callers_keep_nobody_out_and_do_not_add_up() {
    let served = Served::start(None, patient(4));
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(served.address).await.unwrap());
    }
    is_served(&served).await;
    is_served(&served).await;
    let is_closed = |stream: &TcpStream| match stream.try_read(&mut [0]) {
        Ok(read) => read == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    };
    let begun = Instant::now();
    while silent.iter().filter(|stream| !is_closed(stream)).count() > 4 {
        assert!(begun.elapsed() < Duration::from_secs(20), "more connections are open than are permitted");
        sleep(Duration::from_millis(10)).await;
    }
    // Those that are left do not delay the end.
    let begun = Instant::now();
    served.stop().await;
    assert!(begun.elapsed() < Duration::from_secs(4), "the end waits for silent callers");
    drop(silent);
}

#[tokio::test]
async fn callers_that_send_a_byte_now_and_then_have_a_deadline() {
    let served = Served::start(None, Limits { header: SHORT, body: SHORT, ..patient(4) });
    let header = dribble(&served, "GET /stats HTTP/1.1\r\nHost: localhost\r\nX-Slow:").await;
    assert!((SHORT..SHORT * 10).contains(&header), "{header:?}");
    let head = format!("POST /resize HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 50000\r\n\r\n");
    let body = dribble(&served, &head).await;
    assert!((SHORT..SHORT * 10).contains(&body), "{body:?}");
    served.stop().await;
}

#[tokio::test]
async fn callers_that_send_a_body_slowly_keep_nobody_out() {
    let served = Served::start(None, patient(2));
    let mut slow = Vec::new();
    for _ in 0..4 {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        let head = format!("POST /resize HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 100\r\n\r\n{{");
        stream.write_all(head.as_bytes()).await.unwrap();
        slow.push(stream);
        sleep(Duration::from_millis(20)).await;
    }
    is_served(&served).await;
    assert_eq!(served.pool.total_blocks(), 200);
    served.stop().await;
}

/// A pool whose statistics do not fit into the buffers of a socket.
struct Verbose(PoolAdmin);

const VERBOSE_BYTES: usize = 12 << 20;

impl Admin for Verbose {
    fn health(&self) -> Health {
        self.0.health()
    }

    fn ready(&self) -> Readiness {
        self.0.ready()
    }

    fn stats(&self) -> Answer<'_, StatsReport> {
        Box::pin(async {
            let mut report = self.0.stats().await?;
            report.extra.insert("much".to_owned(), "x".repeat(VERBOSE_BYTES).into());
            Ok(report)
        })
    }

    fn migrations(&self) -> Answer<'_, MigrationList> {
        self.0.migrations()
    }

    fn snapshot(&self) -> Answer<'_, Snapshot> {
        self.0.snapshot()
    }

    fn owners(&self, limit: usize) -> Answer<'_, OwnersReport> {
        self.0.owners(limit)
    }

    fn peers(&self) -> Answer<'_, Vec<PeerLink>> {
        self.0.peers()
    }

    fn topology(&self) -> Answer<'_, TopologyReport> {
        self.0.topology()
    }

    fn scrape(&self) -> Answer<'_, Scrape> {
        self.0.scrape()
    }

    fn hints(&self, order: HintsEnvelope) -> Answer<'_, HintsAnswer> {
        self.0.hints(order)
    }

    fn trim(&self, order: TrimOrder) -> Answer<'_, TrimOutcome> {
        self.0.trim(order)
    }

    fn defragment(&self) -> Answer<'_, DefragOutcome> {
        self.0.defragment()
    }

    fn resize(&self, order: ResizeOrder) -> Answer<'_, ResizeOutcome> {
        self.0.resize(order)
    }

    fn migrate(&self, order: MigrateOrder) -> Answer<'_, MigrationRecord> {
        self.0.migrate(order)
    }

    fn declare_ended(&self, order: EndedOrder) -> Answer<'_, EndedOutcome> {
        self.0.declare_ended(order)
    }

    fn audit(&self) -> Answer<'_, AuditOutcome> {
        self.0.audit()
    }
}

/// Connects with a small buffer, and asks for more than it holds.
async fn ask_for_much(address: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(16 << 10).unwrap();
    let mut stream = socket.connect(address).await.unwrap();
    stream.write_all(b"GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    stream
}

async fn refused(served: &Served, request: &str) -> (String, Value) {
    let answer = timeout(Duration::from_secs(10), served.raw(request)).await.expect("an answer");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    (head.to_owned(), serde_json::from_str(body).unwrap_or(Value::Null))
}

#[tokio::test]
async fn callers_that_do_not_read_the_answer_have_a_deadline() {
    let limits = Limits { write: Duration::from_secs(2), ..patient(1) };
    let served = Served::start_as(None, limits, |pool| Arc::new(Verbose(pool)));
    let mut deaf = ask_for_much(served.address).await;
    // The answer is made, and the buffers of both ends are full.
    timeout(Duration::from_secs(60), deaf.readable()).await.expect("an answer begins").unwrap();
    // A further caller is asked to retry, but gets the node's health.
    let (head, problem) = refused(&served, "GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 503") && head.contains("retry-after: 1"), "{head}");
    assert!(head.contains("application/problem+json"), "{head}");
    assert_eq!(problem["type"], "urn:kvpool:problem:busy", "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("all 1 connections"), "{problem}");
    served.client(None).get("/healthz").await.unwrap();
    served.client(None).get("/readyz").await.unwrap();
    sleep(limits.write).await;
    let read = until_the_end(&mut deaf).await;
    assert!(read < VERBOSE_BYTES, "the answer was written as a whole");
    // Its place is free again.
    assert!(!refused(&served, "GET /owners HTTP/1.1\r\nHost: localhost\r\n\r\n").await.0.contains(" 503"));
    served.stop().await;
}

#[tokio::test]
async fn an_answer_that_is_read_slowly_is_not_cut_for_others() {
    let served = Served::start_as(None, patient(1), |pool| Arc::new(Verbose(pool)));
    let mut slow = ask_for_much(served.address).await;
    timeout(Duration::from_secs(60), slow.readable()).await.expect("an answer begins").unwrap();
    // Silent connections take the places of refusals, and displace one another.
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(served.address).await.unwrap());
    }
    for _ in 0..20 {
        let (head, _) = refused(&served, "GET /stats HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
        assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    }
    assert!(until_the_end(&mut slow).await > VERBOSE_BYTES, "the answer was cut");
    served.stop().await;
}

#[tokio::test]
async fn a_connection_takes_one_request() {
    let served = Served::start(None, patient(4));
    let request = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n".repeat(1000);
    let mut stream = TcpStream::connect(served.address).await.unwrap();
    // The server closes the connection meanwhile.
    let _ = stream.write_all(request.as_bytes()).await;
    let read = until_the_end(&mut stream).await;
    assert!(read < 1000, "{read} bytes are more than one answer");
    is_served(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn headers_and_bodies_are_bounded() {
    let served = Served::start(None, Limits::default());
    let long = "x".repeat(64 << 10);
    let answer =
        served.raw(&format!("GET /stats HTTP/1.1\r\nHost: localhost\r\nX-Long: {long}\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    // Without a length, and sent endlessly.
    let head =
        format!("POST /resize HTTP/1.1\r\nHost: localhost\r\n{JSON}Transfer-Encoding: chunked\r\n\r\n");
    let answer = served.raw(&format!("{head}20000\r\n{}\r\n", "1".repeat(0x20000))).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
    is_served(&served).await;
    served.stop().await;
}

#[tokio::test]
async fn the_token_can_be_replaced_while_it_serves() {
    let server =
        AdminServer::bind(&"127.0.0.1:0".parse().unwrap(), Token::new(TOKEN).ok(), Limits::default());
    let served = Served::serve(server.unwrap(), Arc::new(PoolAdmin::new("n1", pool())));
    let other = "another-token-of-the-tests";
    served.client(Some(TOKEN)).get("/stats").await.unwrap();
    served.access.replace(Token::new(other).ok().into()).unwrap();
    let error = served.client(Some(TOKEN)).get("/stats").await.unwrap_err();
    assert!(matches!(&error, ClientError::Problem(problem) if problem.status == 401), "{error}");
    served.client(Some(other)).get("/stats").await.unwrap();
    served.access.replace(AdminCredentials::default()).unwrap();
    served.client(None).get("/stats").await.unwrap();
    served.stop().await;
    // An address that others can reach keeps its token.
    let open = AdminServer::bind(&"0.0.0.0:0".parse().unwrap(), Token::new(TOKEN).ok(), Limits::default());
    assert_eq!(open.unwrap().access().replace(AdminCredentials::default()), Err(AccessError::NoToken));
}

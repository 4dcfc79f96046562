mod callers;
mod frames;
mod hints;
mod page;
mod ways;

use std::fs;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use kvpool::{AllocRequest, KvLayout, Pool};
use kvpool_testkit::leases::singles;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::*;
use crate::settings::{AdminUrl, Token, Tokens};

pub(super) const TOKEN: &str = "a-token-for-the-tests";

pub(super) fn pool() -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout).blocks(200).blocks_max(400).build().unwrap()
}

fn bound(token: Option<&str>, limits: Limits) -> AdminServer {
    let token = token.map(|token| Token::new(token).unwrap());
    AdminServer::bind(&"127.0.0.1:0".parse().unwrap(), token, limits).unwrap()
}

fn port(server: &AdminServer) -> SocketAddr {
    server.address().address().to_string().parse().unwrap()
}

pub(super) struct Served {
    pub(super) address: SocketAddr,
    access: AdminAccess,
    pub(super) pool: Pool,
    pub(super) admin: Arc<PoolAdmin>,
    end: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Served {
    pub(super) fn start(token: Option<&str>, limits: Limits) -> Self {
        let pool = pool();
        let admin = Arc::new(PoolAdmin::new("n1", pool.clone()));
        Self { pool, admin: admin.clone(), ..Self::serve(bound(token, limits), admin) }
    }

    /// Starts a server over something made from a pool's interface.
    pub(super) fn start_as<A: Admin>(
        token: Option<&str>,
        limits: Limits,
        make: impl FnOnce(PoolAdmin) -> Arc<A>,
    ) -> Self {
        Self::serve(bound(token, limits), make(PoolAdmin::new("n1", pool())))
    }

    fn serve(server: AdminServer, shared: Arc<dyn Admin>) -> Self {
        let (address, access) = (port(&server), server.access());
        let (end, ended) = oneshot::channel();
        let ended = async move { drop(ended.await) };
        let task =
            tokio::spawn(async move { server.run(shared, ended, Duration::from_secs(5)).await.unwrap() });
        let pool = pool();
        let admin = Arc::new(PoolAdmin::new("unused", pool.clone()));
        Self { address, access, pool, admin, end, task }
    }

    pub(super) fn client(&self, token: Option<&str>) -> Client {
        let token = token.map(|token| Token::new(token).unwrap());
        Client::new(format!("http://{}/", self.address).parse().unwrap(), token)
    }

    pub(super) async fn stop(self) {
        let _ = self.end.send(());
        timeout(Duration::from_secs(20), self.task).await.expect("it ends").unwrap();
    }

    pub(super) async fn raw(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = timeout(Duration::from_secs(20), stream.read_to_end(&mut answer)).await;
        read.expect("the connection ends").unwrap();
        String::from_utf8(answer).unwrap()
    }

    /// Sends a request with a header and returns status, content type and JSON of the answer.
    pub(super) async fn exchange(&self, line: &str, headers: &str, body: &str) -> (u16, String, Value) {
        let host = if headers.contains("Host:") { "" } else { "Host: localhost\r\n" };
        let length = body.len();
        let request = format!(
            "{line} HTTP/1.1\r\n{host}{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n{body}"
        );
        let answer = self.raw(&request).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let kind = head.lines().find_map(|line| line.strip_prefix("content-type: ")).unwrap_or_default();
        (status, kind.to_owned(), serde_json::from_str(body).unwrap_or(Value::Null))
    }

    /// Checks that a request is answered by a problem of this status and kind.
    pub(super) async fn refuses(
        &self,
        line: &str,
        headers: &str,
        body: &str,
        status: u16,
        kind: &str,
    ) -> Value {
        let (got, content_type, problem) = self.exchange(line, headers, body).await;
        assert_eq!(got, status, "{line}: {problem}");
        assert_eq!(content_type, "application/problem+json", "{line}");
        assert_eq!(problem["type"], format!("urn:kvpool:problem:{kind}"), "{line}: {problem}");
        assert_eq!(problem["status"], status);
        assert!(problem["title"].is_string() && problem["detail"].is_string(), "{problem}");
        problem
    }
}

const JSON: &str = "Content-Type: application/json\r\n";

#[tokio::test]
async fn routes_act_on_the_pool() {
    let served = Served::start(None, Limits::default());
    let client = served.client(None);
    let lease = served.pool.allocate(AllocRequest::new(50)).unwrap();
    let stats: StatsReport = serde_json::from_value(client.get("/stats").await.unwrap()).unwrap();
    assert_eq!((stats.total, stats.used, stats.free, stats.evictable), (200, 50, 150, 0));
    assert_eq!((stats.node.as_str(), stats.used_percent), ("n1", 25.0));
    assert_eq!(stats.metrics.stats.used, 50);

    // Every other block of 100 is freed, which leaves holes that a compaction closes.
    let blocks = singles(&served.pool, AllocRequest::new(100));
    let mut kept: Vec<_> = blocks.into_iter().step_by(2).collect();
    kept.iter_mut().for_each(|lease| lease.seal(..));
    let outcome = client.post("/defrag", &json!({})).await.unwrap();
    let outcome: DefragOutcome = serde_json::from_value(outcome).unwrap();
    assert!(outcome.moved_blocks > 0 && outcome.time_ms > 0.0, "{outcome:?}");
    assert!(outcome.fragmentation_after < outcome.fragmentation_before, "{outcome:?}");

    let outcome = client.post("/resize", &ResizeOrder { blocks: 300 }).await.unwrap();
    assert_eq!((&outcome["from"], &outcome["to"]), (&json!(200), &json!(300)));
    assert_eq!(served.pool.total_blocks(), 300);
    let outcome: AuditOutcome =
        serde_json::from_value(client.post("/audit", &json!({})).await.unwrap()).unwrap();
    assert_eq!((outcome.sound, outcome.report.unwrap().owned), (true, 50 + kept.len()));
    assert_eq!(client.get("/migrations").await.unwrap(), json!({ "migrations": [] }));
    assert_eq!(client.get("/healthz").await.unwrap()["state"], "ok");
    drop((lease, kept));
    served.stop().await;
}

#[tokio::test]
async fn refusals_of_the_pool_are_problems_that_say_why() {
    let served = Served::start(None, Limits::default());
    let refuses = async |line, body, status, kind| served.refuses(line, JSON, body, status, kind).await;
    let problem = refuses("POST /resize", "{\"blocks\": 401}", 409, "conflict").await;
    assert!(problem["detail"].as_str().unwrap().contains("400"), "{problem}");
    assert_eq!(served.pool.total_blocks(), 200);
    refuses("POST /migrate", "{\"sequence\": 7, \"to\": \"b\"}", 404, "not-found").await;
    let _sequence = served.pool.sequence(kvpool::SequenceId(7)).open().unwrap();
    let problem = refuses("POST /migrate", "{\"sequence\": 7, \"to\": \"b\"}", 501, "unsupported").await;
    assert!(problem["detail"].as_str().unwrap().contains("no peers"), "{problem}");
    served.admin.drain();
    refuses("POST /defrag", "", 503, "unavailable").await;
    let (status, _, health) = served.exchange("GET /healthz", "", "").await;
    assert_eq!((status, &health["state"]), (503, &json!("draining")));
    assert_eq!(served.client(None).get("/healthz").await.unwrap()["state"], "draining");
    served.stop().await;
}

#[tokio::test]
async fn bad_requests_are_problems() {
    let served = Served::start(None, Limits { body_bytes: 100, ..Limits::default() });
    let refuses =
        async |line, headers, body, status, kind| served.refuses(line, headers, body, status, kind).await;
    refuses("GET /nothing", "", "", 404, "not-found").await;
    refuses("GET /index.html", "", "", 404, "not-found").await;
    refuses("POST /", JSON, "", 405, "method-not-allowed").await;
    refuses("GET /defrag", "", "", 405, "method-not-allowed").await;
    refuses("POST /stats", JSON, "{}", 405, "method-not-allowed").await;
    refuses("POST /resize", JSON, "", 422, "invalid").await;
    refuses("POST /resize", JSON, "{\"blocks\": -1}", 422, "invalid").await;
    refuses("POST /resize", JSON, "{\"blocks\": 10, \"force\": true}", 422, "invalid").await;
    refuses("POST /audit", JSON, "{\"deep\": true}", 422, "invalid").await;
    let large = format!("{{\"blocks\": 1{}}}", " ".repeat(100));
    let problem = refuses("POST /resize", JSON, &large, 413, "too-large").await;
    assert_eq!(problem["detail"], "the body has more than 100 bytes");
    // What a web page may send to another origin without a preflight.
    refuses("POST /defrag", "", "", 415, "content-type").await;
    refuses("POST /defrag", "Content-Type: text/plain\r\n", "{}", 415, "content-type").await;
    // A name that a web page has bound to the loopback.
    refuses("GET /stats", "Host: evil.example:80\r\n", "", 403, "forbidden").await;
    for host in ["127.0.0.1:1", "[::1]:1", "LOCALHOST"] {
        let (status, ..) = served.exchange("GET /stats", &format!("Host: {host}\r\n"), "").await;
        assert_eq!(status, 200, "{host}");
    }
    assert_eq!(served.pool.total_blocks(), 200);
    served.stop().await;
}

#[tokio::test]
async fn a_token_is_needed_where_there_is_one() {
    let served = Served::start(Some(TOKEN), Limits::default());
    let wrong = TOKEN.replace('t', "T");
    for headers in [
        String::new(),
        format!("Authorization: Bearer {wrong}\r\n"),
        format!("Authorization: Bearer {TOKEN}x\r\n"),
        "Authorization: Bearer \r\n".to_owned(),
        format!("Authorization: Basic {TOKEN}\r\n"),
        format!("Authorization: {TOKEN}\r\n"),
    ] {
        for line in ["GET /stats", "POST /defrag", "GET /nothing"] {
            let problem = served.refuses(line, &headers, "", 401, "unauthorized").await;
            assert!(!problem.to_string().contains(TOKEN), "{problem}");
        }
    }
    let error = served.client(Some(&wrong)).get("/stats").await.unwrap_err();
    assert!(matches!(&error, ClientError::Problem(problem) if problem.status == 401), "{error}");
    assert_eq!(served.client(None).get("/healthz").await.unwrap()["node"], "n1", "health is public");
    served.client(Some(TOKEN)).get("/stats").await.unwrap();
    // While a token is replaced, both are accepted; a token that reads permits nothing else.
    let folder = tempfile::tempdir().unwrap();
    let tokens = |text: String| {
        fs::write(folder.path().join("tokens"), text).unwrap();
        Tokens::read(&folder.path().join("tokens")).ok()
    };
    let (next, reader) = ("the-next-token-of-the-tests", "a-token-that-reads-figures");
    let both = AdminCredentials {
        all: tokens(format!("{TOKEN}\n{next}\n")),
        read: tokens(reader.to_owned()),
        tls: None,
    };
    served.access.replace(both).unwrap();
    for token in [TOKEN, next, reader] {
        served.client(Some(token)).get("/stats").await.unwrap();
        let headers = format!("Authorization: Bearer {token}\r\n");
        assert_eq!(served.exchange("GET /metrics", &headers, "").await.0, 200);
        for line in ["GET /owners", "GET /map.svg", "POST /trim", "GET /nothing"] {
            let (status, ..) = served.exchange(line, &headers, "").await;
            assert_eq!(status == 403, token == reader, "{line}: {status}");
        }
    }
    served
        .refuses("GET /stats", &format!("Authorization: Bearer {wrong}\r\n"), "", 401, "unauthorized")
        .await;
    // With a token, the name of the host does not matter.
    let headers = format!("Host: node-1.example\r\nAuthorization: bearer {TOKEN}\r\n");
    assert_eq!(served.exchange("GET /stats", &headers, "").await.0, 200);
    served.stop().await;
}

#[tokio::test]
async fn slow_and_silent_callers_are_cut_off() {
    let short = Duration::from_millis(200);
    let limits = Limits { header: short, body: short, connections: 2, ..Limits::default() };
    let served = Served::start(None, limits);
    // A header that never ends; the connection ends.
    served.raw("GET /stats HTTP/1.1\r\nHost: localhost\r\nX-Slow: ").await;
    // A body that never comes.
    let head = format!(
        "POST /resize HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: 20\r\nConnection: close\r\n\r\n{{"
    );
    let answer = served.raw(&head).await;
    assert!(answer.starts_with("HTTP/1.1 504") && answer.contains("no body within"), "{answer}");
    // Silent connections take all places, and are displaced.
    let silent = [
        TcpStream::connect(served.address).await.unwrap(),
        TcpStream::connect(served.address).await.unwrap(),
    ];
    timeout(Duration::from_secs(10), served.client(None).get("/stats"))
        .await
        .expect("a place is free")
        .unwrap();
    drop(silent);
    served.stop().await;
}

#[tokio::test]
async fn an_answer_that_takes_too_long_is_cut() {
    let served = Served::start(None, Limits { answer: Duration::from_millis(50), ..Limits::default() });
    // A batch keeps frames beyond the new end; the resize waits for it.
    let lease = served.pool.allocate(AllocRequest::new(200)).unwrap();
    let batch = served.pool.begin_batch();
    drop(lease);
    let problem = served.refuses("POST /resize", JSON, "{\"blocks\": 10}", 504, "timeout").await;
    assert!(problem["detail"].as_str().unwrap().contains("50ms"), "{problem}");
    assert_eq!(served.pool.total_blocks(), 200, "nothing is half done");
    batch.finish();
    served.pool.resize(10).await.unwrap();
    served.stop().await;
}

#[tokio::test]
async fn requests_under_way_finish_before_the_end() {
    let served = Served::start(None, Limits::default());
    // The resize waits for the batch, up to the pool's patience.
    let lease = served.pool.allocate(AllocRequest::new(200)).unwrap();
    let batch = served.pool.begin_batch();
    drop(lease);
    let client = served.client(None);
    let order = ResizeOrder { blocks: 100 };
    let mut asked = pin!(client.post("/resize", &order));
    assert!(timeout(Duration::from_millis(50), &mut asked).await.is_err(), "it waits");
    let (address, pool) = (served.address, served.pool.clone());
    let stop = tokio::spawn(served.stop());
    sleep(Duration::from_millis(20)).await;
    batch.finish();
    assert_eq!(asked.await.unwrap()["to"], 100);
    stop.await.unwrap();
    assert_eq!(pool.total_blocks(), 100);
    assert!(TcpStream::connect(address).await.is_err(), "the port is closed");
}

#[tokio::test]
async fn addresses_that_cannot_be_served_are_refused() {
    let bind = |address: &str, token: Option<Token>| {
        AdminServer::bind(&address.parse().unwrap(), token, Limits::default())
    };
    let first = bind("127.0.0.1:0", None).unwrap();
    let taken = first.address().to_string();
    let error = bind(&taken, None).unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }), "{error}");
    assert!(
        error.to_string().contains(&taken) && error.to_string().contains("the port is in use"),
        "{error}"
    );
    let access =
        |address: &str| match bind(address, Token::new(TOKEN).ok().filter(|_| address.starts_with('h'))) {
            Err(BindError::Access { error, .. }) => error,
            other => panic!("{other:?}"),
        };
    assert_eq!(access("0.0.0.0:0"), AccessError::NoToken);
    assert_eq!(access("https://127.0.0.1:0"), AccessError::NoCertificate);
    assert!(matches!(bind("192.0.2.1:0", Token::new(TOKEN).ok()), Err(BindError::Bind { .. })));
    bind("0.0.0.0:0", Token::new(TOKEN).ok()).unwrap();
    assert!(port(&bind("localhost:0", None).unwrap()).ip().is_loopback());
}

#[tokio::test]
async fn a_client_names_what_is_wrong() {
    let url = |text: &str| text.parse::<AdminUrl>();
    assert_eq!(url("localhost:7410").unwrap().to_string(), "http://localhost:7410");
    assert_eq!(url("http://[::1]:7410/").unwrap().to_string(), "http://[::1]:7410");
    assert_eq!(url("https://[::1]:7410").unwrap().to_string(), "https://[::1]:7410");
    assert_eq!(url("unix:/run/kvpool").unwrap().to_string(), "unix:/run/kvpool");
    for bad in ["ftp://localhost:1", "localhost", "http://localhost:1/stats", "https://unix:/x", "unix:", ""]
    {
        assert!(url(bad).is_err(), "{bad:?}");
    }
    let free = AdminServer::bind(&"127.0.0.1:0".parse().unwrap(), None, Limits::default()).unwrap();
    let address = free.address().to_string();
    drop(free);
    let error = Client::new(url(&address).unwrap(), None).get("/stats").await.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }) && error.to_string().contains(&address), "{error}");
    // A server that speaks another protocol.
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        for answer in
            ["220 mail\r\n", "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi"]
        {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    let client = Client::new(url(&address).unwrap(), None);
    assert!(matches!(client.get("/stats").await, Err(ClientError::NotHttp { .. })));
    assert!(matches!(client.get("/stats").await, Err(ClientError::Foreign { .. })));
}

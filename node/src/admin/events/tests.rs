use std::sync::Arc;
use std::time::Duration;

use kvpool::AllocRequest;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};

use super::super::tests::{Served, pool};
use super::super::{CellChanges, Cells, ClientError, Limits, PoolAdmin};
use super::*;

/// Longest time of a step.
const PATIENCE: Duration = Duration::from_secs(60);

fn limits(period: Duration) -> Limits {
    Limits { event_period: period, ..Limits::default() }
}

fn fast() -> Limits {
    limits(Duration::from_millis(20))
}

async fn next(follower: &mut Follower) -> Notice {
    timeout(PATIENCE, follower.next()).await.expect("an event comes").unwrap()
}

/// A page that is opened later shows the earlier statistics.
#[tokio::test]
async fn statistics_are_kept_without_a_follower() {
    let served = Served::start(None, fast());
    let lease = served.pool.allocate(AllocRequest::new(7)).unwrap();
    let mut samples = Vec::new();
    while samples.len() < 5 {
        sleep(Duration::from_millis(50)).await;
        let (status, _, answer) = served.exchange("GET /history", "", "").await;
        assert_eq!(status, 200);
        samples = serde_json::from_value::<Vec<StatsSummary>>(answer).unwrap();
    }
    assert!(samples.iter().all(|sample| sample.total == 200 && sample.used <= 7), "{samples:?}");
    assert!(samples.is_sorted_by(|a, b| a.time_ms + 100 <= b.time_ms), "five periods of 20 ms: {samples:?}");
    assert_eq!(samples[4].used, 7);
    drop(lease);
    served.stop().await;
}

#[tokio::test]
async fn a_follower_sees_the_whole_and_then_each_change() {
    let served = Served::start(None, fast());
    let mut follower = served.client(None).follow();
    let Notice::Stats(stats) = next(&mut follower).await else { panic!("the statistics come first") };
    assert_eq!((stats.node.as_str(), stats.total, stats.used, stats.free), ("n1", 200, 0, 200));
    let Notice::Map(mut map) = next(&mut follower).await else { panic!("then the map") };
    assert_eq!((map.frames, map.group, map.cells.len()), (201, 1, 201));
    let Notice::Migrations(list) = next(&mut follower).await else { panic!("then migrations") };
    assert!(list.migrations.is_empty());

    let _lease = served.pool.allocate_owned(AllocRequest::new(20)).unwrap();
    // One period may lie between the statistics and the map.
    let mut used = 0;
    while used != 20 || map.cells.matches('f').count() != 21 {
        match next(&mut follower).await {
            Notice::Stats(stats) => used = stats.used,
            Notice::MapChanges(changes) => assert!(map.apply(&changes), "{changes:?}"),
            Notice::Map(whole) => map = whole,
            other => panic!("{other:?}"),
        }
    }
    served.pool.resize(300).await.unwrap();
    let whole = loop {
        if let Notice::Map(whole) = next(&mut follower).await {
            break whole;
        }
    };
    assert_eq!(whole.frames, 301, "another size comes as a whole");
    assert!(!map.apply(&CellChanges { changes: vec![(200, "rr".to_owned())] }), "outside of the map");
    served.stop().await;
}

#[tokio::test]
async fn times_are_those_of_the_last_period() {
    let served = Served::start(None, fast());
    let mut follower = served.client(None).follow();
    let mut samples = Vec::new();
    for round in 0..40 {
        if round == 10 {
            // One in 64 is timed.
            (0..640).for_each(|_| drop(served.pool.allocate(AllocRequest::new(1)).unwrap()));
        }
        if let Notice::Stats(stats) = next(&mut follower).await {
            let window = stats.of_sequences.unwrap().allocation;
            assert!(window.p50_ns <= window.p99_ns && window.p99_ns <= window.max_ns, "{window:?}");
            assert_eq!(window.samples > 0, window.max_ns > 0, "{window:?}");
            samples.push(window.samples);
        }
    }
    let total = served.pool.metrics().latencies.allocate.count();
    assert!(total > 0, "some were timed");
    assert_eq!(samples.iter().sum::<u64>(), total, "each counts once: {samples:?}");
    served.stop().await;
}

/// A client that reads events from a socket.
struct Reader {
    stream: TcpStream,
    text: String,
}

impl Reader {
    async fn open(served: &Served, headers: &str) -> Self {
        let mut stream = TcpStream::connect(served.address).await.unwrap();
        let request = format!("GET /events HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        Self { stream, text: String::new() }
    }

    /// Reads up to this number of ids, and returns the text and the ids.
    async fn ids(&mut self, count: usize) -> Vec<String> {
        loop {
            let ids: Vec<_> =
                self.text.lines().filter_map(|line| Some(line.strip_prefix("id: ")?.to_owned())).collect();
            if ids.len() >= count && self.text.ends_with("\n\n\r\n") {
                return ids;
            }
            let mut bytes = [0; 4096];
            let read = timeout(PATIENCE, self.stream.read(&mut bytes)).await.expect("events come").unwrap();
            assert!(read > 0, "the answer ended: {}", self.text);
            self.text += &String::from_utf8_lossy(&bytes[..read]);
        }
    }
}

fn number(id: &str) -> u64 {
    id.split_once('-').unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn a_follower_that_was_cut_off_continues() {
    let served = Served::start(None, fast());
    let mut reader = Reader::open(&served, "").await;
    let before = reader.ids(3).await;
    assert!(reader.text.contains("content-type: text/event-stream"), "{}", reader.text);
    assert!(reader.text.contains("event: map\n"), "{}", reader.text);
    drop(reader);
    // Without a gap and without a repetition, although events came meanwhile.
    sleep(Duration::from_millis(100)).await;
    let last = before.last().unwrap();
    let mut reader = Reader::open(&served, &format!("Last-Event-ID: {last}\r\n")).await;
    let after = reader.ids(3).await;
    assert_eq!(number(&after[0]), number(last) + 1);
    assert!(after.windows(2).all(|pair| number(&pair[0]) + 1 == number(&pair[1])), "{after:?}");
    assert!(!reader.text.contains("event: map\n"), "nothing is repeated: {}", reader.text);
    // Of an earlier process, of the future, or of none: everything from the beginning.
    let (epoch, _) = last.split_once('-').unwrap();
    for unknown in ["1-5", &format!("{epoch}-999999"), &format!("{epoch}-{}", u64::MAX), "x", "-", "\u{e9}"] {
        let mut reader = Reader::open(&served, &format!("Last-Event-ID: {unknown}\r\n")).await;
        reader.ids(1).await;
        assert!(reader.text.contains("event: map\n"), "{unknown}: {}", reader.text);
    }
    served.stop().await;
}

#[tokio::test]
async fn followers_are_bounded() {
    let served = Served::start(None, Limits { followers: 2, ..fast() });
    let mut followers = [served.client(None).follow(), served.client(None).follow()];
    for follower in &mut followers {
        next(follower).await;
    }
    let error = served.client(None).follow().next().await.unwrap_err();
    assert!(matches!(&error, ClientError::Problem(problem) if problem.status == 429), "{error}");
    drop(followers);
    timeout(PATIENCE, async {
        while served.client(None).follow().next().await.is_err() {
            sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("a place is free");
    served.stop().await;
}

#[tokio::test]
async fn a_token_is_needed_to_follow() {
    let served = Served::start(Some(super::super::tests::TOKEN), fast());
    let error = served.client(None).follow().next().await.unwrap_err();
    assert!(matches!(&error, ClientError::Problem(problem) if problem.status == 401), "{error}");
    next(&mut served.client(Some(super::super::tests::TOKEN)).follow()).await;
    served.stop().await;
}

/// It costs a place until the ring has overtaken it, and then nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_that_never_reads_is_cut() {
    // Long events, so that the buffers of the system fill.
    let name = "n".repeat(64 << 10);
    let limits = Limits { followers: 1, ..limits(Duration::from_millis(1)) };
    let served = Served::start_as(None, limits, |_| Arc::new(PoolAdmin::new(name, pool())));
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(2048).unwrap();
    let mut silent = socket.connect(served.address).await.unwrap();
    silent.write_all(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    sleep(Duration::from_millis(50)).await;
    assert!(served.client(None).follow().next().await.is_err(), "the place is taken");
    timeout(PATIENCE, async {
        while served.client(None).follow().next().await.is_err() {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await
    .expect("the place is free again");
    // The connection has ended: what was buffered can be read, and then it is over.
    let mut buffered = Vec::new();
    let _ = timeout(PATIENCE, silent.read_to_end(&mut buffered)).await.expect("the connection ends");
    served.stop().await;
}

#[tokio::test]
async fn followers_do_not_hold_up_the_end() {
    let served = Served::start(None, fast());
    let mut follower = served.client(None).follow();
    next(&mut follower).await;
    let begun = std::time::Instant::now();
    served.stop().await;
    // The test's server drains for 5 seconds at most.
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    let error = timeout(PATIENCE, async {
        loop {
            if let Err(error) = follower.next().await {
                return error;
            }
        }
    });
    let error = error.await.expect("it notices");
    assert!(matches!(error, ClientError::Broken { .. }), "{error}");
    let error = follower.next().await.unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn the_client_refuses_what_is_no_event() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";
    let long = format!("data: {}", "x".repeat(5 << 20));
    let answers = [
        (format!("{head}event: stats\ndata: {{}}\n\n"), "event stats"),
        (format!("{head}event: map\ndata: nothing\n\n"), "event map"),
        (format!("{head}: a comment\n\nevent: later\ndata: 1\n\nevent: map\nid: 3"), "have ended"),
        (format!("{head}{long}"), "more than"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi".to_owned(), "content type"),
    ];
    let texts: Vec<_> = answers.iter().map(|(text, _)| text.clone()).collect();
    tokio::spawn(async move {
        for text in texts {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(text.as_bytes()).await;
        }
    });
    let mut follower = super::super::Client::new(address.parse().unwrap(), None).follow();
    for (_, reason) in answers {
        let error = timeout(PATIENCE, follower.next()).await.unwrap().unwrap_err();
        assert!(error.to_string().contains(reason), "{reason}: {error}");
    }
}

#[test]
fn notices_have_their_names() {
    let map = Notice::Map(Cells { frames: 3, group: 1, order: 1, cells: "rrf".to_owned() });
    let value = serde_json::to_value(&map).unwrap();
    assert_eq!(value["event"], Value::from(map.name()));
    assert_eq!(serde_json::from_value::<Notice>(value).unwrap(), map);
    assert!(["stats", "map", "map_changes", "migrations"].into_iter().all(Notice::is_known));
    assert!(!Notice::is_known("message"));
}

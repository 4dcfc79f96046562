//! Events of a pool's cache over ZeroMQ: a router in Python that does not use kvpool ends with exactly
//! the cached blocks, through lost connections, replays, lost events and a restart; and subscribers that
//! never read, or that send garbage, cost nothing.
//!
//! The router needs Python with `pyzmq` and `msgpack`: `KVPOOL_ZMQ_PYTHON` names the interpreter. Without
//! them its tests print that they are skipped; with the variable, they fail.

#[path = "../../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;
mod router;

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use kvpool::storage::{Dtype, KvLayout};
use kvpool::{Pool, SequenceId};
use kvpool_node::events::{KvEventError, KvEventPublisher, KvEventSettings};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

use router::{Router, settled};

const LOCAL: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
const TOPIC: &str = "kv";

/// The longest time of any step.
const WAIT: Duration = Duration::from_secs(60);

fn settings() -> KvEventSettings {
    let mut settings = KvEventSettings::new(LOCAL);
    settings.replay = Some(LOCAL);
    settings.topic = TOPIC.into();
    settings
}

/// A pool whose subscribers have a queue of this many events.
fn pool(blocks: usize, events: usize) -> Pool {
    kv::builder(kv::plain(), blocks).prefix_cache(kv::config().events(events)).build().unwrap()
}

/// Runs prompts that share prefixes and evict each other, on two threads.
fn traffic(pool: &Pool, rounds: u32, seed: u64) {
    kvpool_testkit::threads::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                let mut rng = fastrand::Rng::with_seed(seed + thread);
                for round in 0..rounds {
                    let id = (seed << 40) + (thread << 32) + u64::from(round);
                    let tokens = kv::prompt(rng.u32(1..9), rng.usize(4..120));
                    // Both threads compute some prompts at once, so that blocks have equal hashes.
                    drop(kv::admit(pool, id, &tokens));
                    if rng.u32(0..400) == 0 {
                        pool.clear_prefix_cache();
                    }
                }
            });
        }
    });
}

/// A relay that refuses and cuts connections when told to.
async fn relay(to: SocketAddr) -> (SocketAddr, watch::Sender<bool>) {
    let listener = TcpListener::bind(LOCAL).await.unwrap();
    let address = listener.local_addr().unwrap();
    let (open, is_open) = watch::channel(true);
    tokio::spawn(async move {
        while let Ok((mut here, _)) = listener.accept().await {
            let mut is_open = is_open.clone();
            if !*is_open.borrow() {
                continue;
            }
            tokio::spawn(async move {
                let Ok(mut there) = TcpStream::connect(to).await else { return };
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut here, &mut there) => {}
                    _ = is_open.wait_for(|is_open| !is_open) => {}
                }
            });
        }
    });
    (address, open)
}

async fn run(pool: &Pool, rounds: u32, seed: u64) {
    let pool = pool.clone();
    tokio::task::spawn_blocking(move || traffic(&pool, rounds, seed)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_ends_with_the_cached_blocks_through_lost_connections() {
    // The queue holds all events of the test, however late the publisher is.
    let pool = pool(150, 1 << 17);
    run(&pool, 50, 1).await;
    let publisher = KvEventPublisher::start(pool.clone(), settings()).await.unwrap();
    let (address, open) = relay(publisher.address()).await;
    let Some(mut router) = Router::start(address, publisher.replay_address().unwrap()) else { return };
    let first = router.agrees(&pool, &publisher).await;
    assert_eq!(first["clears"], 1, "one listing: {first}");
    let listings = publisher.counters().snapshots;
    let count = |counts: &Value, name: &str| counts[name].as_u64().unwrap();
    let (mut last, mut seed) = (first, 10);
    for _ in 0..4 {
        // A batch that was sent, then one that was missed. How much is in a batch, and how soon the router
        // has a connection again, is up to the machine.
        for (is_open, name) in [(true, "live"), (false, "replayed")] {
            open.send_replace(is_open);
            let (before, start) = (count(&last, name), Instant::now());
            loop {
                seed += 2;
                run(&pool, 150, seed).await;
                last = router.agrees(&pool, &publisher).await;
                if count(&last, name) > before {
                    break;
                }
                assert!(start.elapsed() < WAIT, "no batch was {name}: {last}");
            }
        }
    }
    assert!(count(&last, "removed") > 1000 && count(&last, "tokens") > 1000, "{last}");
    let counters = publisher.counters();
    assert_eq!(
        (counters.resyncs, counters.snapshots),
        (0, listings),
        "only the first replay needs a listing"
    );
    // Again, with nothing cached.
    pool.clear_prefix_cache();
    let empty = router.agrees(&pool, &publisher).await;
    assert_eq!(empty["hashes"], Value::Array(vec![]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_agrees_when_events_are_lost_and_the_history_is_short() {
    let pool = pool(150, 16);
    let mut settings = settings();
    settings.history_batches = 3;
    let publisher = KvEventPublisher::start(pool.clone(), settings).await.unwrap();
    let (address, open) = relay(publisher.address()).await;
    run(&pool, 100, 3).await;
    let Some(mut router) = Router::start(address, publisher.replay_address().unwrap()) else { return };
    for seed in 2..6 {
        run(&pool, 150, seed * 10).await;
        open.send_replace(false);
        run(&pool, 150, seed * 10 + 2).await;
        open.send_replace(true);
        router.agrees(&pool, &publisher).await;
    }
    let counters = publisher.counters();
    assert!(counters.resyncs > 0, "the pool's queue was too short: {counters:?}");
    assert!(counters.snapshots > 0, "the history was too short: {counters:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_agrees_after_a_restart() {
    let pool = pool(150, 4096);
    let publisher = KvEventPublisher::start(pool.clone(), settings()).await.unwrap();
    let (events, replay) = (publisher.address(), publisher.replay_address().unwrap());
    let Some(mut router) = Router::start(events, replay) else { return };
    run(&pool, 300, 5).await;
    router.agrees(&pool, &publisher).await;
    drop(publisher);
    run(&pool, 100, 7).await;
    let mut again = settings();
    (again.listen, again.replay) = (events, Some(replay));
    let publisher = loop {
        match KvEventPublisher::start(pool.clone(), again.clone()).await {
            Ok(publisher) => break publisher,
            Err(KvEventError::Listen { .. }) => tokio::time::sleep(Duration::from_millis(20)).await,
            Err(error) => panic!("{error}"),
        }
    };
    // The router sees a gap, and gets a listing.
    run(&pool, 100, 9).await;
    router.agrees(&pool, &publisher).await;
    assert!(publisher.counters().snapshots > 0);
}

/// The greeting and `READY` of a SUB socket, or of another one.
fn greeting(socket: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    let property = [&b"\x05READY\x0bSocket-Type"[..], &(socket.len() as u32).to_be_bytes(), socket].concat();
    bytes.extend([4, property.len() as u8]);
    bytes.extend(property);
    bytes
}

/// Sends bytes on a connection; returns whether the other side closes it within some time.
async fn ends_within(time: Duration, address: SocketAddr, bytes: &[u8]) -> bool {
    let mut stream = TcpStream::connect(address).await.unwrap();
    // It may be closed before all is sent.
    let _ = stream.write_all(bytes).await;
    let mut got = Vec::new();
    tokio::time::timeout(time, stream.read_to_end(&mut got)).await.is_ok()
}

async fn is_closed(address: SocketAddr, bytes: &[u8]) -> bool {
    ends_within(WAIT, address, bytes).await
}

async fn stays_open(address: SocketAddr, bytes: &[u8]) -> bool {
    !ends_within(Duration::from_secs(2), address, bytes).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_send_garbage_are_closed() {
    let publisher = KvEventPublisher::start(pool(50, 64), settings()).await.unwrap();
    let (events, replay) = (publisher.address(), publisher.replay_address().unwrap());
    let sub = greeting(b"SUB");
    assert!(stays_open(events, &[&sub[..], b"\0\x01\x01"].concat()).await, "a subscription to all");
    assert!(is_closed(events, b"GET / HTTP/1.1\r\n\r\n").await);
    assert!(is_closed(events, &greeting(b"PUSH")).await);
    assert!(is_closed(replay, &sub).await);
    let huge = [&sub[..], &[2, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]].concat();
    assert!(is_closed(events, &huge).await);
    assert!(is_closed(events, &[&sub[..], &b"\0\x02\x01x".repeat(65)].concat()).await, "too many topics");
    let req = greeting(b"REQ");
    for request in
        [&b"\0\x08\0\0\0\0\0\0\0\0"[..], b"\x01\0\0\0", b"\x01\0\0\x09123456789", b"\x01\x01x\0\x011"]
    {
        assert!(is_closed(replay, &[&req[..], request].concat()).await, "{request:?}");
    }
    let mut settings = KvEventSettings::new(events);
    assert!(matches!(
        KvEventPublisher::start(pool(50, 64), settings.clone()).await,
        Err(KvEventError::Listen { address, .. }) if address == events
    ));
    settings.topic = "x".repeat(256);
    let long = KvEventPublisher::start(pool(50, 64), settings.clone()).await;
    assert!(matches!(long, Err(KvEventError::Topic { bytes: 256 })));
    settings.topic.clear();
    let none = kv::builder(kv::plain(), 50).build().unwrap();
    assert!(matches!(KvEventPublisher::start(none, settings).await, Err(KvEventError::NoCache)));
}

/// Reads a message of a PUB socket: its sequence number, or `None` at the end of the connection.
async fn number(stream: &mut TcpStream) -> Option<u64> {
    let mut number = None;
    for frame in 0.. {
        let flags = stream.read_u8().await.ok()?;
        let length = if flags & 2 == 0 {
            stream.read_u8().await.ok()?.into()
        } else {
            stream.read_u64().await.ok()?
        };
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body).await.ok()?;
        if frame == 1 {
            number = Some(u64::from_be_bytes(body.try_into().unwrap()));
        }
        if flags & 1 == 0 {
            break;
        }
    }
    number
}

/// Those that read are sent the last batch; those that do not read are cut off at the deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_that_closes_sends_what_it_has() {
    for reads in [true, false] {
        let pool = large();
        let publisher = KvEventPublisher::start(pool.clone(), settings()).await.unwrap();
        let socket = TcpSocket::new_v4().unwrap();
        if !reads {
            socket.set_recv_buffer_size(4096).unwrap();
        }
        let mut stream = socket.connect(publisher.address()).await.unwrap();
        // One that never says who it is does not keep it.
        let _silent = TcpStream::connect(publisher.replay_address().unwrap()).await.unwrap();
        stream.write_all(&[&greeting(b"SUB")[..], b"\0\x01\x01"].concat()).await.unwrap();
        let mut theirs = vec![0; 64 + 2 + 25];
        stream.read_exact(&mut theirs).await.unwrap();
        // Until the subscription is known: a batch arrives.
        let mut other = 10_000;
        while tokio::time::timeout(Duration::from_millis(20), stream.peek(&mut [0])).await.is_err() {
            fill(&pool, 1, other);
            other += 1;
        }
        let newest = publisher.counters().newest;
        let last = async {
            let mut last = None;
            while let Some(number) = number(&mut stream).await {
                last = Some(number);
            }
            last
        };
        let blocks = if reads { 100 } else { 6_000 };
        let work = async {
            let busy = pool.clone();
            tokio::task::spawn_blocking(move || fill(&busy, blocks, 0)).await.unwrap();
            publisher.close(Instant::now() + Duration::from_secs(if reads { 20 } else { 1 })).await
        };
        if reads {
            let (last, is_closed) = tokio::join!(last, work);
            assert!(is_closed);
            // The events of all blocks, in at least one batch behind those before.
            assert!(last.unwrap() > newest, "{last:?} {newest}");
        } else {
            let begun = Instant::now();
            assert!(!work.await, "it was not sent everything");
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
    }
}

/// A pool of large blocks without bytes, whose events are large.
fn large() -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::Bf16).block_tokens(512);
    let builder = Pool::builder(layout.build().unwrap()).blocks(200).without_storage();
    builder.prefix_cache(kv::config()).build().unwrap()
}

/// Returns the processor time of this thread.
fn processor_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time to a valid place.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) }, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Caches this many blocks, one after another, and returns the processor time that it took: other
/// processes do not count. An allocation that waited for a subscriber would never end.
fn fill(pool: &Pool, blocks: usize, first: u32) -> Duration {
    let begun = processor_time();
    for n in 0..blocks as u32 {
        let tokens: Vec<u32> = (0..513).map(|token| (first + n) * 100_000 + token).collect();
        let mut sequence = pool.sequence(SequenceId(u64::from(first + n))).tokens(&tokens).unwrap();
        let mut batch = pool.begin_batch();
        batch.append(&mut sequence, 513).unwrap();
        batch.finish();
    }
    processor_time() - begun
}

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    status.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// Connects a socket of a kind, sends bytes, and reads nothing.
async fn silent(address: SocketAddr, socket: &[u8], bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(&[&greeting(socket)[..], bytes].concat()).await.unwrap();
    stream
}

/// A peer that asks and never reads keeps its place for a bounded time only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_never_read_give_their_places_up() {
    let (pool, mut settings) = (large(), settings());
    (settings.connections, settings.patience) = (1, Duration::from_millis(300));
    let publisher = KvEventPublisher::start(pool.clone(), settings).await.unwrap();
    fill(&pool, 200, 0);
    // The whole cache, again and again: far more than the buffers of a connection take.
    let requests = b"\x01\0\0\x08\0\0\0\0\0\0\0\0".repeat(60);
    let replay = silent(publisher.replay_address().unwrap(), b"DEALER", &requests).await;
    let events = silent(publisher.address(), b"SUB", b"\0\x01\x01").await;
    while publisher.counters().subscribers == 0 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for first in (1..60).map(|round| round * 200) {
        fill(&pool, 200, first);
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    let (req, sub) = (greeting(b"REQ"), greeting(b"SUB"));
    for (address, bytes) in [
        (publisher.replay_address().unwrap(), [&req[..], b"\x01\0\0\x08\0\0\0\0\0\0\0\0"].concat()),
        (publisher.address(), [&sub[..], b"\0\x01\x01"].concat()),
    ] {
        let began = Instant::now();
        while !stays_open(address, &bytes).await {
            assert!(began.elapsed() < WAIT, "{:?}", publisher.counters());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    drop((replay, events));
}

/// Connections that say nothing, or greet and subscribe to nothing, give way to one that does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_say_nothing_keep_no_subscriber_out() {
    let mut settings = settings();
    settings.connections = 4;
    let publisher = KvEventPublisher::start(pool(50, 64), settings).await.unwrap();
    let (events, replay) = (publisher.address(), publisher.replay_address().unwrap());
    let mut silents = Vec::new();
    for _ in 0..20 {
        silents.push(TcpStream::connect(events).await.unwrap());
        silents.push(silent(events, b"SUB", b"").await);
        silents.push(TcpStream::connect(replay).await.unwrap());
    }
    let subscription = [&greeting(b"SUB")[..], b"\0\x01\x01"].concat();
    let request = [&greeting(b"REQ")[..], b"\x01\0\0\x08\0\0\0\0\0\0\0\0"].concat();
    assert!(stays_open(events, &subscription).await && stays_open(replay, &request).await);
    let is_open = |stream: &TcpStream| {
        let mut bytes = [0; 4096];
        loop {
            match stream.try_read(&mut bytes) {
                Ok(1..) => {}
                Ok(0) => return false,
                Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
            }
        }
    };
    // Those that subscribed have places of their own, which no other connection takes. One is
    // refused while the place of the subscription above has not been given back.
    let (began, mut subscribers) = (Instant::now(), Vec::new());
    loop {
        while subscribers.len() < 4 {
            subscribers.push(silent(events, b"SUB", b"\0\x01\x01").await);
        }
        let is_full = !stays_open(events, &subscription).await;
        subscribers.retain(is_open);
        if is_full && subscribers.len() == 4 {
            break;
        }
        assert!(began.elapsed() < WAIT, "four have places, and a fifth one has none");
    }
    assert!(is_closed(events, &subscription).await, "a sixth one");
    assert!(subscribers.iter().all(is_open), "a subscriber was cut");
    assert!(silents.iter().filter(|stream| is_open(stream)).count() <= 8, "silent connections add up");
}

/// In a process of its own: it measures memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    if std::env::var_os("KVPOOL_TEST_NEVER_READS").is_none() {
        return;
    }
    let pool = large();
    let mut settings = settings();
    settings.history_bytes = 256 << 10;
    let publisher = KvEventPublisher::start(pool.clone(), settings).await.unwrap();
    let work = async |blocks, first| {
        let pool = pool.clone();
        tokio::task::spawn_blocking(move || fill(&pool, blocks, first)).await.unwrap()
    };
    work(500, 0).await;
    let mut fastest = [Duration::MAX; 2];
    let mut silent = Vec::new();
    let mut before = 0;
    for round in 0..4 {
        let side = round % 2;
        if side == 0 {
            silent.clear();
            while publisher.counters().subscribers > 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        } else {
            for _ in 0..8 {
                let socket = TcpSocket::new_v4().unwrap();
                // So that the system holds little of what is sent.
                socket.set_recv_buffer_size(4096).unwrap();
                let mut stream = socket.connect(publisher.address()).await.unwrap();
                stream.write_all(&[&greeting(b"SUB")[..], b"\0\x01\x01"].concat()).await.unwrap();
                silent.push(stream);
            }
            while publisher.counters().subscribers < 8 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        if round == 1 {
            before = resident_bytes();
        }
        let took = work(3_000, 1_000 + round * 3_000).await;
        fastest[side as usize] = fastest[side as usize].min(took);
        settled(&publisher).await;
    }
    let grown = resident_bytes().saturating_sub(before);
    // One of them reads after all, and finds that it missed much.
    let mut late = silent.pop().unwrap();
    let reading = tokio::spawn(async move {
        let mut bytes = vec![0; 65536];
        while late.read(&mut bytes).await.is_ok_and(|length| length > 0) {}
    });
    let begun = Instant::now();
    while publisher.counters().skipped_batches == 0 {
        assert!(begun.elapsed() < WAIT, "{:?}", publisher.counters());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    reading.abort();
    println!("grown {grown}");
    println!("alone {} silent {}", fastest[0].as_micros(), fastest[1].as_micros());
}

#[test]
fn subscribers_that_never_read_cost_no_memory_and_slow_nothing_down() {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture", "--test-threads=1"])
        .env("KVPOOL_TEST_NEVER_READS", "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let number = |name: &str| -> u64 {
        let mut words = text.split_whitespace().skip_while(|word| *word != name);
        words.nth(1).unwrap().parse().unwrap()
    };
    // Each round publishes more than 7 MB, above what the system's buffers of a connection hold; 8
    // subscribers that hold it all would have 56 MB a round.
    assert!(number("grown") < 24 << 20, "{text}");
    assert!(number("silent") < 2 * number("alone"), "{text}");
}

/// Threads that cache and clear while publishers come and go.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishers_come_and_go_under_traffic() {
    let pool = pool(100, 64);
    let stop = Arc::new(AtomicBool::new(false));
    let (busy, is_stopped) = (pool.clone(), stop.clone());
    let threads = tokio::task::spawn_blocking(move || {
        for seed in 0.. {
            if is_stopped.load(Relaxed) {
                return;
            }
            traffic(&busy, 20, seed);
        }
    });
    for _ in 0..20 {
        let publisher = KvEventPublisher::start(pool.clone(), settings()).await.unwrap();
        let mut stream = TcpStream::connect(publisher.address()).await.unwrap();
        stream.write_all(&[&greeting(b"SUB")[..], b"\0\x01\x01"].concat()).await.unwrap();
        let mut got = [0; 300];
        stream.read_exact(&mut got).await.unwrap();
        drop(publisher);
        // Its connections end with it.
        while stream.read(&mut got).await.is_ok_and(|length| length > 0) {}
    }
    stop.store(true, Relaxed);
    threads.await.unwrap();
    kv::is_idle(&pool);
}

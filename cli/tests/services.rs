//! `kvpool serve` with a shared tier, published events and a membership, end to end.
//!
//! Redis and etcd are real servers, which die, hang and return. Without their programs the tests
//! that need them say that they were skipped.

use super::common::{self, servers};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use common::live::{Node, program, run, said, token, wait_until};
use common::openmetrics::{read, value};
use rustix::process::Signal;
use serde_json::Value;
use servers::Server;

/// A node with a token, whose statistics are read with it.
struct Member {
    node: Node,
    token: String,
}

impl Member {
    fn start(token: &str, flags: &str) -> Self {
        Self { node: Node::start(&format!("serve {token} {flags}")), token: token.to_owned() }
    }

    fn extra(&self, pointer: &str) -> Value {
        let stats = self.node.json(&format!("stats {}", self.token));
        stats["extra"].pointer(pointer).cloned().unwrap_or_default()
    }

    fn count(&self, pointer: &str) -> u64 {
        self.extra(pointer).as_u64().unwrap_or_default()
    }

    /// Checks that no byte was wrong and that the audit agrees, and ends the node. Returns its
    /// errors.
    fn end(self) -> String {
        assert!(self.extra("/load").is_null() || self.count("/load/tokens_verified") > 0);
        self.node.end_well(&self.token)
    }
}

/// Starts `kvpool serve` with flags that it refuses; returns what it says.
fn refused(flags: &str) -> String {
    let output = run(&format!("serve {flags}"));
    assert_eq!(output.status.code(), Some(2), "{flags}: {}", said(&output));
    assert!(output.stdout.is_empty(), "{flags}");
    said(&output)
}

#[test]
fn bad_settings_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), "one-token-of-the-tests");
    let file = folder.path().join("kvpool.toml");
    fs::write(&file, "tier_namespaces = \"m\"\nkv_event = \"tcp://*:1\"\n").unwrap();
    let said = refused(&format!("--config {}", file.display()));
    for part in [
        "kvpool.toml:1: there is no key `tier_namespaces`; did you mean `tier_namespace`?",
        "kvpool.toml:2: there is no key `kv_event`; did you mean `kv_events`?",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    for (flags, part) in [
        ("--tier redis://127.0.0.1:1", "--tier: tier needs tier_namespace as well"),
        ("--tier redis://127.0.0.1:1 --tier-namespace m", "--tier: tier needs hash_key_file as well"),
        (
            "--tier redis://127.0.0.1 --tier-namespace m",
            "--tier: tier = \"redis://127.0.0.1\": a port is missing",
        ),
        ("--tier peer://b --tier-namespace m", "no store is named by \"peer\"; accepted: redis://HOST"),
        (
            "--membership etcd://127.0.0.1/x",
            "--membership: membership = \"etcd://127.0.0.1/x\": a server is not HOST:PORT",
        ),
        (
            "--membership etcd://127.0.0.1:1/x --membership-ca ca.pem",
            "--membership-ca: membership_ca = \"ca.pem\": it is for servers of an etcds:// address",
        ),
        (
            "--membership etcds://127.0.0.1:1/x --membership-key key.pem",
            "--membership-key: membership_key needs membership_cert as well",
        ),
        (
            "--kv-events tcp://localhost:1",
            "--kv-events: kv_events = \"tcp://localhost:1\": neither an IP address",
        ),
    ] {
        let said = refused(flags);
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    // What this program was built without, or whose library is not here.
    let tier = format!("{token} --tier-namespace m --tier");
    let expected = match cfg!(feature = "mooncake") {
        true => "--tier: mooncake: ",
        false => {
            "--tier: this program was built without the feature `mooncake`: build it with `cargo install --path cli --features mooncake`"
        }
    };
    let said = refused(&format!("{tier} mooncake://127.0.0.1:1"));
    assert!(said.contains(expected), "{said}");
    if !cfg!(feature = "redis") {
        let said = refused(&format!("{tier} redis://127.0.0.1:1"));
        assert!(said.contains("build it with `cargo install --path cli --features redis`"), "{said}");
    }
    if !cfg!(feature = "etcd") {
        let said = refused("--membership etcd://127.0.0.1:1/x");
        assert!(said.contains("--membership: this program was built without the feature `etcd`: build it with `cargo install --path cli --features etcd`"), "{said}");
    }
    // An address in use.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let said = refused(&format!("--kv-events tcp://{address}"));
    assert!(said.contains(&format!("--kv-events: cannot listen on {address}: ")), "{said}");
}

/// What a tier that cannot be reached costs, and what a reload does not take over.
#[cfg(feature = "redis")]
#[test]
fn changes_that_need_a_restart_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (token, file) = (token(folder.path(), "one-token-of-the-tests"), folder.path().join("kvpool.toml"));
    let text = "tier = \"redis://127.0.0.1:1\"\ntier_namespace = \"m\"\nkv_events = \"tcp://127.0.0.1:0\"\n";
    fs::write(&file, text).unwrap();
    let node =
        Node::start_with(program().args(["serve", "--config"]).arg(&file).args(token.split_whitespace()));
    fs::write(&file, format!("{}[peers]\nc = \"localhost:8\"\n", text.replace("\"m\"", "\"n\""))).unwrap();
    node.reload("reloaded; changes of peers: +c=localhost:8; changes that need a restart: tier\n");
    fs::write(&file, "tier = \"redis://127.0.0.1:1\"\n").unwrap();
    node.reload("tier needs tier_namespace as well");
    fs::write(&file, "").unwrap();
    node.reload("changes of peers: -c=localhost:8; changes that need a restart: tier, kv_events\n");
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("not reloaded: "), "{errors}");
}

#[cfg(feature = "redis")]
const SMALL: &str = "--size 6000 --load conversations --load-rest 2ms --tier-namespace tests --tier";

/// A node that never stores hits what another one computed.
#[cfg(feature = "redis")]
#[test]
fn prefixes_of_one_node_are_hits_on_another() {
    let Some(mut redis) = Server::redis() else { return };
    redis.run();
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), "one-token-of-the-tests");
    // No call fails, and everything is stored at the end, however slow the machine is.
    let tier = format!("redis://127.0.0.1:{} --tier-patience 30s --drain 60s", redis.port());
    let a = Member::start(&token, &format!("--name a {SMALL} {tier}"));
    wait_until("blocks are stored", || a.count("/tiers/redis/stored") > 1000);
    let b = Member::start(&token, &format!("--name b {SMALL} {tier} --tier-policy read-only"));
    wait_until("blocks are hit", || b.count("/tiers/redis/pool/fetched_blocks") > 500);
    assert_eq!((b.count("/tiers/redis/stored"), b.count("/tiers/redis/bad_values")), (0, 0));
    wait_until("conversations with them are completed", || {
        b.count("/load/completed") > 20 && b.count("/load/cached_tokens") > 0
    });
    // Of another model: not a block.
    let other = format!("--name c {} {tier} --tier-policy read-only", SMALL.replace("tests", "others"));
    let c = Member::start(&token, &other);
    wait_until("it asks", || c.count("/tiers/redis/pool/asked") > 10);
    assert_eq!(c.count("/tiers/redis/hits"), 0);
    let text = b.node.text(&format!("stats {token}"));
    for part in ["tiers: redis", "pool fetched blocks", "pool fetched bytes", "breaker"] {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    let metrics = scrape(&b);
    assert!(value(&metrics, "kvpool_tier_fetched_blocks_total", &[("tier", "redis")]) > 500.0);
    assert_eq!(value(&metrics, "kvpool_tier_up", &[("tier", "redis")]), 1.0);
    // What was cached at the end is there.
    let before = a.count("/tiers/redis/pool/stored_blocks");
    for member in [a, b, c] {
        assert_eq!(member.end(), "");
    }
    assert!(redis.keys() >= before, "{} {before}", redis.keys());
}

#[cfg(feature = "redis")]
fn scrape(member: &Member) -> Vec<common::openmetrics::Sample> {
    let headers = "Authorization: Bearer one-token-of-the-tests\r\n";
    read(&member.node.http("GET /metrics", headers, "").1).unwrap()
}

/// A server that refuses, dies and hangs costs hits, and neither bytes nor the end.
/// Blocks wait for a tier that cannot be reached: the end does not wait for it, whatever the drain.
#[cfg(feature = "redis")]
#[test]
fn a_dead_tier_does_not_hold_up_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let a = Member::start(
        &token(folder.path(), "one-token-of-the-tests"),
        &format!("--name a {SMALL} redis://127.0.0.1:1 --tier-wait 10ms --drain 60s"),
    );
    wait_until("the breaker opens", || a.extra("/tiers/redis/breaker") == "open");
    wait_until("requests are served", || a.count("/load/completed") > 5);
    let begun = Instant::now();
    let (code, errors) = a.node.end(Signal::TERM);
    // Less than the drain.
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}: {errors}", begun.elapsed());
    assert!(code == Some(0) && errors.contains("the tier was not given all cached blocks"), "{errors}");
}

#[cfg(feature = "redis")]
#[test]
fn a_redis_that_refuses_dies_and_hangs() {
    let Some(mut redis) = Server::redis() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (token, tier) =
        (token(folder.path(), "one-token-of-the-tests"), format!("redis://127.0.0.1:{}", redis.port()));
    let flags = format!("--name a {SMALL} {tier} --tier-patience 500ms --tier-wait 500ms --drain 2s");
    let a = Member::start(&token, &flags);
    let goes_on = |what: &str| {
        let before = a.count("/load/completed");
        wait_until(what, || a.count("/load/completed") > before + 5);
    };
    let breaker = || a.extra("/tiers/redis/breaker").as_str().unwrap_or_default().to_owned();
    let stores = |what: &str| {
        let before = a.count("/tiers/redis/stored");
        wait_until(what, || a.count("/tiers/redis/stored") > before + 100);
    };
    wait_until("the breaker opens without a server", || breaker() == "open");
    goes_on("requests are served without a server");
    redis.run();
    stores("blocks are stored once it is there");
    redis.kill();
    wait_until("the breaker opens when it dies", || breaker() == "open");
    goes_on("requests are served when it dies");
    redis.run();
    stores("blocks are stored when it returns");
    redis.signal(Signal::STOP);
    wait_until("the breaker opens when it hangs", || breaker() == "open");
    goes_on("requests are served while it hangs");
    assert_eq!(a.node.json(&format!("audit {token}"))["sound"], true);
    redis.signal(Signal::CONT);
    stores("blocks are stored when it goes on");
    redis.signal(Signal::STOP);
    // The end waits for it no longer than the drain, of which transfers have a part: it would not
    // end otherwise.
    a.end();
    redis.signal(Signal::CONT);
}

/// A SUB socket that subscribes to everything.
struct Subscriber(TcpStream);

impl Subscriber {
    fn connect(address: &str) -> Self {
        let mut stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
        let mut bytes = vec![0; 64];
        (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
        bytes[12..16].copy_from_slice(b"NULL");
        bytes.extend(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB\0\x01\x01");
        stream.write_all(&bytes).unwrap();
        stream.read_exact(&mut [0; 64 + 27]).unwrap();
        Self(stream)
    }

    /// Reads a message; returns its topic and number, or `None` at the end.
    fn next(&mut self) -> Option<(Vec<u8>, u64)> {
        let mut frames = Vec::new();
        loop {
            let mut head = [0; 2];
            self.0.read_exact(&mut head).ok()?;
            let mut length = u64::from(head[1]);
            if head[0] & 2 != 0 {
                let mut rest = [0; 7];
                self.0.read_exact(&mut rest).ok()?;
                length = rest.iter().fold(length, |sum, byte| sum << 8 | u64::from(*byte));
            }
            let mut body = vec![0; length as usize];
            self.0.read_exact(&mut body).ok()?;
            frames.push(body);
            if head[0] & 1 == 0 {
                let number = u64::from_be_bytes(frames[1].as_slice().try_into().unwrap());
                return Some((frames.swap_remove(0), number));
            }
        }
    }
}

/// A server that answers each command with this.
#[cfg(feature = "redis")]
fn answers_with(answer: &'static [u8]) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(read @ 1..) = stream.read(&mut bytes) {
                    let commands = bytes[..read].iter().filter(|byte| **byte == b'*').count();
                    if stream.write_all(&answer.repeat(commands)).is_err() {
                        return;
                    }
                }
            });
        }
    });
    port
}

/// A password that is wrong is told, in the log, the statistics and the metrics, and not 10,000
/// times.
#[cfg(feature = "redis")]
#[test]
fn a_tier_that_refuses_the_password_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let port = answers_with(b"-WRONGPASS invalid username-password pair or user is disabled.\r\n");
    let tier = format!("--tier redis://:secret@127.0.0.1:{port} --tier-namespace x");
    let node = Member::start(
        &token(folder.path(), "one-token-of-the-tests"),
        &format!("--name n1 --load conversations {tier}"),
    );
    let begun = Instant::now();
    wait_until("it fails often", || node.count("/tiers/redis/failed") > 500);
    wait_until("it says why", || node.extra("/tiers/redis/last_error").is_string());
    let last = node.extra("/tiers/redis/last_error");
    let last = last.as_str().unwrap();
    assert!(last.contains("WRONGPASS") || last.contains("AuthenticationFailed"), "{last}");
    assert!(!last.contains("secret"), "{last}");
    assert!(node.extra("/tiers/redis/last_error_s").as_u64() < Some(60));
    let failures = node.count("/tiers/redis/failures");
    let labels = [("group", "tiers"), ("name", "redis")];
    let counted = value(&scrape(&node), "kvpool_service_failures_total", &labels);
    assert!(failures > 0 && counted >= failures as f64, "{failures}, {counted}");
    assert!(node.node.text(&format!("stats {}", node.token)).contains("last_error"));
    let last = last.to_owned();
    wait_until("the traffic goes on", || node.count("/load/tokens_verified") > 0);
    let errors = node.end();
    let told: Vec<_> = errors.lines().filter(|line| line.contains("a service fails")).collect();
    // One in ten seconds at most.
    let lines_max = 1 + begun.elapsed().as_secs() as usize / 10;
    assert!((1..=lines_max).contains(&told.len()), "{errors}");
    assert!(told[0].contains("tiers") && told[0].contains(&last), "{last}: {errors}");
}

/// What is sent to the socket of events and is no subscription is told once, and counted.
#[test]
fn garbage_on_the_socket_of_events_is_told_once() {
    let mut command = program();
    command.args(["serve", "--name", "n1", "--size", "1000", "--kv-events", "tcp://127.0.0.1:0"]);
    let node = Node::start_with(&mut command);
    let address = node.line("kv_events: ");
    for _ in 0..20 {
        let mut stream = TcpStream::connect(address.strip_prefix("tcp://").unwrap()).unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    }
    let publisher = || node.json("stats")["extra"]["kv_events"]["publisher"].clone();
    wait_until("all are counted", || publisher()["failures"] == 20);
    let last = publisher()["last_error"].as_str().unwrap().to_owned();
    assert!(last.contains("the connection of 127.0.0.1 was closed: "), "{last}");
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(errors.lines().filter(|line| line.contains("a service fails")).count(), 1, "{errors}");
}

/// One subscriber has every batch, the last one too; one that never reads delays nothing.
#[test]
fn subscribers_that_read_and_that_never_do() {
    let mut command = program();
    command.args(["serve", "--load", "conversations", "--size", "12000"]);
    command.args([
        "--kv-events",
        "tcp://127.0.0.1:0",
        "--kv-events-topic",
        "kv",
        "--kv-events-replay",
        "tcp://127.0.0.1:0",
    ]);
    let node = Node::start_with(&mut command);
    let address = node.line("kv_events: ");
    node.line("kv_events_replay: ");
    let (mut reading, silent) = (Subscriber::connect(&address), Subscriber::connect(&address));
    let reached = Arc::new(AtomicU64::new(0));
    let reading_at = reached.clone();
    let received = thread::spawn(move || {
        let mut numbers = Vec::new();
        while let Some((topic, number)) = reading.next() {
            assert_eq!(topic, b"kv");
            numbers.push(number);
            reading_at.store(number, Relaxed);
        }
        numbers
    });
    let count = |name: &str| node.json("stats")["extra"]["kv_events"]["publisher"][name].as_u64().unwrap();
    // Events have five bytes for each of them: more than the system's buffers of a connection hold.
    let tokens = || node.json("stats")["extra"]["load"]["tokens"].as_u64();
    wait_until("many events are published", || tokens() > Some(3_000_000));
    assert_eq!(count("subscribers"), 2);
    assert!(node.text("stats").contains("kv_events: publisher"));
    assert_eq!(node.json("audit")["sound"], true);
    // A subscriber that is far behind is cut off at the end, too.
    let newest = count("newest");
    wait_until("the subscriber has kept up", || reached.load(Relaxed) >= newest);
    let begun = Instant::now();
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    // Much less than the 60 s after which a silent one is cut off at other times.
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    // The silent one is cut off, and the node names the last batch. The traffic need not have
    // filled another block after the statistics.
    let told = errors.split_once("the last events were not sent to every subscriber in time, newest: ");
    let number = told.and_then(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    let last = number.unwrap_or_else(|| panic!("the last batch is not named: {errors}"));
    drop(silent);
    let numbers = received.join().unwrap();
    assert!(numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]), "no gap");
    assert!(last >= newest, "{last} {newest}");
    assert_eq!(numbers.last(), Some(&last), "the last batch was sent");
}

#[cfg(feature = "etcd")]
mod directory {
    use super::*;

    fn member(etcd: &Server, name: &str, lease: &str) -> Node {
        let at = format!("--membership etcd://127.0.0.1:{}/tests --membership-lease {lease}", etcd.port());
        Node::start(&format!("serve --name {name} --load arrivals {at}"))
    }

    fn of(node: &Node, name: &str) -> Value {
        node.json("stats")["extra"]["membership"]["etcd"][name].clone()
    }

    fn is_linked(node: &Node, peer: &str) -> bool {
        node.json("stats")["extra"]["peers"][peer] == "up"
    }

    #[test]
    fn certificates_that_cannot_be_read_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ca.pem");
        let flags = format!("--membership etcds://127.0.0.1:1/x --membership-ca {}", file.display());
        assert!(refused(&flags).contains(&format!("--membership: cannot read {}", file.display())));
        fs::write(&file, "no certificate").unwrap();
        let said = refused(&flags);
        assert!(said.contains(&format!("{}: the authority cannot be used", file.display())), "{said}");
    }

    #[test]
    fn an_etcd_that_disappears_and_returns() {
        let Some(mut etcd) = Server::etcd() else { return };
        // One node starts before etcd.
        let a = member(&etcd, "a", "4s");
        assert_eq!((of(&a, "joined"), of(&a, "current")), (false.into(), false.into()));
        etcd.run();
        let b = member(&etcd, "b", "40s");
        wait_until("the nodes are linked", || is_linked(&a, "b") && is_linked(&b, "a"));
        assert_eq!(of(&b, "members"), serde_json::json!(["a", "b"]));
        // The link may be the other one's.
        wait_until("a knows both", || of(&a, "members") == serde_json::json!(["a", "b"]));
        etcd.kill();
        wait_until("the loss is noticed", || of(&a, "current") == false);
        // Longer than the lease of a.
        thread::sleep(Duration::from_secs(5));
        assert!(is_linked(&a, "b") && is_linked(&b, "a"), "links stay");
        assert_eq!(of(&a, "members"), serde_json::json!(["a", "b"]));
        // A reload keeps the members.
        a.signal(Signal::HUP);
        etcd.run();
        wait_until("both are members again", || of(&a, "joined") == true && of(&b, "joined") == true);
        wait_until("the list is current", || of(&a, "current") == true);
        assert!(is_linked(&a, "b"));
        let text = a.text("stats");
        assert!(text.contains("membership: etcd") && text.contains("a, b"), "{text}");
        // In order: at once, not by the lease.
        let begun = Instant::now();
        let (code, errors) = b.end(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
        wait_until("the other one sees that it left", || of(&a, "members") == serde_json::json!(["a"]));
        assert!(begun.elapsed() < Duration::from_secs(40));
        // Without the directory the node ends all the same.
        etcd.kill();
        let (code, errors) = a.end(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
    }

    #[test]
    fn a_node_that_is_paused_for_longer_than_its_lease_joins_again() {
        let Some(mut etcd) = Server::etcd() else { return };
        etcd.run();
        let (a, b) = (member(&etcd, "a", "40s"), member(&etcd, "b", "4s"));
        wait_until("the nodes are linked", || is_linked(&a, "b"));
        wait_until("it is a member", || of(&b, "joined") == true);
        let joins = of(&b, "joins").as_u64();
        b.signal(Signal::STOP);
        wait_until("its lease expires", || of(&a, "members") == serde_json::json!(["a"]));
        thread::sleep(Duration::from_secs(1));
        b.signal(Signal::CONT);
        wait_until("it joins again", || of(&b, "joins").as_u64() > joins);
        wait_until("the nodes are linked again", || is_linked(&a, "b") && is_linked(&b, "a"));
        for node in [a, b] {
            assert_eq!(node.json("audit")["sound"], true);
            let (code, errors) = node.end(Signal::TERM);
            assert_eq!(code, Some(0), "{errors}");
        }
    }
}

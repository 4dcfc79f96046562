//! Signals to `kvpool serve`: the end in every phase, the end at once, and settings read again.

use super::common::{self, authority};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use authority::Authority;
use common::live::{Node, pipe, program, run, said, secret, wait_until};
use common::openmetrics::{read, value};
use rustix::process::Signal;

fn address_of(url: &str) -> String {
    url.strip_prefix("http://").unwrap().to_owned()
}

/// Returns whether the node has begun to end: it serves no more, or says so.
fn is_ending(node: &Node) -> bool {
    let asked = TcpStream::connect(address_of(&node.url)).and_then(|mut stream| {
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).map(|_| answer)
    });
    asked.map_or(true, |answer| !answer.starts_with("HTTP/1.1 200"))
}

/// The first signal waits for a tier that accepts connections and says nothing.
#[cfg(feature = "redis")]
#[test]
fn a_second_signal_ends_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("key");
    secret(&key, "the-hash-key-of-the-tests");
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let tier = format!(
        "--tier redis://{} --tier-namespace m --tier-patience 60s --hash-key-file {}",
        silent.local_addr().unwrap(),
        key.display()
    );
    for (second, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let node = Node::start(&format!("serve --load conversations --drain 60s {tier}"));
        wait_until("blocks are cached", || node.counter("load", "completed") > 0);
        node.signal(Signal::TERM);
        // Two signals that wait to be delivered could be one.
        wait_until("the first signal is noticed", || is_ending(&node));
        let begun = Instant::now();
        let (got, errors) = node.end(second);
        assert_eq!(got, Some(code), "{errors}");
        assert!(errors.contains("ended at once by a second signal"), "{errors}");
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    }
}

#[test]
fn silent_and_slow_callers_do_not_delay_the_end() {
    let node = Node::start("serve --listen 127.0.0.1:0 --drain 60s");
    let silent = TcpStream::connect(address_of(&node.url)).unwrap();
    let mut slow = TcpStream::connect(address_of(&node.url)).unwrap();
    slow.write_all(b"GET /stats HTTP/1.1\r\nHost: ").unwrap();
    let peer = TcpStream::connect(&node.listen).unwrap();
    node.json("stats");
    let begun = Instant::now();
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.lines().all(|line| line.contains("any user of this host")), "{errors}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    drop((silent, slow, peer));
}

#[test]
fn a_request_under_way_is_answered_before_the_end() {
    let node = Node::start("serve --load conversations --load-rest 1s --load-threads 8");
    wait_until("traffic runs", || node.counter("load", "tokens") > 0);
    // It waits for the threads, each of which rests.
    let url = node.url.clone();
    let audit = thread::spawn(move || run(&format!("audit {url}")));
    wait_until("the audit has arrived", || {
        let metrics = read(&node.http("GET /metrics", "", "").1).unwrap();
        value(&metrics, "kvpool_audits_total", &[]) == 1.0
    });
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    let audit = audit.join().unwrap();
    assert!(String::from_utf8_lossy(&audit.stdout).starts_with("ok: "), "{}", said(&audit));
}

/// The source ends while the target of its transfers is stopped, goes on, and is killed.
#[test]
fn an_end_during_transfers_to_a_peer_that_hangs_takes_no_longer_than_the_drain() {
    let b = Node::start("serve --name b --size 6000 --load arrivals");
    let a = Node::start(&format!(
        "serve --name a --load conversations --load-rest 10ms --size 2500 --migrate-below 500 --migrate-to b \
         --peers b={} --drain 3s",
        b.listen
    ));
    wait_until("sequences move", || b.counter("load", "arrived") > 3);
    b.signal(Signal::STOP);
    thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    let (code, errors) = a.end(Signal::TERM);
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    // A migration whose commit was sent has an unknown end, which the exit code tells.
    assert_eq!(code == Some(0), !errors.contains("what became of them is unknown"), "{code:?}: {errors}");
    b.signal(Signal::CONT);
    wait_until("all that arrived are completed", || {
        b.counter("load", "open") == 0
            && b.counter("load", "arrived") == b.counter("load", "arrived_completed")
    });
    assert_eq!(b.counter("load", "blocks_corrupt"), 0);
    assert_eq!(b.json("audit")["sound"], true);
    let (code, errors) = b.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn an_end_while_peers_cannot_be_reached_is_prompt() {
    // A port that nothing listens on, and one that accepts and says nothing.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let node = Node::start(&format!(
        "serve --name a --peers b=127.0.0.1:1,c={} --load conversations --drain 60s",
        silent.local_addr().unwrap()
    ));
    wait_until("traffic runs", || node.counter("load", "completed") > 0);
    let begun = Instant::now();
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

const FIRST: &str = "the-first-token-of-the-tests";
const SECOND: &str = "the-second-token-of-the-tests";

#[test]
fn a_reload_takes_over_certificates_and_token_for_new_links() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (old, new) = (Authority::new(), Authority::new());
    let tokens = [("b", FIRST), ("old", FIRST), ("new", SECOND)].map(|(name, token)| {
        secret(&at(&format!("{name}.token")), token);
        format!("--token-file {}", at(&format!("{name}.token")).display())
    });
    let [of_b, of_old, of_new] = &tokens;
    let b = Node::start(&format!("serve --name b {of_b} {}", old.flags(&at("b"), "b", 4000)));
    let peer = |name: &str, authority: &Authority, token: &str| {
        let flags = authority.flags(&at(name), name, 4000);
        Node::start(&format!("serve --name {name} {token} {flags} --peers b={}", b.listen))
    };
    let state =
        |node: &Node, token: &str| node.json(&format!("stats {token}"))["extra"]["peers"]["b"].clone();
    let a = peer("a", &old, of_old);
    wait_until("the nodes are linked", || state(&a, of_old) == "up");

    new.flags(&at("b"), "b", 4000);
    secret(&at("b.token"), SECOND);
    b.signal(Signal::HUP);
    wait_until("the admin interface takes the new token", || {
        b.run(&format!("stats {of_new}")).status.success()
    });
    let refused = b.run(&format!("stats {of_old}"));
    assert!(said(&refused).contains("token missing or wrong (401)"), "{}", said(&refused));
    let c = peer("c", &new, of_new);
    wait_until("a node with the new certificates is linked", || state(&c, of_new) == "up");
    assert_eq!(state(&a, of_old), "up", "links that exist stay");
    let d = peer("d", &old, of_old);
    wait_until("one with the old ones is not", || {
        state(&d, of_old).as_str().is_some_and(|state| state.contains("certificate was refused"))
    });

    // Files that are refused change nothing.
    fs::write(at("b").join("node.pem"), "no certificate").unwrap();
    b.reload("not reloaded: ");
    fs::remove_file(at("b.token")).unwrap();
    b.reload("not reloaded: ");
    assert!(b.run(&format!("stats {of_new}")).status.success());
    for node in [a, c, d] {
        assert_eq!(node.end(Signal::TERM).0, Some(0));
    }
    let (code, errors) = b.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("reloaded; changes of peers: none; new certificates; other tokens"), "{errors}");
    let refusals: Vec<_> = errors.lines().filter(|line| line.contains("not reloaded: ")).collect();
    assert_eq!(refusals.len(), 2, "{errors}");
    assert!(refusals[0].contains("node.pem") && refusals[1].contains("b.token"), "{errors}");
}

/// A token is replaced in three steps at two nodes that carry traffic: the link stays, and
/// a new one can be made at every moment.
#[test]
fn a_token_is_replaced_without_a_lost_link() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    secret(&at("key"), "the-hash-key-of-the-tests");
    let start = |name: &str, peers: &str| {
        secret(&at(&format!("{name}.token")), FIRST);
        let token = at(&format!("{name}.token"));
        Node::start(&format!(
            "serve --name {name} --load conversations --size 4000 --token-file {} --hash-key-file {} {peers}",
            token.display(),
            at("key").display(),
        ))
    };
    let b = start("b", "");
    let a = start("a", &format!("--peers b={}", b.listen));
    let with = |token: &str| {
        secret(&at("mine"), token);
        format!("--token-file {}", at("mine").display())
    };
    let state = |token: &str| a.json(&format!("stats {}", with(token)))["extra"]["peers"]["b"].clone();
    wait_until("the nodes are linked", || state(FIRST) == "up");
    let both = [format!("{FIRST}\n{SECOND}"), format!("{SECOND}\n{FIRST}"), SECOND.to_owned()];
    for (step, tokens) in both.iter().enumerate() {
        for (node, name) in [(&b, "b"), (&a, "a")] {
            secret(&at(&format!("{name}.token")), tokens);
            node.signal(Signal::HUP);
            wait_until("the tokens are taken over", || {
                let has = |token: &str| node.run(&format!("stats {}", with(token))).status.success();
                has(SECOND) && has(FIRST) == (step < 2)
            });
            let known_to_a = if step == 0 && name == "b" { FIRST } else { SECOND };
            assert_eq!(state(known_to_a), "up", "step {step}");
            // Another node, with the tokens of the step before or of this one.
            secret(&at("c.token"), if step == 0 { FIRST } else { SECOND });
            let c = Node::start(&format!(
                "serve --name c --size 100 --token-file {} --peers b={}",
                at("c.token").display(),
                b.listen
            ));
            let flag = format!("--token-file {}", at("c.token").display());
            wait_until("a new link is made", || {
                c.json(&format!("stats {flag}"))["extra"]["peers"]["b"] == "up"
            });
            assert_eq!(c.end(Signal::TERM).0, Some(0));
        }
    }
    for node in [a, b] {
        let (code, errors) = node.end(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
        assert!(!errors.contains("lost") && errors.contains("; other tokens"), "{errors}");
    }
}

#[test]
fn settings_that_became_a_pipe_change_nothing_and_delay_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvpool.toml");
    fs::write(&file, "size = 100\n[peers]\nb = \"localhost:7\"\n").unwrap();
    let node = Node::start_with(program().args(["serve", "--config"]).arg(&file));
    // What takes effect at the next start only is named.
    fs::write(&file, "size = 200\nlisten = \"off\"\n[peers]\nb = \"localhost:7\"\n").unwrap();
    node.reload("changes of peers: none; changes that need a restart: size, size_max");
    fs::remove_file(&file).unwrap();
    pipe(&file);
    node.reload("it is a pipe or a device");
    for _ in 0..3 {
        node.signal(Signal::HUP);
    }
    assert_eq!(node.json("stats")["extra"]["peers"].as_object().unwrap().len(), 1);
    let begun = Instant::now();
    let (code, errors) = node.end(Signal::TERM);
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("not reloaded: "), "{errors}");
}

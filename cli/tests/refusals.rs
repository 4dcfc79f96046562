//! Bad input to `kvpool serve`: of operators, of peers, and of peers that lie.
//!
//! Each test starts the program, and checks what it says, its exit code or its counters, and that
//! nothing stays behind.

use super::common::{self, authority, peer};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use authority::Authority;
use common::live::{Node, pipe, run, said, token, wait_until};
use kvpool_node::protocol::{Refusal, ToSource, ToTarget};
use kvpool_node::wire::{HEADER, Header, Role, WIRE_VERSION};
use peer::{Peer, TOKEN, changed, manifest, refusal, version};
use rustix::process::Signal;
use serde_json::Value;

/// Returns why the node `a` has no link to `b`, once that is what it says.
fn state_of_b(a: &Node, more: &str, part: &str) -> String {
    let mut state = String::new();
    wait_until(&format!("{part:?} is stated"), || {
        let stats = a.json(&format!("stats {more}"));
        state = stats["extra"]["peers"]["b"].as_str().unwrap_or_default().to_owned();
        state.contains(part)
    });
    state
}

/// Starts `kvpool serve` with flags that it refuses; returns what it says.
fn refused(flags: &str) -> String {
    let output = run(&format!("serve {flags}"));
    assert_eq!(output.status.code(), Some(2), "{flags}: {}", said(&output));
    assert!(output.stdout.is_empty(), "{flags}");
    said(&output)
}

/// Checks that nothing of a refused migration is left, and ends the node.
fn ends_clean(b: Node, more: &str) -> String {
    let stats = b.json(&format!("stats {more}"));
    assert_eq!((&stats["used"], &stats["sequences"]), (&0.into(), &0.into()), "{stats}");
    b.end_well(more)
}

// Of operators.

#[test]
fn a_port_in_use_is_named_before_memory_is_taken() {
    let node = Node::start("serve");
    let admin = node.url.strip_prefix("http://").unwrap();
    let listen = &node.listen;
    let said = refused(&format!("--admin {admin}"));
    assert!(said.contains(&format!("cannot listen on {} for the admin interface", node.url)), "{said}");
    assert!(said.contains("the port is in use (choose another, or port 0)"), "{said}");
    let said = refused(&format!("--listen {listen}"));
    assert!(said.contains(listen) && said.contains("in use"), "{said}");
}

#[test]
fn unknown_keys_of_the_settings_file_are_named_with_the_nearest() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvpool.toml");
    fs::write(&file, "size = 100\nblock_token = 16\nevicton = \"lru\"\ncolour = \"red\"\n").unwrap();
    let said = refused(&format!("--config {}", file.display()));
    for part in [
        "kvpool.toml:2: there is no key `block_token`; did you mean `block_tokens`?",
        "kvpool.toml:3: there is no key `evicton`; did you mean `eviction`?",
        "kvpool.toml:4: there is no key `colour`\n",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
}

#[test]
fn a_settings_file_that_cannot_be_read_is_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("folder")).unwrap();
    fs::write(at("latin1.toml"), b"# a comment\nname = \"caf\xe9\"\n").unwrap();
    fs::write(at("large.toml"), "#".repeat((1 << 20) + 1)).unwrap();
    pipe(&at("pipe"));
    for (name, reason) in [
        ("folder", "it is a folder"),
        ("missing.toml", "No such file or directory"),
        ("latin1.toml", "latin1.toml:2: not UTF-8"),
        ("large.toml", "it has 1048577 bytes; the maximum is 1048576"),
        ("pipe", "it is a pipe or a device, not a file"),
    ] {
        let path = at(name).display().to_string();
        // A pipe without a writer would keep the program for ever.
        let begun = Instant::now();
        let said = refused(&format!("--config {path}"));
        assert!(begun.elapsed() < Duration::from_secs(30), "{name}");
        assert!(said.contains(&path) && said.contains(reason), "{name}: {said}");
    }
    for (flags, reason) in [
        (format!("--token-file {}", at("pipe").display()), "it is a pipe or a device"),
        (format!("--token-file {}", at("folder").display()), "it is a folder"),
        (
            format!("--tls-cert {0} --tls-key {0} --tls-ca {0}", at("pipe").display()),
            "it is a pipe or a device",
        ),
    ] {
        let said = refused(&flags);
        assert!(said.contains(reason), "{flags}: {said}");
    }
}

#[test]
fn unknown_sequences_and_peers_are_named() {
    let b = Node::start("serve --name b --load arrivals");
    let a =
        Node::start(&format!("serve --name a --load conversations --load-rest 10ms --peers b={}", b.listen));
    let asked = a.run("migrate --sequence-id 4611686018427387904 --target-node b");
    assert_eq!(asked.status.code(), Some(1));
    assert!(said(&asked).contains("there is no sequence 4611686018427387904"), "{}", said(&asked));
    assert!(said(&asked).contains("(404)"), "{}", said(&asked));
    let mut text = String::new();
    wait_until("a sequence can be named", || {
        let Some(id) = a.json("stats")["extra"]["load"]["longest_sequence"].as_u64() else { return false };
        let asked = a.run(&format!("migrate --sequence-id {id} --target-node c"));
        assert_eq!(asked.status.code(), Some(1));
        text = said(&asked);
        // The conversation may be over before the order arrives.
        !text.contains("there is no sequence")
    });
    assert!(text.contains("no peer is known as c") && text.contains("(404)"), "{text}");
    assert!(a.records("").is_empty());
    ends_clean(b, "");
}

// Of peers that are not who they should be.

#[test]
fn a_wrong_token_is_refused_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let (right, wrong) = (token(folder.path(), TOKEN), token(folder.path(), "another-token-of-the-tests"));
    let b = Node::start(&format!("serve --name b {right}"));
    let a = Node::start(&format!("serve --name a {wrong} --peers b={}", b.listen));
    let state = state_of_b(&a, &wrong, "token");
    assert!(state.starts_with("down: "), "{state}");
    assert_eq!(b.json(&format!("stats {right}"))["extra"]["node"]["peers_up"], 0);
    let (code, errors) = a.end(Signal::TERM);
    assert_eq!(code, Some(0));
    assert!(errors.contains("no link, peer: b") && errors.contains("token is wrong"), "{errors}");
    let errors = ends_clean(b, &right);
    assert!(errors.contains("a connection was refused") && errors.contains("token is wrong"), "{errors}");
}

/// A label of more than 63 characters is no name, so that no server is asked.
#[test]
fn a_peer_whose_name_has_no_address_is_down_and_not_forgotten() {
    let (folder, host) = (tempfile::tempdir().unwrap(), "x".repeat(64));
    let tls = Authority::new().flags(folder.path(), "a", 4000);
    let a = Node::start(&format!("serve --name a {tls} --peers b={host}:7411"));
    let state = state_of_b(&a, "", "find the address");
    assert!(state.starts_with(&format!("down: find the address of {host}:7411: ")), "{state}");
    assert!(a.text("stats").contains("find the address of xxx"));
    let (_, metrics) = a.http("GET /metrics", "", "");
    assert!(metrics.contains("kvpool_peer_up{pool=\"a\",peer=\"b\"} 0"), "{metrics}");
    let errors = ends_clean(a, "");
    assert!(errors.contains("no link, peer: b") && errors.contains("find the address"), "{errors}");
}

#[test]
fn bad_certificates_are_refused_and_both_sides_say_why() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (ours, foreign) = (Authority::new(), Authority::new());
    let b = Node::start(&format!("serve --name b {}", ours.flags(&at("b"), "b", 4000)));
    let at_b = format!("--peers b={}", b.listen);
    for (flags, reason) in [
        (ours.flags(&at("expired"), "a", 2020), "this node's certificate was refused: it is expired"),
        (
            foreign.flags_trusting(&ours, &at("foreign"), "a", 4000),
            "this node's certificate was refused: it is not signed by a trusted authority",
        ),
        (
            ours.flags(&at("other"), "c", 4000),
            "the peer refused the link: the name is not valid, or not that of the certificate",
        ),
    ] {
        let a = Node::start(&format!("serve --name a {flags} {at_b}"));
        let state = state_of_b(&a, "", "refused");
        assert_eq!(state, format!("down: {reason}"));
        assert_eq!(b.json("stats")["extra"]["node"]["peers_up"], 0);
        assert_eq!(a.end(Signal::TERM).0, Some(0));
    }
    // The acceptor's certificate may be the bad one.
    let bad = Node::start(&format!("serve --name b {}", ours.flags(&at("late"), "b", 2020)));
    let a =
        Node::start(&format!("serve --name a {} --peers b={}", ours.flags(&at("a"), "a", 4000), bad.listen));
    let state = state_of_b(&a, "", "expired");
    assert_eq!(state, "down: the peer's certificate was refused: it is expired");
    assert_eq!(a.end(Signal::TERM).0, Some(0));
    let errors = ends_clean(b, "");
    for reason in [
        "the peer's certificate was refused: it is expired",
        "the peer's certificate was refused: it is not signed by a trusted authority",
        "the peer's certificate was refused: it is not valid for this name",
    ] {
        assert!(errors.contains(&format!("a connection was refused, error: {reason}")), "{reason}: {errors}");
    }
}

#[test]
fn another_version_of_the_protocol_is_refused_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), TOKEN);
    let b = Node::start(&format!("serve --name b {token}"));
    // A header of the next version, whose rest this version cannot know.
    let mut stream = TcpStream::connect(&b.listen).unwrap();
    let header = Header {
        version: WIRE_VERSION + 1,
        role: Role::Control,
        has_token: true,
        incarnation: 1,
        nonce: [7; 32],
    };
    stream.write_all(&header.encode()).unwrap();
    let mut theirs = [0; HEADER];
    stream.read_exact(&mut theirs).unwrap();
    assert_eq!(Header::decode(&theirs).unwrap().version, WIRE_VERSION, "the peer can tell why");
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert!(!matches!(stream.read(&mut [0]), Ok(1..)), "nothing follows");
    // Something else than kvpool.
    let mut stream = TcpStream::connect(&b.listen).unwrap();
    stream.write_all(&[b'x'; HEADER]).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    // Another version of the messages, which the node answers.
    let spoken = version(&b);
    let reason = refusal(&b, spoken + 1).to_string();
    assert!(
        reason.contains(&format!(
            "the peer speaks version {spoken} of the messages, and this node {}",
            spoken + 1
        )),
        "{reason}"
    );
    let errors = ends_clean(b, &token);
    let (ours, theirs) = (WIRE_VERSION, WIRE_VERSION + 1);
    assert!(
        errors
            .contains(&format!("speaks version {theirs} of the wire protocol, and this node version {ours}")),
        "{errors}"
    );
    assert!(errors.contains("does not speak kvpool's protocol"), "{errors}");
    assert!(errors.contains("of the messages"), "{errors}");
}

#[test]
fn another_layout_is_refused_and_named() {
    let b = Node::start("serve --name b --block-tokens 8");
    let a =
        Node::start(&format!("serve --name a --load conversations --load-rest 10ms --peers b={}", b.listen));
    state_of_b(&a, "", "up");
    let other = "its blocks have another layout";
    for node in [&a, &b] {
        assert!(node.text("stats").contains(other), "{}", node.text("stats"));
    }
    wait_until("a migration was refused", || {
        let Some(id) = a.json("stats")["extra"]["load"]["longest_sequence"].as_u64() else { return false };
        let asked = a.run(&format!("migrate --sequence-id {id} --target-node b"));
        assert_eq!(asked.status.code(), Some(1));
        // The conversation may be over before the order arrives.
        said(&asked).contains(&format!("stays here: node b: {other}"))
    });
    assert!(a.records("").is_empty(), "nothing was sent");
    assert_eq!(a.json("stats")["extra"]["load"]["blocks_corrupt"], 0);
    let (code, errors) = a.end(Signal::TERM);
    assert_eq!(code, Some(0));
    assert_eq!(errors.matches(&format!("linked, but {other}")).count(), 1, "{errors}");
    assert!(errors.contains(&format!("peer: b, address: {}", b.listen)), "{errors}");
    ends_clean(b, "");
}

// Of peers that lie.

#[test]
fn a_manifest_that_lies_about_lengths_or_hashes_reserves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), TOKEN);
    let b = Node::start(&format!("serve --name b {token}"));
    let peer = Peer::link(&b);
    let honest = manifest(7, 100);
    let outline = |json: &mut Value, field: &str, value: Value| json["contents"]["Sequence"][field] = value;
    let wrong_tokens: Vec<u32> = (0..100).map(|id| if id == 20 { 99 } else { id }).collect();
    type Lie = Box<dyn FnOnce(&mut Value)>;
    let lies: [(Lie, &str); 6] = [
        (Box::new(move |json| outline(json, "length", 3000.into())), "checksums"),
        (Box::new(move |json| outline(json, "length", u32::MAX.into())), "checksums"),
        (Box::new(move |json| outline(json, "committed", 101.into())), "committed tokens"),
        (Box::new(|json| json["checksums"] = Value::Array(Vec::new())), "checksums"),
        (Box::new(|json| json["version"] = 9.into()), "version of the manifest: got 9"),
        (
            Box::new(move |json| {
                json["contents"]["Sequence"]["lists"][0]["known"]["tokens"] = wrong_tokens.into()
            }),
            "hashes at index 1: got another hash, expected that of the manifest's tokens",
        ),
    ];
    for (number, (lie, part)) in lies.into_iter().enumerate() {
        let id = 1 + number as u128;
        match peer.prepare(id, &changed(&honest, lie)) {
            ToSource::Refused { reason: Refusal::Manifest(reason), free } => {
                assert!(reason.to_string().contains(part), "no {part:?} in {reason}");
                assert_eq!(free, 20_000);
            }
            answer => panic!("{part}: {answer:?}"),
        }
    }
    // Nothing that a decoder accepts.
    let garbage = kvpool_node::protocol::ManifestBytes::new(vec![0xff; 200]).unwrap();
    let (kind, part) = (kvpool_node::protocol::Kind::Migrate, None);
    peer.say(99, ToTarget::Prepare { kind, part, manifest: garbage });
    assert!(matches!(peer.hear(99), ToSource::Refused { reason: Refusal::Manifest(_), .. }));
    assert_eq!(b.json(&format!("stats {token}"))["extra"]["node"]["refused"], 7);
    // The honest one is welcome.
    peer.prepared(100, &honest);
    drop(peer);
    let (code, errors) = b.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn sequences_that_no_engine_takes_are_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), TOKEN);
    let b = Node::start(&format!("serve --name b --drain 1s {token}"));
    let peer = Peer::link(&b);
    let empty = manifest(0, 0);
    let mut taken = 0_u64;
    loop {
        let id = 1 + u128::from(taken);
        let numbered = changed(&empty, |json| json["contents"]["Sequence"]["id"] = (taken + 1).into());
        match peer.prepare(id, &numbered) {
            ToSource::Prepared { reservation, .. } => {
                assert_eq!(peer.pretend(id, reservation, 0), 0);
                peer.say(id, ToTarget::Commit { reservation, is_current: true });
                while !matches!(peer.hear(id), ToSource::Committed { .. }) {}
                peer.say(id, ToTarget::Forget { reservation });
                taken += 1;
            }
            ToSource::Refused { .. } => break,
            answer => panic!("{answer:?}"),
        }
        assert!(taken <= 3_000, "the node takes sequences without end");
    }
    // Those that the program keeps, and those that wait at the node.
    assert!((2_048..2_060).contains(&taken), "{taken}");
    assert_eq!(b.json(&format!("stats {token}"))["sequences"].as_u64(), Some(taken));
    drop(peer);
    let (code, errors) = b.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn failed_checksums_are_retried_twice_and_then_refused_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), TOKEN);
    let b = Node::start(&format!("serve --name b {token}"));
    let peer = Peer::link(&b);
    let wrong = changed(&manifest(7, 100), |json| {
        json["checksums"].as_array_mut().unwrap().iter_mut().for_each(|checksum| *checksum = 5.into());
    });
    let reservation = peer.prepared(1, &wrong);
    // All seven blocks, at each of three attempts.
    assert_eq!([0, 1, 2].map(|attempt| peer.pretend(1, reservation, attempt)), [7, 7, 7]);
    // A source that commits all the same is refused.
    peer.say(1, ToTarget::Commit { reservation, is_current: true });
    assert!(matches!(peer.hear(1), ToSource::Aborted { .. }));
    wait_until("its blocks are given back", || b.json(&format!("stats {token}"))["used"] == 0);
    let node = &b.json(&format!("stats {token}"))["extra"]["node"];
    assert_eq!((&node["bad_blocks"], &node["received"]), (&21.into(), &0.into()), "{node}");
    let record = &b.records(&token)[0];
    assert_eq!((&record["state"], &record["side"]), (&"aborted".into(), &"target".into()), "{record}");
    assert!(record["reason"].is_string(), "{record}");
    drop(peer);
    ends_clean(b, &token);
}

#[test]
fn a_peer_that_promises_and_never_sends_loses_its_reservation() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), TOKEN);
    let b = Node::start(&format!("serve --name b {token}"));
    let peer = Peer::link(&b);
    peer.prepared(1, &manifest(7, 100));
    let used = || b.json(&format!("stats {token}"))["used"].as_u64();
    assert_eq!(used(), Some(7));
    // The same migration once more is the same reservation.
    let again = peer.prepare(1, &manifest(7, 100));
    assert!(matches!(again, ToSource::Prepared { .. }), "{again:?}");
    assert_eq!(used(), Some(7));
    // Another one of the same sequence is refused.
    let other = peer.prepare(2, &manifest(7, 100));
    assert!(matches!(other, ToSource::Refused { reason: Refusal::Exists, .. }), "{other:?}");
    assert_eq!(used(), Some(7));
    wait_until("the reservation ends", || used() == Some(0));
    let list = b.records(&token);
    let of = |id: u128| {
        let id = format!("{id:032x}");
        list.iter()
            .find(|record| record["id"] == id.as_str())
            .unwrap_or_else(|| panic!("no {id} in {list:?}"))
    };
    let record = of(1);
    assert_eq!((&record["state"], &record["peer"]), (&"aborted".into(), &"hand".into()), "{record}");
    assert!(record["reason"].as_str().unwrap().contains("the peer was silent for"), "{record}");
    assert!(record["time_ms"].as_u64() >= Some(29_000), "{record}");
    drop(peer);
    ends_clean(b, &token);
}

// Of peers that have no room, and of orders that come twice.

#[test]
fn a_full_target_refuses_and_the_sequence_goes_on_at_its_source() {
    let b = Node::start("serve --name b --size 2");
    let a =
        Node::start(&format!("serve --name a --load conversations --load-rest 10ms --peers b={}", b.listen));
    state_of_b(&a, "", "up");
    wait_until("a migration was refused", || {
        if let Some(id) = a.json("stats")["extra"]["load"]["longest_sequence"].as_u64() {
            a.run(&format!("migrate --sequence-id {id} --target-node b"));
        }
        a.json("stats")["extra"]["node"]["refused"].as_u64() > Some(0)
    });
    let list = a.records("");
    let record = list.iter().find(|record| record["state"] == "aborted").unwrap();
    let reason = record["reason"].as_str().unwrap();
    assert!(reason.contains("blocks are needed; 2 blocks are free there"), "{reason}");
    wait_until("it went on", || a.json("stats")["extra"]["load"]["returned"].as_u64() > Some(0));
    a.end_well("");
    ends_clean(b, "");
}

#[test]
fn the_same_migration_ordered_twice_moves_the_sequence_once() {
    let b = Node::start("serve --name b --load arrivals");
    let a =
        Node::start(&format!("serve --name a --load conversations --load-rest 10ms --peers b={}", b.listen));
    state_of_b(&a, "", "up");
    let mut moved = 0;
    wait_until("a sequence is migrated", || {
        let Some(id) = a.json("stats")["extra"]["load"]["longest_sequence"].as_u64() else { return false };
        let order = format!("migrate --sequence-id {id} --target-node b");
        let first = a.run(&order).status.success();
        let second = a.run(&order);
        if first {
            moved = id;
            assert_eq!(second.status.code(), Some(1), "the second order succeeds too");
            let said = said(&second);
            assert!(said.contains("(404)") || said.contains("(409)"), "{said}");
        }
        first
    });
    let committed = |node: &Node| {
        let of =
            |record: &&Value| record["sequence"].as_u64() == Some(moved) && record["state"] == "committed";
        node.records("").iter().filter(of).count()
    };
    wait_until("it is committed", || committed(&a) == 1 && committed(&b) == 1);
    assert_eq!(a.records("").iter().filter(|record| record["sequence"].as_u64() == Some(moved)).count(), 1);
    for node in [a, b] {
        node.end_well("");
    }
}

//! Two `kvpool serve` processes that exchange sequences and cached blocks.

use super::common;
use std::thread;

use common::live::{Node, said, token, wait_until};
use common::peer::{Peer, TOKEN};
use rustix::process::Signal;
use serde_json::Value;

/// A node that continues what arrives. The port is 0, or that of a node that was killed.
fn target(listen: &str, more: &str) -> Node {
    Node::start(&format!("serve --name b --size 6000 --load arrivals --listen {listen} {more}"))
}

/// A node under load whose conversations last for some seconds.
fn source(target: &Node, more: &str) -> Node {
    let peers = format!("--peers b={}", target.listen);
    Node::start(&format!("serve --name a --load conversations --load-rest 10ms {peers} {more}"))
}

fn is_linked(node: &Node, peer: &str) -> bool {
    node.json("stats")["extra"]["peers"][peer] == "up"
}

/// Migrates a sequence of a node by hand, and returns its id and the record.
fn migrate_one(node: &Node) -> (u64, Value) {
    migrate_to(node, "b", "")
}

fn migrate_to(node: &Node, to: &str, more: &str) -> (u64, Value) {
    let mut moved = None;
    wait_until("a sequence is migrated", || {
        let stats = node.json(&format!("stats {more}"));
        let Some(id) = stats["extra"]["load"]["longest_sequence"].as_u64() else { return false };
        let output = node.run(&format!("migrate --json --sequence-id {id} --target-node {to} {more}"));
        // It may be complete before the order arrives.
        moved = output.status.success().then(|| (id, common::parse(&output)));
        moved.is_some()
    });
    moved.unwrap()
}

fn records(node: &Node, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
    node.records("").into_iter().filter(|record| is_it(record)).collect()
}

#[test]
fn a_sequence_is_migrated_by_hand_and_continues() {
    let b = target("127.0.0.1:0", "");
    let a = source(&b, "");
    wait_until("the nodes are linked", || is_linked(&a, "b"));
    let (id, record) = migrate_one(&a);
    assert_eq!((&record["kind"], &record["side"]), (&"migrate".into(), &"source".into()), "{record}");
    assert_eq!((&record["peer"], record["sequence"].as_u64()), (&"b".into(), Some(id)), "{record}");
    let of_it = |record: &Value| record["sequence"].as_u64() == Some(id) && record["state"] == "committed";
    wait_until("it is committed", || !records(&a, of_it).is_empty() && !records(&b, of_it).is_empty());
    let there = &records(&b, of_it)[0];
    assert_eq!((&there["side"], &there["id"]), (&"target".into(), &record["id"]), "{there}");
    assert!(there["blocks"].as_u64() > Some(0), "{there}");
    wait_until("its answer is completed there", || b.counter("load", "arrived_completed") > 0);
    assert!(b.counter("load", "arrived_blocks_verified") > 0);
    let text = a.text("migration-status");
    for record in [&records(&a, of_it)[0], there] {
        assert_eq!(record["transport"], "tcp", "{record}");
        let number = |name: &str| record[name].as_u64().unwrap();
        assert_eq!(number("bytes"), number("blocks") * 256, "{record}");
        assert!((1..=number("blocks")).contains(&number("runs")), "{record}");
    }
    // The target writes nothing.
    assert!(a.counter("node", "sent_bytes") > 0);
    assert_eq!(b.counter("node", "sent_bytes"), 0);
    assert!(b.counter("node", "granted_bytes") > 0);
    for part in
        ["kind", "peer", "sequence", "state", "blocks", "bytes", "runs", "via", "time", "committed", "tcp"]
    {
        assert!(text.contains(part), "no {part} in {text}");
    }

    // Migrations that cannot be.
    let gone = a.run(&format!("migrate --sequence-id {id} --target-node b"));
    assert_eq!(gone.status.code(), Some(1));
    assert!(
        said(&gone).contains(&format!("there is no sequence {id} (404)")) || said(&gone).contains("(404)")
    );
    let longest = a.json("stats")["extra"]["load"]["longest_sequence"].as_u64();
    let nowhere = a.run(&format!("migrate --sequence-id {} --target-node c", longest.unwrap_or(0)));
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(said(&nowhere).contains("(404)"), "{}", said(&nowhere));
    for node in [a, b] {
        node.end_well("");
    }
}

#[test]
fn blocks_move_by_themselves_while_memory_is_short() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), "one-token-of-the-tests");
    let b = target("127.0.0.1:0", &token);
    let a = source(&b, &format!("{token} --size 2500 --migrate-below 500 --migrate-to b"));
    let extra = |node: &Node, of: &str, name: &str| {
        node.json(&format!("stats {token}"))["extra"][of][name].as_u64().unwrap_or_default()
    };
    let kinds = |kind: &str| {
        let is_it = |record: &&Value| record["kind"] == kind && record["state"] == "committed";
        b.records(&token).iter().filter(is_it).count()
    };
    wait_until("sequences move", || extra(&b, "load", "arrived_completed") > 3);
    wait_until("cached blocks move", || kinds("offload") > 0);
    assert!(extra(&b, "node", "received") > 0 && extra(&a, "node", "sent") > 0);
    for node in [a, b] {
        node.end_well(&token);
    }
}

#[test]
fn a_peer_that_restarts_is_linked_again() {
    let b = target("127.0.0.1:0", "");
    let a = source(&b, "--size 2500 --migrate-below 500 --migrate-to b");
    wait_until("sequences move", || b.counter("load", "arrived") > 2);
    let listen = b.listen.clone();
    b.end(Signal::KILL);
    wait_until("the loss is noticed", || !is_linked(&a, "b"));
    // Those under way may be in doubt, and hold most of the source's blocks.
    assert_eq!(a.json("declare-ended --peer b")["peer"], "b");
    wait_until("none is in doubt", || a.json("stats")["extra"]["node"]["oldest_doubt_s"] == 0.0);
    let b = target(&listen, "");
    wait_until("sequences move again", || b.counter("load", "arrived_completed") > 2);
    assert!(is_linked(&a, "b") && is_linked(&b, "a"));
    for node in [a, b] {
        node.end_well("");
    }
}

#[test]
fn a_signal_to_end_during_migrations_loses_nothing() {
    let b = target("127.0.0.1:0", "");
    let a = source(&b, "--size 2500 --migrate-below 500 --migrate-to b --load-threads 3");
    wait_until("sequences move", || b.counter("load", "arrived") > 5);
    let (code, errors) = a.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    // Everything that arrived is completed, with the bytes that were written there.
    wait_until("all are completed", || b.counter("load", "open") == 0);
    assert_eq!(b.counter("load", "arrived"), b.counter("load", "arrived_completed"));
    let a = source(&b, "--size 2500 --migrate-below 500 --migrate-to b");
    let before = b.counter("load", "arrived");
    wait_until("another process of the source moves some", || b.counter("load", "arrived") > before + 5);
    // Now the target ends: what cannot go there stays.
    let (code, errors) = b.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    let completed = a.counter("load", "completed");
    wait_until("the source goes on", || a.counter("load", "completed") > completed + 3);
    assert_eq!(a.json("audit")["sound"], true);
    assert_eq!(a.counter("load", "blocks_corrupt"), 0);
    let (code, errors) = a.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
}

/// A node whose sequence is in doubt: its target, `hand`, was told to commit, and is gone.
fn in_doubt(token: &str, more: &str) -> (Node, u64) {
    let load = "--load conversations --load-rest 10ms";
    let node = Node::start(&format!("serve --name b --size 6000 {load} {token} {more}"));
    let hand = Peer::link(&node);
    wait_until("the peer is linked", || {
        node.json(&format!("stats {token}"))["extra"]["peers"]["hand"] == "up"
    });
    let linked = node.run(&format!("declare-ended --peer hand {token}"));
    assert!(linked.status.code() == Some(1) && said(&linked).contains("(409)"), "{}", said(&linked));
    let id = thread::scope(|scope| {
        let commit = scope.spawn(|| hand.up_to_commit());
        let (id, _) = migrate_to(&node, "hand", token);
        commit.join().unwrap();
        id
    });
    drop(hand);
    (node, id)
}

/// Checks that a sequence of a node goes on, with the bytes that it had, and ends the node.
fn goes_on(node: Node, id: u64, token: &str) {
    let load = |name: &str| node.json(&format!("stats {token}"))["extra"]["load"][name].as_u64().unwrap();
    let aborted = |record: &Value| record["sequence"].as_u64() == Some(id) && record["state"] == "aborted";
    let is_over = || node.records(token).iter().any(aborted);
    wait_until("the sequence is here again", || is_over() && load("returned") == 1);
    let (completed, verified) = (load("completed"), load("arrived_blocks_verified"));
    assert!(verified > 0, "what returns is compared");
    wait_until("the traffic goes on", || load("completed") > completed + 3);
    node.end_well(token);
}

#[test]
fn an_operator_ends_a_doubt() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), TOKEN);
    let (node, id) = in_doubt(&token, "");
    let status = |command: &str| node.text(&format!("{command} {token}"));
    wait_until("the sequence is in doubt", || status("migration-status").contains("1 IN DOUBT"));
    // The remedy that is named is there.
    assert!(status("migration-status").contains("kvpool declare-ended --peer hand"));
    let age = || node.json(&format!("stats {token}"))["extra"]["node"]["oldest_doubt_s"].as_f64().unwrap();
    wait_until("the doubt becomes older", || age() > 1.0);
    let unknown = node.run(&format!("declare-ended --peer c {token}"));
    assert!(unknown.status.code() == Some(1) && said(&unknown).contains("(404)"), "{}", said(&unknown));
    let ended = node.json(&format!("declare-ended --peer hand {token}"));
    assert_eq!(ended, serde_json::json!({ "peer": "hand", "sequences": [id] }));
    wait_until("no doubt is left", || age() == 0.0);
    goes_on(node, id, &token);
}

#[test]
fn a_doubt_ends_by_itself_where_that_was_chosen() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), TOKEN);
    let (node, id) = in_doubt(&token, "--doubt-limit 1s");
    goes_on(node, id, &token);
}

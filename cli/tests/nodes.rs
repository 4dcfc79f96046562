//! Two `kvpool serve` processes that exchange sequences and cached blocks.

use super::common;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use common::live::{Node, said, wait_until};
use rustix::process::Signal;
use serde_json::Value;

/// Writes a token that only this user can read.
fn token(folder: &Path, text: &str) -> PathBuf {
    let path = folder.join(text);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// A node that continues what arrives. The port is 0, or that of a node that was killed.
fn target(listen: &str, more: &str) -> Node {
    Node::start(&format!("serve --name b --size 6000 --load arrivals --listen {listen} {more}"))
}

/// A node under load whose conversations last for some seconds.
fn source(target: &Node, more: &str) -> Node {
    let peers = format!("--peers b={}", target.listen);
    Node::start(&format!("serve --name a --load conversations --load-rest 10ms {peers} {more}"))
}

fn counter(node: &Node, of: &str, name: &str) -> u64 {
    node.json("stats")["extra"][of][name].as_u64().unwrap_or_else(|| panic!("{of} has no {name}"))
}

fn is_linked(node: &Node, peer: &str) -> bool {
    node.json("stats")["extra"]["peers"][peer] == "up"
}

/// Migrates a sequence of a node by hand, and returns its id and the record.
fn migrate_one(node: &Node) -> (u64, Value) {
    let mut moved = None;
    wait_until("a sequence is migrated", || {
        let Some(id) = node.json("stats")["extra"]["load"]["longest_sequence"].as_u64() else { return false };
        let output = node.run(&format!("migrate --json --sequence-id {id} --target-node b"));
        // It may be complete before the order arrives.
        moved = output.status.success().then(|| (id, common::parse(&output)));
        moved.is_some()
    });
    moved.unwrap()
}

fn records(node: &Node, is_it: impl Fn(&Value) -> bool) -> Vec<Value> {
    let list = node.json("migration-status");
    list["migrations"].as_array().unwrap().iter().filter(|record| is_it(record)).cloned().collect()
}

/// Ends both nodes in order, which audits them.
fn end_well(nodes: [Node; 2]) {
    for node in &nodes {
        assert_eq!(node.json("audit")["sound"], true);
        assert_eq!(counter(node, "load", "blocks_corrupt"), 0);
        assert_eq!(counter(node, "load", "findings"), 0);
    }
    for node in nodes {
        let (code, errors) = node.end(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
    }
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
    wait_until("its answer is completed there", || counter(&b, "load", "arrived_completed") > 0);
    assert!(counter(&b, "load", "arrived_blocks_verified") > 0);
    let text = a.text("migration-status");
    for record in [&records(&a, of_it)[0], there] {
        assert_eq!(record["transport"], "tcp", "{record}");
        let number = |name: &str| record[name].as_u64().unwrap();
        assert_eq!(number("bytes"), number("blocks") * 256, "{record}");
        assert!((1..=number("blocks")).contains(&number("runs")), "{record}");
    }
    // The target writes nothing.
    assert!(counter(&a, "node", "sent_bytes") > 0);
    assert_eq!(counter(&b, "node", "sent_bytes"), 0);
    assert!(counter(&b, "node", "granted_bytes") > 0);
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
    end_well([a, b]);
}

#[test]
fn blocks_move_by_themselves_while_memory_is_short() {
    let folder = tempfile::tempdir().unwrap();
    let token = format!("--token-file {}", token(folder.path(), "one-token-of-the-tests").display());
    let b = target("127.0.0.1:0", &token);
    let a = source(&b, &format!("{token} --size 2500 --migrate-below 500 --migrate-to b"));
    let token = |command: &str| format!("{command} {token}");
    let extra = |node: &Node, of: &str, name: &str| {
        node.json(&token("stats"))["extra"][of][name].as_u64().unwrap_or_default()
    };
    let kinds = |kind: &str| {
        let list = b.json(&token("migration-status"));
        let all = list["migrations"].as_array().unwrap();
        all.iter().filter(|record| record["kind"] == kind && record["state"] == "committed").count()
    };
    wait_until("sequences move", || extra(&b, "load", "arrived_completed") > 3);
    wait_until("cached blocks move", || kinds("offload") > 0);
    assert!(extra(&b, "node", "received") > 0 && extra(&a, "node", "sent") > 0);
    for node in [a, b] {
        assert_eq!(node.json(&token("audit"))["sound"], true);
        assert_eq!(extra(&node, "load", "blocks_corrupt"), 0);
        let (code, errors) = node.end(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
    }
}

#[test]
fn a_peer_that_restarts_is_linked_again() {
    let b = target("127.0.0.1:0", "");
    let a = source(&b, "--size 2500 --migrate-below 500 --migrate-to b");
    wait_until("sequences move", || counter(&b, "load", "arrived") > 2);
    let listen = b.listen.clone();
    // One under way would be in doubt afterwards, and may hold most of the source's blocks.
    wait_until("none is under way", || a.json("stats")["metrics"]["stats"]["in_transfer"] == 0);
    b.end(Signal::KILL);
    wait_until("the loss is noticed", || !is_linked(&a, "b"));
    let b = target(&listen, "");
    wait_until("sequences move again", || counter(&b, "load", "arrived_completed") > 2);
    assert!(is_linked(&a, "b") && is_linked(&b, "a"));
    end_well([a, b]);
}

#[test]
fn a_signal_to_end_during_migrations_loses_nothing() {
    let b = target("127.0.0.1:0", "");
    let a = source(&b, "--size 2500 --migrate-below 500 --migrate-to b --load-threads 3");
    wait_until("sequences move", || counter(&b, "load", "arrived") > 5);
    let (code, errors) = a.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    // Everything that arrived is completed, with the bytes that were written there.
    wait_until("all are completed", || counter(&b, "load", "open") == 0);
    assert_eq!(counter(&b, "load", "arrived"), counter(&b, "load", "arrived_completed"));
    let a = source(&b, "--size 2500 --migrate-below 500 --migrate-to b");
    let before = counter(&b, "load", "arrived");
    wait_until("another process of the source moves some", || counter(&b, "load", "arrived") > before + 5);
    // Now the target ends: what cannot go there stays.
    let (code, errors) = b.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    let completed = counter(&a, "load", "completed");
    wait_until("the source goes on", || counter(&a, "load", "completed") > completed + 3);
    assert_eq!(a.json("audit")["sound"], true);
    assert_eq!(counter(&a, "load", "blocks_corrupt"), 0);
    let (code, errors) = a.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
}

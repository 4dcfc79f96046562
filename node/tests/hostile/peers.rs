//! Peers whose clocks are wrong, and peers with other blocks.

use std::time::{SystemTime, UNIX_EPOCH};

use kvpool::TransferError;
use kvpool::storage::{Arrangement, KvPlanes};
use kvpool_node::admin::{AdminServer, Client, Limits};
use kvpool_node::wire::Denial;
use kvpool_node::{Node, NodeBuilder};

use crate::kv;
use crate::support::*;

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64
}

/// A process of `b` with a clock.
fn process(incarnation: u64, began_ms: u64) -> Process {
    Process { began_ms, ..Process::new("b", incarnation) }
}

/// Starts a node with an admin interface.
async fn with_admin(builder: NodeBuilder) -> (Node, Client) {
    let server = AdminServer::bind(&"127.0.0.1:0".parse().unwrap(), None, Limits::default()).unwrap();
    let node = builder.admin(server).start().await.unwrap().0;
    let url = node.admin_address().unwrap().clone();
    (node, Client::new(url, None))
}

async fn state(client: &Client, peer: &str) -> String {
    let stats = client.get("/stats").await.unwrap();
    stats["extra"]["peers"][peer].as_str().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clock_that_ran_ahead_keeps_no_later_process_out() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 20)).await;
    let ahead = Peer::connect(&node, &process(1, now_ms() + DAY_MS)).await.unwrap();
    linked(&node, "b", true).await;
    drop(ahead);
    linked(&node, "b", false).await;
    // Its clock is right.
    let next = Peer::connect(&node, &process(2, now_ms())).await.unwrap();
    linked(&node, "b", true).await;
    // The first one is older than that, though it says otherwise.
    let again = Peer::connect(&node, &process(1, now_ms() + DAY_MS)).await.unwrap();
    assert_eq!(again.refused().await, Denial::SecondProcess);
    drop(next);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_whose_clock_is_behind_links_once_the_former_is_declared_ended() {
    let (node, client) = with_admin(builder("a", kv::pool(kv::plain(), 20))).await;
    let first = Peer::connect(&node, &process(1, now_ms())).await.unwrap();
    linked(&node, "b", true).await;
    drop(first);
    linked(&node, "b", false).await;
    let behind = process(2, now_ms() - DAY_MS);
    let refused = Peer::connect(&node, &behind).await.unwrap();
    assert_eq!(refused.refused().await, Denial::OlderProcess);
    let state = state(&client, "b").await;
    for part in ["down: a process of this name is refused", "kvpool declare-ended --peer NAME"] {
        assert!(state.contains(part), "no {part:?} in {state}");
    }
    let links = client.get("/topology").await.unwrap()["links"].clone();
    assert!(links[0]["reason"].as_str().unwrap().contains("declare-ended --peer NAME"), "{links}");
    assert!(node.declare_ended("b").await.unwrap().is_empty());
    let next = Peer::connect(&node, &behind).await.unwrap();
    linked(&node, "b", true).await;
    tokio::time::sleep(QUIET).await;
    assert_eq!(next.link.cause(), None, "it stays");
}

/// The link stays: it carries parts of copies, and the answer of what is in doubt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_another_layout_are_refused_at_once_and_the_link_stays() {
    let other = kv::sized(8, Arrangement::LayerFirst, KvPlanes::Separate);
    assert_ne!(other.block_tokens(), kv::plain().block_tokens());
    let (b, b_client) = with_admin(builder("b", kv::pool(other, 100))).await;
    let peer = kvpool_node::transport::tcp::PeerSettings::new("b", b.addresses()[0].clone());
    let (a, client) = with_admin(builder("a", kv::pool(kv::plain(), 100)).peers(vec![peer])).await;
    linked(&a, "b", true).await;
    linked(&b, "a", true).await;
    let said = "up: its blocks have another layout: only parts of copies are transferred";
    assert_eq!((state(&client, "b").await, state(&b_client, "a").await), (said.into(), said.into()));
    assert_eq!(client.get("/stats").await.unwrap()["extra"]["node"]["peers_up"], 1);
    let links = client.get("/topology").await.unwrap()["links"].clone();
    assert_eq!((&links[0]["is_up"], &links[0]["reason"]), (&true.into(), &said[4..].into()), "{links}");

    let typed = TransferError::OtherLayout { node: "b".into() };
    let sequence = kv::admit(a.pool(), 7, &kv::prompt(1, 42)).unwrap();
    let stays = soon("a refusal", a.pool().migrate_to_node(sequence, "b")).await.unwrap_err();
    assert_eq!(stays.error, typed);
    kv::check(a.pool(), &stays.sequence, &kv::prompt(1, 42));
    drop(stays);
    assert_eq!(a.pool().offload_to_node("b", 5).await.unwrap_err(), typed);
    assert!(a.migrations().await.unwrap().is_empty() && b.migrations().await.unwrap().is_empty());
    linked(&a, "b", true).await;
}

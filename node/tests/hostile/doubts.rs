//! Two processes of one name: what is in doubt is concluded from nothing but a proof.

use std::future::Future;
use std::pin::Pin;

use kvpool::{MigrateError, MigrationReport};
use kvpool_node::protocol::ToSource;
use kvpool_node::transport::tcp::PeerSettings;
use kvpool_node::wire::Denial;
use kvpool_node::{Arrivals, Node, Restarts};

use crate::kv;
use crate::support::*;

type Moving = Pin<Box<dyn Future<Output = Result<MigrationReport, MigrateError>> + Send>>;

/// A node, a migration to process 1 of `b` that was told to commit, and that process.
async fn in_doubt(process: &Process, restarts: Restarts) -> (Node, Arrivals, Moving, Peer) {
    let node = builder("a", kv::pool(kv::plain(), 100)).restarts(restarts).start().await.unwrap();
    let (node, arrivals) = node;
    let peer = Peer::connect(&node, process).await.unwrap();
    linked(&node, "b", true).await;
    let sequence = kv::admit(node.pool(), 7, &kv::prompt(1, 42)).unwrap();
    let pool = node.pool().clone();
    let mut moving: Moving = Box::pin(async move { pool.migrate_to_node(sequence, "b").await });
    tokio::select! {
        moved = &mut moving => panic!("{moved:?}"),
        _ = peer.up_to_commit(11) => {}
    }
    (node, arrivals, moving, peer)
}

async fn is_held(moving: &mut Moving) {
    let over = tokio::time::timeout(QUIET, moving).await;
    assert!(over.is_err(), "two owners: {over:?}");
}

async fn is_restored(node: &Node, moving: Moving) {
    let restored = soon("the end of the doubt", moving).await.unwrap_err();
    assert!(restored.to_string().contains("process has ended"), "{restored}");
    kv::check(node.pool(), &restored.sequence, &kv::prompt(1, 42));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_of_a_name_proves_nothing() {
    let (node, _arrivals, mut moving, first) = in_doubt(&Process::new("b", 1), Restarts::Proven).await;
    // While the first one is linked, no other one is.
    let second = Peer::connect(&node, &Process::new("b", 2)).await.unwrap();
    assert_eq!(second.refused().await, Denial::SecondProcess);
    drop(first);
    linked(&node, "b", false).await;
    let second = Peer::connect(&node, &Process::new("b", 2)).await.unwrap();
    linked(&node, "b", true).await;
    is_held(&mut moving).await;
    // The second one serves, and cannot answer for the first.
    let other = kv::admit(node.pool(), 8, &kv::prompt(2, 10)).unwrap();
    let pool = node.pool().clone();
    let also = tokio::spawn(async move { pool.migrate_to_node(other, "b").await });
    let (id, reservation) = second.up_to_commit(3).await;
    second.to_source(id, ToSource::Committed { reservation }).await;
    soon("a migration", also).await.unwrap().unwrap();
    is_held(&mut moving).await;
    // The first one comes back: it began earlier.
    drop(second);
    linked(&node, "b", false).await;
    let first = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    assert_eq!(first.refused().await, Denial::OlderProcess);
    let older = Process { began_ms: 1, ..Process::new("b", 3) };
    assert_eq!(Peer::connect(&node, &older).await.unwrap().refused().await, Denial::OlderProcess);
    is_held(&mut moving).await;
    node.declare_ended("b").await.unwrap();
    is_restored(&node, moving).await;
}

/// Two nodes that were given one name: the second hears why it is not linked, and is once the first
/// has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_node_of_a_name_is_told_so() {
    let (a, _to_a) = start("a", kv::pool(kv::plain(), 50)).await;
    let (first, _to_first) = start_beside("b", kv::pool(kv::plain(), 50), &[&a]).await;
    let peers = vec![PeerSettings::new("a", a.addresses()[0].clone())];
    let second = builder("b", kv::pool(kv::plain(), 50)).peers(peers).start().await.unwrap().0;
    until("a reason", async || {
        second.unreached().iter().any(|(_, reason)| reason.contains("another process of this name"))
    })
    .await;
    assert!(first.unreached().is_empty());
    drop(first);
    until("a link", async || second.unreached().is_empty()).await;
    linked(&a, "b", true).await;
}

/// The same process may come back: its answer counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_comes_back_answers() {
    let process = Process::new("b", 1);
    let (node, _arrivals, mut moving, first) = in_doubt(&process, Restarts::Proven).await;
    drop(first);
    linked(&node, "b", false).await;
    is_held(&mut moving).await;
    let again = Peer::connect(&node, &process).await.unwrap();
    let (id, reservation) = again
        .wait_for(|message| match message {
            NodeMessage::Migration(envelope) => match envelope.message {
                kvpool_node::protocol::Message::ToTarget(kvpool_node::protocol::ToTarget::Query {
                    reservation,
                }) => Some((envelope.id, reservation)),
                _ => None,
            },
            _ => None,
        })
        .await;
    again.to_source(id, ToSource::Committed { reservation }).await;
    soon("the answer", moving).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_proves_that_the_former_process_has_ended() {
    let process = Process::new("b", 1).lock(5);
    let (node, _arrivals, mut moving, first) = in_doubt(&process, Restarts::Proven).await;
    drop(first);
    linked(&node, "b", false).await;
    let elsewhere = Peer::connect(&node, &Process::new("b", 2).lock(6)).await.unwrap();
    is_held(&mut moving).await;
    drop((elsewhere, moving));
    let (node, _arrivals, moving, first) = in_doubt(&process, Restarts::Proven).await;
    drop(first);
    linked(&node, "b", false).await;
    let _second = Peer::connect(&node, &Process::new("b", 2).lock(5)).await.unwrap();
    is_restored(&node, moving).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_is_proof_where_it_was_chosen() {
    let (node, _arrivals, moving, first) = in_doubt(&Process::new("b", 1), Restarts::ByName).await;
    drop(first);
    linked(&node, "b", false).await;
    let _second = Peer::connect(&node, &Process::new("b", 2)).await.unwrap();
    is_restored(&node, moving).await;
}

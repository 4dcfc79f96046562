//! Nodes, drivers and runtimes that end at any time: each request gets its sequence back, with the
//! reason.

use std::time::{Duration, Instant};

use kvpool::TransferError;

use crate::kv;
use crate::storage::{self, Access, Gate};
use crate::support::*;

/// A runtime that ends takes no sequence along.
#[test]
fn a_runtime_that_ends_gives_sequences_back() {
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (of_node, of_engine) = (runtime(), runtime());
    let pool = kv::pool(kv::plain(), 100);
    let (node, _arrivals) = of_node.block_on(start("a", pool.clone()));
    let peer = of_engine.block_on(async {
        let peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
        linked(&node, "b", true).await;
        peer
    });
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(&pool, 7, &tokens).unwrap();
    let moving = {
        let pool = pool.clone();
        of_engine.spawn(async move { pool.migrate_to_node(sequence, "b").await })
    };
    of_engine.block_on(peer.prepare());
    of_node.shutdown_timeout(Duration::from_secs(5));
    let failed = of_engine.block_on(soon("an answer", moving)).unwrap().unwrap_err();
    assert!(matches!(failed.error, TransferError::Node { .. }), "{failed}");
    kv::check(&pool, &failed.sequence, &tokens);
    let stopped = of_engine.block_on(soon("an end", node.shutdown(Duration::from_secs(1))));
    assert!(!stopped, "it did not end in order");
    drop(node);
}

/// Behind the word to commit, a sequence comes back with an error that says so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_ends_in_doubt_says_so() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 100)).await;
    let peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    linked(&node, "b", true).await;
    let pool = node.pool().clone();
    let sequence = kv::admit(&pool, 7, &kv::prompt(1, 42)).unwrap();
    let moving = {
        let pool = pool.clone();
        tokio::spawn(async move { pool.migrate_to_node(sequence, "b").await })
    };
    peer.up_to_commit(11).await;
    let began = Instant::now();
    assert!(!node.shutdown(Duration::from_millis(300)).await, "one is in doubt");
    assert!(began.elapsed() < WAIT);
    assert!(!node.shutdown(Duration::from_millis(50)).await, "it still is");
    assert!(!moving.is_finished());
    drop(node);
    let failed = soon("an answer", moving).await.unwrap().unwrap_err();
    assert!(matches!(&failed.error, TransferError::InDoubt { node, .. } if node == "b"), "{failed}");
    kv::check(&pool, &failed.sequence, &kv::prompt(1, 42));
}

/// A thread that does not end delays no shutdown; a second one waits for it, and says the truth.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_ends_by_its_deadline() {
    let gate = Gate::default();
    let hook = {
        let gate = gate.clone();
        move |access| {
            if access == Access::Pack {
                gate.pass();
            }
        }
    };
    let (node, _arrivals) = start("a", storage::pool(kv::other(), 50, hook)).await;
    let _peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    linked(&node, "b", true).await;
    let pool = node.pool().clone();
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(&pool, 7, &tokens).unwrap();
    let moving = {
        let pool = pool.clone();
        tokio::spawn(async move { pool.migrate_to_node(sequence, "b").await })
    };
    until("it begins", async || !node.migrations().await.unwrap().is_empty()).await;
    let began = Instant::now();
    assert!(!node.shutdown(Duration::from_millis(200)).await);
    assert!(began.elapsed() < WAIT);
    gate.open();
    assert!(node.shutdown(WAIT).await, "nothing is left");
    assert!(node.shutdown(Duration::ZERO).await || node.shutdown(WAIT).await, "nor afterwards");
    let failed = soon("an answer", moving).await.unwrap().unwrap_err();
    kv::check(&pool, &failed.sequence, &tokens);
}

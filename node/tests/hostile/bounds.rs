//! What peers and engines cause is bounded, and refused with a reason.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpool::{Pool, Sequence};
use kvpool_node::NodeError;
use kvpool_node::protocol::{Grant, Places, ReservationId, ToSource};

use crate::kv;
use crate::storage::{self, Access, Gate};
use crate::support::*;

/// Begins to move a sequence.
fn moving(
    pool: &Pool,
    sequence: Sequence,
    to: &str,
) -> tokio::task::JoinHandle<Result<kvpool::MigrationReport, kvpool::MigrateError>> {
    let (pool, to) = (pool.clone(), to.to_owned());
    tokio::spawn(async move { pool.migrate_to_node(sequence, &to).await })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_come_once_are_forgotten() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 50)).await;
    for number in 0..150 {
        let process = Process::new(&format!("once-{number}"), number);
        drop(Peer::connect(&node, &process).await.unwrap());
    }
    until("forgotten", async || {
        let peers = node.peers().await.unwrap();
        peers.len() <= 64 && peers.iter().all(|(_, is_up)| !is_up)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn more_places_than_the_manifest_has_end_the_migration() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 100)).await;
    let peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    linked(&node, "b", true).await;
    let (reservation, all) = (ReservationId(7), places(0, u32::MAX));
    let grant = Grant::default();
    let tokens = kv::prompt(1, 42);
    let moved = moving(node.pool(), kv::admit(node.pool(), 7, &tokens).unwrap(), "b");
    let id = peer.prepare().await;
    let (accepted, missing) = (all.clone(), all.clone());
    peer.to_source(id, ToSource::Prepared { reservation, accepted, missing, grant: grant.clone() }).await;
    let refused = soon("a violation", moved).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("violated the protocol"), "{refused}");
    kv::check(node.pool(), &refused.sequence, &tokens);
    drop(refused);
    // Of cached blocks, those that were accepted are counted first.
    let pool = node.pool().clone();
    let offloaded = tokio::spawn(async move { pool.offload_to_node("b", 5).await });
    let id = peer.prepare().await;
    peer.to_source(id, ToSource::Prepared { reservation, accepted: all, missing: Places::default(), grant })
        .await;
    let refused = soon("a violation", offloaded).await.unwrap().unwrap_err();
    assert!(refused.to_string().contains("violated the protocol"), "{refused}");
    assert_eq!(kv::cached(node.pool(), &tokens), 10, "they are here as before");
}

/// A manifest that the peer does not take is refused here, every time, and costs no link.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_that_the_peer_does_not_take_fails_its_migration_alone() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 400)).await;
    let mut process = Process::new("b", 1);
    process.limits.message_bytes = 2000;
    let peer = Peer::connect(&node, &process).await.unwrap();
    linked(&node, "b", true).await;
    let mut sequence = kv::admit(node.pool(), 7, &kv::prompt(1, 800)).unwrap();
    for _ in 0..2 {
        let refused = soon("a refusal", node.pool().migrate_to_node(sequence, "b")).await.unwrap_err();
        assert!(refused.to_string().contains("the peer takes 2000"), "{refused}");
        sequence = *refused.sequence;
    }
    assert_eq!(peer.link.cause(), None);
    let short = kv::admit(node.pool(), 8, &kv::prompt(2, 10)).unwrap();
    drop(moving(node.pool(), short, "b"));
    peer.prepare().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_that_the_engine_does_not_take_are_refused() {
    let b = builder("b", kv::pool(kv::other(), 100)).arrivals(1).start().await.unwrap();
    let (b, mut arrivals) = b;
    let (a, _to_a) = start_beside("a", kv::pool(kv::plain(), 100), &[&b]).await;
    let admit = |id| kv::admit(a.pool(), id, &kv::prompt(id as u32, 30)).unwrap();
    a.pool().migrate_to_node(admit(1), "b").await.unwrap();
    let refused = a.pool().migrate_to_node(admit(2), "b").await.unwrap_err();
    assert!(refused.to_string().contains("1 sequences wait for its engine"), "{refused}");
    kv::check(a.pool(), &refused.sequence, &kv::prompt(2, 30));
    let taken = soon("an arrival", arrivals.recv()).await.unwrap();
    a.pool().migrate_to_node(*refused.sequence, "b").await.unwrap();
    let also = soon("an arrival", arrivals.recv()).await.unwrap();
    drop(arrivals);
    // Nothing is committed that would be closed.
    let refused = a.pool().migrate_to_node(admit(3), "b").await.unwrap_err();
    assert!(refused.to_string().contains("takes no sequences"), "{refused}");
    kv::check(a.pool(), &refused.sequence, &kv::prompt(3, 30));
    assert_eq!(b.pool().sequence_count(), 2);
    drop((taken, also));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_has_one_node_at_a_time() {
    let pool = kv::pool(kv::plain(), 50);
    let (first, _arrivals) = start("a", pool.clone()).await;
    let second = builder("b", pool.clone()).start().await;
    assert!(matches!(second, Err(NodeError::PoolInUse)), "{:?}", second.map(drop));
    // The first still serves it.
    let _peer = Peer::connect(&first, &Process::new("c", 1)).await.unwrap();
    linked(&first, "c", true).await;
    drop(first);
    until("a node again", async || builder("b", pool.clone()).start().await.is_ok()).await;
}

/// The bytes that a peer writes are still being unpacked when its migration ends, and its last
/// message is lost with the link: the blocks are free once the thread is done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_whose_end_was_not_heard_of_is_asked_about() {
    let (gate, is_writing) = (Gate::default(), Arc::new(AtomicBool::new(false)));
    let hook = {
        let (gate, is_writing) = (gate.clone(), is_writing.clone());
        move |access| {
            if access == Access::Unpack {
                is_writing.store(true, Ordering::Relaxed);
                gate.pass();
            }
        }
    };
    let (b, _to_b) = start("b", storage::pool(kv::other(), 50, hook)).await;
    let (a, _to_a) = start_beside("a", kv::pool(kv::plain(), 50), &[&b]).await;
    let moved = moving(a.pool(), kv::admit(a.pool(), 7, &kv::prompt(1, 42)).unwrap(), "b");
    until("bytes arrive", async || is_writing.load(Ordering::Relaxed)).await;
    a.cut_links("b").await.unwrap();
    drop(soon("the end of the migration", moved).await.unwrap().unwrap_err());
    until("the grant is quarantined", async || b.quarantined_grants().await.unwrap() == 1).await;
    gate.open();
    until("it is over", async || b.quarantined_grants().await.unwrap() == 0).await;
    until("free", async || b.pool().stats().used == 0).await;
    kv::is_idle(b.pool());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_asks_hears_that_a_grant_is_over() {
    let (node, _arrivals) = start("a", kv::pool(kv::plain(), 50)).await;
    let peer = Peer::connect(&node, &Process::new("b", 1)).await.unwrap();
    for _ in 0..2 {
        peer.link.send(&NodeMessage::IsOver { way: Way::Tcp, tag: 9 }).await.unwrap();
        assert_eq!(peer.recv().await, NodeMessage::Over { way: Way::Tcp, tag: 9 });
    }
}

/// A panic on a thread for blocking work fails its migration, and costs no sequence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_a_storage_fails_its_migration() {
    let fails = Arc::new(Mutex::new(None));
    let hook = |fails: &Arc<Mutex<Option<Access>>>| {
        let fails = fails.clone();
        move |access| {
            let fails = *fails.lock().unwrap() == Some(access);
            assert!(!fails, "a storage that fails");
        }
    };
    let there = Arc::new(Mutex::new(None));
    let (b, _to_b) = start("b", storage::pool(kv::other(), 50, hook(&there))).await;
    let (a, _to_a) = start_beside("a", storage::pool(kv::other(), 50, hook(&fails)), &[&b]).await;
    let tokens = kv::prompt(1, 42);
    let mut sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    // In the export; in the verification; where bytes arrive.
    for (place, access) in [(&fails, Access::Pack), (&there, Access::Pack), (&there, Access::Unpack)] {
        *place.lock().unwrap() = Some(access);
        let failed = soon("a failure", a.pool().migrate_to_node(sequence, "b")).await.unwrap_err();
        *place.lock().unwrap() = None;
        kv::check(a.pool(), &failed.sequence, &tokens);
        sequence = *failed.sequence;
        until("the target is free", async || b.pool().stats().used == 0).await;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    soon("a migration", a.pool().migrate_to_node(sequence, "b")).await.unwrap();
}

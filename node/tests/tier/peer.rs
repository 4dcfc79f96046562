//! A node as the store of a tier.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvpool::Pool;
use kvpool::prefix::{BlockHash, PrefixKeys};
use kvpool_node::tier::{
    Landing, Outcome, Peer, SharedTier, TierError, TierPolicy, TierRead, Tiered, TieredSettings, ValueError,
};
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::{Arrivals, Node};

use super::kv;
use super::support::{
    NAMESPACE, WAIT, bring_back, get, hasty, idle, keys, patient, put, soon, tier, tiered, until,
};

async fn linked(node: &Node, peer: &str) {
    let changed = async {
        while !node.peers().await.unwrap().contains(&(peer.to_owned(), true)) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT, changed).await.expect("a link");
}

/// A node with a large cache, and a node over a window that is linked to it.
async fn nodes(window: usize) -> ([Arc<Node>; 2], [Arrivals; 2]) {
    let address = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let large = kv::pool(kv::other(), 400);
    let (cache, of_cache) = Node::builder(large).name("cache").listen(address).start().await.unwrap();
    let settings = PeerSettings::new("cache", cache.addresses()[0].clone());
    let window = Node::builder(kv::pool(kv::plain(), window)).name("window").peers(vec![settings]);
    let (window, of_window) = window.start().await.unwrap();
    linked(&window, "cache").await;
    ([window, cache].map(Arc::new), [of_window, of_cache])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conformance() {
    let ([window, cache], _arrivals) = nodes(200).await;
    let store = Peer::new(window.clone(), "cache", NAMESPACE, WAIT).unwrap();
    super::conformance::suite(&tier(store, patient())).await;
    idle(cache.pool()).await;
    assert!(cache.pool().stats().evictable >= 40);
}

/// Two pools share prefixes through a node, although the window is smaller than a prompt.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pools_share_through_a_node() {
    let ([window, cache], _arrivals) = nodes(8).await;
    let store = Peer::new(window.clone(), "cache", NAMESPACE, WAIT).unwrap();
    let shared = tier(store, hasty());
    let (a, b) = kv::pools(100);
    let tokens = kv::prompt(1, 4 * 13 + 1);
    drop(kv::admit(&a, 7, &tokens).unwrap());
    let report = tiered(&a, &shared, TierPolicy::Manual).offload(100, soon()).await.unwrap();
    assert_eq!(report.cached_blocks, 13, "{report:?}");
    // Under hashes of its own: the node does not know the namespace.
    assert_eq!((cache.pool().stats().evictable, kv::cached(cache.pool(), &tokens)), (13, 0));
    let report = bring_back(&tiered(&b, &shared, TierPolicy::Manual), &tokens, WAIT).await;
    assert_eq!(report.cached_blocks, 13, "{report:?}");
    assert_eq!(kv::cached(&b, &tokens), 13);
    for pool in [&a, &b, cache.pool()] {
        idle(pool).await;
    }
}

/// Pools of two models whose layout and hashes are the same share nothing, also through one node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn namespaces_are_apart_in_one_node() {
    let ([window, cache], _arrivals) = nodes(200).await;
    let store = |namespace| Peer::new(window.clone(), "cache", namespace, WAIT).unwrap();
    let (one, other) = (tier(store("one"), hasty()), tier(store("other"), hasty()));
    let of = |pool: &Pool, tier: &Arc<SharedTier>, namespace| {
        let settings = TieredSettings::new(namespace).policy(TierPolicy::Manual);
        Tiered::new(pool.clone(), tier.clone(), settings).unwrap()
    };
    let (a, b) = kv::pools(100);
    let tokens = kv::prompt(1, 4 * 13 + 1);
    drop(kv::admit(&a, 7, &tokens).unwrap());
    let report = of(&a, &one, "one").offload(100, soon()).await.unwrap();
    assert_eq!(report.cached_blocks, 13, "{report:?}");
    let report = of(&b, &other, "other").bring_back(&PrefixKeys::new(), &tokens, soon()).await.unwrap();
    assert_eq!(report.cached_blocks, 0, "blocks of another model: {report:?}");
    let report = of(&b, &one, "one").bring_back(&PrefixKeys::new(), &tokens, soon()).await.unwrap();
    assert_eq!(report.cached_blocks, 13, "{report:?}");
    assert_eq!(kv::cached(&b, &tokens), 13);
    for pool in [&a, &b, cache.pool()] {
        idle(pool).await;
    }
}

/// A node that is gone is a miss, within the deadline.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_ends() {
    let ([window, cache], _arrivals) = nodes(200).await;
    let store = Peer::new(window.clone(), "cache", NAMESPACE, Duration::from_millis(300)).unwrap();
    let shared = tier(store, hasty());
    let some = keys(0..10);
    put(&shared, &some).await;
    cache.shutdown(WAIT).await;
    drop(cache);
    let others = keys(50..60);
    let outcomes = get(&shared, &others).await;
    assert!(!outcomes.contains(&kvpool_node::tier::Outcome::Hit), "{outcomes:?}");
    let (b, _) = kv::pools(50);
    let of_b = tiered(&b, &shared, TierPolicy::Manual);
    let report = bring_back(&of_b, &kv::prompt(1, 41), Duration::from_millis(500)).await;
    assert_eq!(report.cached_blocks, 0);
    shared.close();
    idle(&b).await;
}

#[tokio::test]
async fn a_window_must_have_a_cache() {
    let (node, _arrivals) =
        Node::builder(kv::builder(kv::plain(), 8).build().unwrap()).start().await.unwrap();
    let store = Peer::new(Arc::new(node), "cache", NAMESPACE, WAIT);
    assert!(matches!(store.err(), Some(TierError::Pool(_))));
}

/// A lookup says where the gaps are, of keys of any number, and brings nothing into the window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_moves_no_block() {
    let ([window, cache], _arrivals) = nodes(200).await;
    let store = || Peer::new(window.clone(), "cache", NAMESPACE, WAIT).unwrap();
    put(&tier(store(), patient()), &keys(0..40)).await;
    window.pool().clear_prefix_cache();
    window.pool().evict_cached(0);
    // More than one question.
    let asked = keys(0..2500);
    let found = tier(store(), patient()).exists(asked.clone(), soon()).await;
    let hits: Vec<usize> = (0..found.len()).filter(|&at| found[at] == Outcome::Hit).collect();
    assert_eq!(hits, (0..40).collect::<Vec<_>>());
    let gap = [keys(1..2), keys(90..91), keys(2..3)].concat();
    let found = tier(store(), patient()).exists(gap, soon()).await;
    assert_eq!(found, [Outcome::Hit, Outcome::Miss, Outcome::Hit]);
    let other = tier(Peer::new(window.clone(), "cache", "other", WAIT).unwrap(), patient());
    assert!(!other.exists(asked, soon()).await.contains(&Outcome::Hit), "keys of another namespace");
    let stats = window.pool().stats();
    assert_eq!((stats.evictable, stats.in_transfer), (0, 0));
    idle(cache.pool()).await;
}

/// Changes a byte of a cached block, behind the back of its pool.
fn damage(pool: &Pool, hash: BlockHash) {
    let export = pool.export_prefix(&[hash]).unwrap();
    let mut bytes = export.packed(0).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    let piece = export.piece(&[0]).unwrap();
    // SAFETY: the piece keeps the block in its frame, and no other thread uses the pool.
    unsafe { pool.storage().unwrap().unpack(&piece.runs, &bytes) }.unwrap();
}

/// A node drops what its memory damaged when it is asked for it, and for no other reason; a put
/// then replaces it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_does_not_serve_what_its_memory_damaged() {
    let ([window, cache], _arrivals) = nodes(200).await;
    let store = Peer::new(window.clone(), "cache", NAMESPACE, WAIT).unwrap();
    let tier = tier(store, patient());
    let some = keys(0..3);
    put(&tier, &some[..1]).await;
    let first = cache.pool().cached_blocks()[0].1;
    put(&tier, &some).await;
    for times in 1..3 {
        window.pool().clear_prefix_cache();
        damage(cache.pool(), first);
        assert_eq!(get(&tier, &some).await, [Outcome::Miss, Outcome::Hit, Outcome::Hit]);
        // The node releases the blocks that it sent after the answer.
        idle(cache.pool()).await;
        assert_eq!((cache.pool().stats().evictable, cache.counters().damaged_blocks), (2, times));
        assert_eq!((tier.counters().bad_values, tier.counters().failed), (times, 0), "it tells the reader");
        assert_eq!(put(&tier, &some[..1]).await, [Outcome::Stored]);
        window.pool().clear_prefix_cache();
        assert_eq!(get(&tier, &some).await, [Outcome::Hit, Outcome::Hit, Outcome::Hit]);
    }
}

/// Memory for a value that the caller finds to be wrong: a value of values has a checksum of its own.
struct Refusing;

impl Landing for Refusing {
    fn land(&mut self, _value: &[u8]) -> Result<(), ValueError> {
        Err(ValueError::Checksum)
    }
}

/// A wrong value is dropped from the window alone, and takes no other along.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_value_leaves_the_others_in_the_window() {
    let ([window, cache], _arrivals) = nodes(200).await;
    let store = Peer::new(window.clone(), "cache", NAMESPACE, WAIT).unwrap();
    let tier = tier(store, patient());
    let some = keys(0..8);
    put(&tier, &some).await;
    let bytes = kvpool_node::tier::value_bytes(super::support::packed_bytes());
    let read = TierRead { key: some[3], bytes, memory: Box::new(Refusing) };
    let outcomes = tier.get(vec![read], soon()).await;
    assert_eq!(outcomes, [Outcome::Failed(ValueError::Checksum.into())]);
    until("it is dropped", || window.pool().stats().evictable == 7).await;
    assert_eq!(cache.pool().stats().evictable, 8, "the word of a peer drops nothing");
    // It comes back from the node.
    assert_eq!(put(&tier, &some[3..4]).await, [Outcome::Stored]);
    assert_eq!(get(&tier, &some).await, vec![Outcome::Hit; 8]);
    idle(window.pool()).await;
}

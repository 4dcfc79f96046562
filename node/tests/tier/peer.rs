//! A node as the store of a tier.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvpool::Pool;
use kvpool::prefix::PrefixKeys;
use kvpool_node::tier::{
    Peer, SharedTier, StoreTier, TierError, TierPolicy, TierSettings, Tiered, TieredSettings,
};
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::{Arrivals, Node};

use super::kv;
use super::support::{NAMESPACE, WAIT, bring_back, get, hasty, idle, keys, put, soon, tier, tiered};

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
    super::conformance::suite(&*tier(store, TierSettings::default())).await;
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
    let of = |pool: &Pool, tier: &Arc<StoreTier>, namespace| {
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
    put(&*shared, &some).await;
    cache.shutdown(WAIT).await;
    drop(cache);
    let others = keys(50..60);
    let outcomes = get(&*shared, &others).await;
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

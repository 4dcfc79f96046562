//! The cache of a source is cleared while a copy is on its way: what was cleared is not found at the
//! target.

mod hooked;
#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hooked::{Access, Hooked};
use kvpool::prefix::PrefixKeys;
use kvpool::{DeviceId, Pool, SequenceId};
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::{Arrivals, Node};

const WAIT: Duration = Duration::from_secs(20);

/// Two linked nodes, `a` and `b`. `b` clears the cache of `a` when it receives.
async fn pair() -> [(Node, Arrivals); 2] {
    let source: Arc<OnceLock<Pool>> = Arc::default();
    let of_hook = source.clone();
    // When checksums of what arrived are compared.
    let hook = move |access| {
        if access == Access::Pack
            && let Some(source) = of_hook.get()
        {
            source.clear_prefix_cache();
        }
        Ok(())
    };
    let storage = Arc::new(Hooked::new(&kv::other(), 101, DeviceId::Host, hook));
    let b = kv::builder(kv::other(), 100).storage(storage).prefix_cache(kv::config());
    let address = Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let b = Node::builder(b.build().unwrap()).name("b").listen(address).start().await.unwrap();
    let peer = PeerSettings::new("b", b.0.addresses()[0].clone());
    let a = kv::pool(kv::plain(), 100);
    source.set(a.clone()).unwrap();
    let a = Node::builder(a).name("a").peers(vec![peer]).start().await.unwrap();
    for (node, peer) in [(&a.0, "b"), (&b.0, "a")] {
        let up = async {
            while !node.peers().await.unwrap().contains(&(peer.to_owned(), true)) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(WAIT, up).await.expect("a link");
    }
    [a, b]
}

/// Waits until the pool owns nothing.
async fn idle(pool: &Pool) {
    let empty = async {
        while pool.sequence_count() > 0 || pool.stats().used > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT, empty).await.expect("an idle pool");
    kv::is_idle(pool);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_arrives_and_its_blocks_are_not_found() {
    let [(a, _), (b, mut to_b)] = pair().await;
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    a.pool().migrate_to_node(sequence, "b").await.unwrap();
    let arrived = tokio::time::timeout(WAIT, to_b.recv()).await.expect("an arrival").unwrap().sequence;
    assert_eq!((arrived.id(), arrived.len()), (SequenceId(7), 42));
    kv::check(b.pool(), &arrived, &tokens);
    assert_eq!(kv::cached(b.pool(), &[&tokens[..], &[0]].concat()), 0);
    drop(arrived);
    assert_eq!(kv::cached(b.pool(), &[&tokens[..], &[0]].concat()), 0);
    idle(a.pool()).await;
    idle(b.pool()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cleared_blocks_do_not_arrive() {
    let [(a, _), (b, _)] = pair().await;
    let tokens = kv::prompt(1, 41);
    drop(kv::admit(a.pool(), 7, &tokens).unwrap());
    let failed = a.pool().offload_to_node("b", 100).await.unwrap_err();
    assert!(failed.to_string().contains("the cache of the source was cleared"), "{failed}");
    assert_eq!((kv::cached(a.pool(), &tokens), kv::cached(b.pool(), &tokens)), (0, 0));
    // The same when the target asks for them.
    drop(kv::admit(a.pool(), 7, &tokens).unwrap());
    let failed = b.pool().bring_back_from_node("a", &PrefixKeys::new(), &tokens).await.unwrap_err();
    assert!(failed.to_string().contains("the cache of the source was cleared"), "{failed}");
    assert_eq!((kv::cached(a.pool(), &tokens), kv::cached(b.pool(), &tokens)), (0, 0));
    idle(a.pool()).await;
    idle(b.pool()).await;
}

/// Waits for a condition.
async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let waiting = async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT, waiting).await.unwrap_or_else(|_| panic!("{what}"));
}

/// Two linked nodes that clear nothing by themselves.
async fn plain_pair() -> [(Node, Arrivals); 2] {
    let address = || Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let b = Node::builder(kv::pool(kv::other(), 100)).name("b").listen(address()).start().await.unwrap();
    let peer = PeerSettings::new("b", b.0.addresses()[0].clone());
    let a = Node::builder(kv::pool(kv::plain(), 100)).name("a").peers(vec![peer]).start().await.unwrap();
    for (node, peer) in [(&a.0, "b"), (&b.0, "a")] {
        let mut peers = Vec::new();
        while !peers.contains(&(peer.to_owned(), true)) {
            peers = node.peers().await.unwrap();
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    [a, b]
}

/// Swapped to another node, cleared here, and back: known, and not found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_that_comes_back_after_a_clear() {
    let [(a, mut to_a), (b, mut to_b)] = plain_pair().await;
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    a.pool().migrate_to_node(sequence, "b").await.unwrap();
    let mut there = tokio::time::timeout(WAIT, to_b.recv()).await.expect("an arrival").unwrap().sequence;
    a.pool().clear_prefix_cache();
    // Refused until the first source knows that the sequence arrived.
    let begun = Instant::now();
    while let Err(refused) = b.pool().migrate_to_node(there, "a").await {
        assert!(begun.elapsed() < WAIT, "{}", refused.error);
        there = *refused.sequence;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let back = tokio::time::timeout(WAIT, to_a.recv()).await.expect("an arrival").unwrap().sequence;
    assert_eq!((back.len(), back.announced()), (42, 42));
    kv::check(a.pool(), &back, &tokens);
    drop(back);
    let more = [&tokens[..], &[0]].concat();
    assert_eq!((kv::cached(a.pool(), &more), kv::cached(b.pool(), &more)), (0, 10));
    idle(a.pool()).await;
    idle(b.pool()).await;
}

/// Cached blocks that went to another node before the clear, and more that were computed there
/// behind them, do not come back. Those that are computed anew take their place there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_blocks_that_come_back_after_a_clear() {
    let [(a, _to_a), (b, _to_b)] = plain_pair().await;
    let (keys, tokens) = (PrefixKeys::new(), kv::prompt(1, 61));
    drop(kv::admit(a.pool(), 7, &tokens[..41]).unwrap());
    a.pool().offload_to_node("b", 100).await.unwrap();
    drop(kv::admit(b.pool(), 8, &tokens).unwrap());
    assert_eq!(kv::cached(b.pool(), &tokens), 15);
    a.pool().clear_prefix_cache();
    let back = a.pool().bring_back_from_node("b", &keys, &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, back.carried.blocks), (0, 0));
    assert_eq!(kv::cached(a.pool(), &tokens), 0);
    assert!(a.pool().metrics().migrations.unwrap().stale_blocks > 0);
    // The same when the other node sends them.
    let before = a.pool().metrics().migrations.unwrap().stale_blocks;
    // The export of the question that was asked before holds them for a moment.
    until("the blocks are evictable", || b.pool().stats().evictable == 15).await;
    b.pool().offload_to_node("a", 100).await.unwrap();
    assert_eq!(kv::cached(a.pool(), &tokens), 0);
    assert_eq!(a.pool().metrics().migrations.unwrap().stale_blocks, before + 15);
    drop(kv::admit(a.pool(), 7, &tokens[..41]).unwrap());
    let there = a.pool().offload_to_node("b", 100).await.unwrap();
    assert_eq!((there.present_blocks, there.carried.blocks), (0, 10));
    let back = a.pool().bring_back_from_node("b", &keys, &tokens).await.unwrap();
    assert_eq!((back.cached_blocks, kv::cached(a.pool(), &tokens)), (10, 10));
    until("the blocks of a transfer are released", || a.pool().stats().used == 0).await;
    idle(a.pool()).await;
    idle(b.pool()).await;
}

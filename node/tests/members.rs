//! Members of a cluster become peers of a node, and peers that left are dropped, but not during a
//! migration.

#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use kvpool::prefix::PrefixKeys;
use kvpool_node::admin::{Admin, PoolAdmin, Reporters};
use kvpool_node::events::{KvEventPublisher, KvEventReporter, KvEventSettings};
use kvpool_node::membership::{FixedMembers, Follower, Member, Membership, MembershipReporter};
use kvpool_node::protocol::Timing;
use kvpool_node::tier::{
    InProcess, SharedTier, TierPolicy, TierReporter, TierSettings, Tiered, TieredSettings,
};
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::{Node, NodeBuilder};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

const WAIT: Duration = Duration::from_secs(20);

fn local() -> Address {
    Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

fn builder(name: &str) -> NodeBuilder {
    Node::builder(kv::pool(kv::plain(), 100)).name(name).listen(local())
}

async fn node(name: &str) -> Arc<Node> {
    Arc::new(builder(name).start().await.unwrap().0)
}

fn member(node: &Node) -> Member {
    at(node, &node.addresses()[0].to_string())
}

fn at(node: &Node, address: &str) -> Member {
    Member::new(node.name(), address.parse().unwrap())
}

async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let met = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, met).await.expect(what);
}

async fn linked(node: &Node, peer: &str, is_up: bool) {
    let wanted = (peer.to_owned(), is_up);
    until("a change of links", async || node.peers().await.unwrap().contains(&wanted)).await;
}

/// Returns the peers to which a node connects and has no link.
fn unreached(node: &Node) -> Vec<String> {
    node.unreached().into_iter().map(|(name, _)| name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_are_linked_and_unlinked() {
    let (a, b, c) = (node("a").await, node("b").await, node("c").await);
    let list = FixedMembers::new([member(&a), member(&b)]);
    let _followers = [&a, &b, &c].map(|node| Follower::start(node, list.watch(), vec![]));
    linked(&a, "b", true).await;
    linked(&c, "a", true).await;
    let joined = list.join(member(&c), Duration::from_secs(1)).unwrap();
    linked(&b, "c", true).await;
    // It follows the others until it ends: then it connects to none, and they not to it.
    drop(_followers);
    c.set_peers(Vec::new());
    let absent = PeerSettings::new("absent", Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 1))));
    let _followers = [&a, &b].map(|node| Follower::start(node, list.watch(), vec![absent.clone()]));
    // They have seen it as a member: its links are old.
    for node in [&a, &b] {
        until("a first look", async || unreached(node).contains(&"absent".to_owned())).await;
    }
    linked(&a, "c", true).await;
    joined.leave().await;
    linked(&a, "c", false).await;
    linked(&b, "c", false).await;
    assert_eq!(unreached(&a), ["absent"], "a member that left is a peer no more");
    linked(&a, "b", true).await;
    assert!(a.migrate(kvpool::SequenceId(1), "c").await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_with_a_new_address_is_linked_again() {
    let (a, b) = (node("a").await, node("b").await);
    let list = FixedMembers::new([at(&b, "no-such-host.invalid:1")]);
    let _follower = Follower::start(&a, list.watch(), vec![]);
    let is_down = |reason: &str| a.unreached().iter().any(|(_, found)| found.contains(reason));
    until("a peer without an address", async || is_down("find the address of no-such-host.invalid")).await;
    list.set([at(&b, "127.0.0.1:1")]);
    until("a peer that is down", async || is_down("connect to 127.0.0.1:1")).await;
    list.set([member(&b)]);
    linked(&a, "b", true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configured_peers_count_first_and_stay() {
    let (a, b, c) = (node("a").await, node("b").await, node("c").await);
    let peer = |node: &Node| PeerSettings::new(node.name(), node.addresses()[0].clone());
    // The entry of b is wrong; its configured address is right.
    let list = FixedMembers::new([at(&b, "127.0.0.1:1")]);
    let follower = Follower::start(&a, list.watch(), vec![peer(&b)]);
    linked(&a, "b", true).await;
    list.set([]);
    follower.configure(vec![peer(&b), peer(&c)]);
    linked(&a, "c", true).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    linked(&a, "b", true).await;
}

/// A relay that forwards bytes while it is told to.
async fn relay(to: String) -> (String, watch::Sender<bool>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (open, is_open) = watch::channel(true);
    tokio::spawn(async move {
        while let Ok((here, _)) = listener.accept().await {
            let Ok(there) = TcpStream::connect(&to).await else { continue };
            let (from_here, to_here) = here.into_split();
            let (from_there, to_there) = there.into_split();
            tokio::spawn(forward(from_here, to_there, is_open.clone()));
            tokio::spawn(forward(from_there, to_here, is_open.clone()));
        }
    });
    (address, open)
}

async fn forward(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut is_open: watch::Receiver<bool>,
) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut bytes = vec![0; 65536];
    while let Ok(length @ 1..) = from.read(&mut bytes).await {
        if is_open.wait_for(|is_open| *is_open).await.is_err()
            || to.write_all(&bytes[..length]).await.is_err()
        {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_leaves_during_a_migration_is_dropped_after_it() {
    let timing = Timing { transfer_deadline_ms: 3_000, ..Timing::default() };
    let a = Arc::new(builder("a").timing(timing).start().await.unwrap().0);
    let b = node("b").await;
    let (address, open) = relay(b.addresses()[0].to_string()).await;
    let list = FixedMembers::new([at(&b, &address)]);
    let _follower = Follower::start(&a, list.watch(), vec![]);
    linked(&a, "b", true).await;
    open.send_replace(false);
    let sequence = kv::admit(a.pool(), 7, &kv::prompt(1, 42)).unwrap();
    let pool = a.pool().clone();
    let moving = tokio::spawn(async move { pool.migrate_to_node(sequence, "b").await });
    until("a migration", async || !a.migrations().await.unwrap().is_empty()).await;
    list.set([]);
    tokio::time::sleep(Duration::from_millis(1_200)).await;
    assert!(!moving.is_finished());
    assert!(a.peers().await.unwrap().contains(&("b".into(), true)), "the link stays for the migration");
    assert!(moving.await.unwrap().is_err(), "b does not answer");
    linked(&a, "b", false).await;
    assert_eq!(unreached(&a), Vec::<String>::new());
}

/// The services beside a pool are in its statistics and metrics, and not when they have ended.
#[tokio::test]
async fn services_are_reported() {
    let (pool, reporters) = (kv::pool(kv::plain(), 100), Reporters::new());
    let admin = PoolAdmin::new("a", pool.clone()).reporters(reporters.clone());
    assert_eq!(admin.stats().await.unwrap().extra.get("tiers"), None);
    let tier = SharedTier::new(InProcess::new(1 << 20), TierSettings::default()).unwrap();
    let settings = TieredSettings::new("reports").policy(TierPolicy::Manual);
    let tiered = Tiered::new(pool.clone(), Arc::new(tier), settings).unwrap();
    reporters.add(TierReporter::new("memory", &tiered));
    let directory = FixedMembers::new([member(&*node("b").await)]);
    let own = Member::new("a", "127.0.0.1:9".parse().unwrap());
    let mut joined = directory.join(own, Duration::from_secs(10)).unwrap();
    joined.wait(|state| state.joins == 1).await;
    let members = directory.watch();
    reporters.add(MembershipReporter::new("static", &members, Some(&joined)));
    let settings = KvEventSettings::new("127.0.0.1:0".parse().unwrap());
    let publisher = KvEventPublisher::start(pool.clone(), settings).await.unwrap();
    reporters.add(KvEventReporter::new("zmq", &publisher));

    let tokens = kv::prompt(1, 41);
    drop(kv::admit(&pool, 7, &tokens).unwrap());
    let soon = std::time::Instant::now() + WAIT;
    tiered.offload(100, soon).await.unwrap();
    let brought = tiered.bring_back(&PrefixKeys::new(), &tokens, soon).await.unwrap();
    assert_eq!(brought.moved_blocks, 10);
    let stats = serde_json::Value::Object(admin.stats().await.unwrap().extra);
    let tier = &stats["tiers"]["memory"];
    assert_eq!(
        (&tier["stored"], &tier["hits"], &tier["breaker"]),
        (&10.into(), &10.into(), &"closed".into())
    );
    assert_eq!(tier["pool"]["fetched_blocks"], 10, "{stats}");
    assert_eq!(stats["membership"]["static"]["members"], serde_json::json!(["a", "b"]), "{stats}");
    assert_eq!(stats["membership"]["static"]["joined"], true, "{stats}");
    assert!(stats["kv_events"]["zmq"]["batches"].as_u64() > Some(0), "{stats}");
    let text = admin.scrape().await.unwrap().encode("a");
    for line in [
        r#"kvpool_tier_keys_total{tier="memory",outcome="hit",pool="a"} 10"#,
        r#"kvpool_tier_up{tier="memory",pool="a"} 1"#,
        r#"kvpool_members{directory="static",pool="a"} 2"#,
        r#"kvpool_joined{directory="static",pool="a"} 1"#,
        r#"kvpool_event_subscribers{pool="a"} 0"#,
    ] {
        let parts: BTreeSet<&str> = line.split(['{', '}', ',']).collect();
        let is_it = |other: &str| other.split(['{', '}', ',']).collect::<BTreeSet<_>>() == parts;
        assert!(text.lines().any(is_it), "{line} is not in\n{text}");
    }

    drop((tiered, publisher, members, joined, directory));
    until("the end", async || {
        let stats = admin.stats().await.unwrap().extra;
        ["tiers", "membership", "kv_events"].iter().all(|group| !stats.contains_key(*group))
    })
    .await;
    assert!(!admin.scrape().await.unwrap().encode("a").contains("kvpool_tier"));
}

//! Peers by host names: resolved at each attempt to connect, by a resolver of the test.

#[path = "../../tests/migration/kv.rs"]
#[allow(dead_code, reason = "each test uses a part")]
mod kv;

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpool_node::admin::{AdminServer, Client, Limits};
use kvpool_node::membership::{FixedMembers, Follower, Member, Membership};
use kvpool_node::transport::tcp::{Address, LinkError, PeerSettings, Resolve, Resolved};
use kvpool_node::{Node, NodeBuilder, NodeError};

const WAIT: Duration = Duration::from_secs(20);

/// The addresses of hosts, as in a file of hosts.
#[derive(Clone, Default, Debug)]
struct Hosts(Arc<Mutex<HashMap<String, Vec<SocketAddr>>>>);

impl Hosts {
    fn set(&self, host: &str, at: &[SocketAddr]) {
        self.0.lock().unwrap().insert(host.to_owned(), at.to_vec());
    }
}

impl Resolve for Hosts {
    fn resolve(&self, host: &str, _port: u16) -> Resolved<'_> {
        let found = self.0.lock().unwrap().get(host).cloned();
        Box::pin(async { found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such host here")) })
    }
}

fn local() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

fn builder(name: &str) -> NodeBuilder {
    Node::builder(kv::pool(kv::plain(), 20)).name(name)
}

async fn listening(name: &str) -> (Node, SocketAddr) {
    let node = builder(name).listen(Address::Tcp(local())).start().await.unwrap().0;
    let Address::Tcp(at) = node.addresses()[0] else { panic!("not of TCP") };
    (node, at)
}

fn named(host: &str) -> Address {
    Address::Named { host: host.to_owned(), port: 7411 }
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let held = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WAIT, held).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

fn reason(node: &Node) -> String {
    node.unreached().into_iter().map(|(_, reason)| reason).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_without_an_address_is_down_until_it_has_one_and_is_found_again_at_another() {
    let hosts = Hosts::default();
    let server = AdminServer::bind(&"127.0.0.1:0".parse().unwrap(), None, Limits::default()).unwrap();
    let peers = vec![PeerSettings::new("b", named("host-of-b"))];
    let a = builder("a").peers(peers).resolver(Arc::new(hosts.clone())).admin(server);
    let a = a.start().await.unwrap().0;
    let url = a.admin_address().unwrap().clone();
    let client = Client::new(url, None);
    until("an attempt", async || a.has_tried_peers()).await;
    let missing = "find the address of host-of-b:7411: no such host here";
    assert_eq!(reason(&a), missing);
    // It is a peer to operators.
    let stats = client.get("/stats").await.unwrap();
    assert_eq!(stats["extra"]["peers"]["b"], format!("down: {missing}"));
    let links = client.get("/topology").await.unwrap()["links"].clone();
    assert_eq!((&links[0]["name"], &links[0]["address"]), (&"b".into(), &"host-of-b:7411".into()), "{links}");
    assert_eq!((&links[0]["is_up"], &links[0]["reason"]), (&false.into(), &missing.into()), "{links}");

    // The name gets two addresses, and nothing listens on the first.
    let (b, at) = listening("b").await;
    let closed = std::net::TcpListener::bind(local()).unwrap().local_addr().unwrap();
    hosts.set("host-of-b", &[closed, at]);
    until("a link", async || a.unreached().is_empty()).await;
    // The peer moves.
    drop(b);
    let (_b, at) = listening("b").await;
    hosts.set("host-of-b", &[at]);
    until("a link to the new address", async || {
        a.peers().await.unwrap() == [("b".to_owned(), true)] && a.unreached().is_empty()
    })
    .await;
    // Addresses go away.
    hosts.set("host-of-b", &[]);
    drop(_b);
    until("the reason", async || reason(&a).ends_with("the name has no address")).await;
}

/// What a name stands for is checked as an address is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_of_another_host_needs_tls_and_a_listener_an_address() {
    let hosts = Hosts::default();
    hosts.set("far", &["192.0.2.1:7411".parse().unwrap()]);
    let a = builder("a").peers(vec![PeerSettings::new("b", named("far"))]).resolver(Arc::new(hosts));
    let a = a.start().await.unwrap().0;
    until("an attempt", async || a.has_tried_peers()).await;
    let plain = LinkError::PlainText { address: Address::Tcp("192.0.2.1:7411".parse().unwrap()) };
    assert_eq!(reason(&a), plain.to_string());
    // A label of more than 63 characters is no name, so that no server is asked.
    let long = named(&"x".repeat(64));
    let refused = builder("c").listen(long).start().await.map(drop).unwrap_err();
    assert!(matches!(&refused, NodeError::Link(LinkError::Io { .. })), "{refused}");
    let listening = builder("c").listen(Address::Named { host: "localhost".into(), port: 0 });
    let (c, _arrivals) = listening.start().await.unwrap();
    assert!(matches!(c.addresses(), [Address::Tcp(at)] if at.ip().is_loopback() && at.port() > 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_found_by_its_name_wherever_it_is() {
    let hosts = Hosts::default();
    let a = builder("a").resolver(Arc::new(hosts.clone())).start().await.unwrap().0;
    let a = Arc::new(a);
    let list = FixedMembers::new([Member::new("b", "host-of-b:7411".parse().unwrap())]);
    let _follower = Follower::start(&a, list.watch(), vec![]);
    until("the reason", async || reason(&a).ends_with("no such host here")).await;
    for _ in 0..2 {
        let (_b, at) = listening("b").await;
        hosts.set("host-of-b", &[at]);
        until("a link", async || a.unreached().is_empty()).await;
        drop(_b);
        until("the loss", async || !a.unreached().is_empty()).await;
    }
}

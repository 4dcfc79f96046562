//! Membership in a real etcd, on ports of the loopback: entries expire, the joined process is paused,
//! etcd is killed, restarted, and loses its data.
//!
//! The server is `etcd` of the path, or the file that `KVPOOL_ETCD` names. Without it, the tests print
//! that they are skipped; with the variable, they fail.

#[path = "../../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;
mod tls;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use etcd_client::Client;
use kvpool_node::Node;
use kvpool_node::admin::{Admin, PoolAdmin, Reporters};
use kvpool_node::membership::{
    EtcdLocation, EtcdMembership, Follower, JoinStatus, Joined, Member, MemberList, Members, Membership,
    MembershipError, MembershipReporter,
};
use kvpool_node::transport::tcp::Address;
use tempfile::TempDir;

const WAIT: Duration = Duration::from_secs(120);
const LEASE: Duration = Duration::from_secs(4);

/// Set in a child process: the location that it joins.
const ROLE: &str = "KVPOOL_TEST_ETCD_MEMBER";

/// An etcd server that is killed with this value.
struct Server {
    program: PathBuf,
    ports: [u16; 2],
    data: TempDir,
    /// Further arguments.
    arguments: Vec<String>,
    child: Option<Child>,
}

impl Server {
    /// Starts a server; `None` if there is no program.
    fn start() -> Option<Self> {
        let mut server = Self::prepare()?;
        server.run();
        Some(server)
    }

    fn prepare() -> Option<Self> {
        let named = std::env::var_os("KVPOOL_ETCD").map(PathBuf::from);
        let program = named.clone().unwrap_or_else(|| "etcd".into());
        let version = Command::new(&program).arg("--version").output();
        if let Err(error) = version {
            assert!(named.is_none(), "{}: {error}", program.display());
            eprintln!("SKIPPED: there is no etcd here ({error})");
            return None;
        }
        let free = || TcpListener::bind("127.0.0.1:0").unwrap();
        let ports = [free(), free()].map(|listener| listener.local_addr().unwrap().port());
        Some(Self { program, ports, data: tempfile::tempdir().unwrap(), arguments: Vec::new(), child: None })
    }

    fn run(&mut self) {
        let is_tls = self.arguments.iter().any(|argument| argument.starts_with("--cert-file"));
        let client = format!("http{}://127.0.0.1:{}", if is_tls { "s" } else { "" }, self.ports[0]);
        let peer = format!("http://127.0.0.1:{}", self.ports[1]);
        let mut command = Command::new(&self.program);
        command.arg("--name=test").arg(format!("--data-dir={}", self.data.path().join("etcd").display()));
        command.arg(format!("--listen-client-urls={client}"));
        command.arg(format!("--advertise-client-urls={client}"));
        command.arg(format!("--listen-peer-urls={peer}"));
        command.arg(format!("--initial-advertise-peer-urls={peer}"));
        command.arg(format!("--initial-cluster=test={peer}"));
        // Leases of a second, and a leader at once.
        command.args(["--heartbeat-interval=50", "--election-timeout=500"]).args(&self.arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        self.child = Some(command.spawn().unwrap());
    }

    fn signal(&self, signal: i32) {
        send(self.child.as_ref().unwrap(), signal);
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    fn lose_data(&self) {
        std::fs::remove_dir_all(self.data.path().join("etcd")).unwrap();
    }

    fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.ports[0])
    }

    fn location(&self) -> EtcdLocation {
        format!("etcd://{}/test", self.endpoint()).parse().unwrap()
    }

    fn membership(&self) -> EtcdMembership {
        EtcdMembership::new(self.location()).grace(2 * LEASE)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn send(child: &Child, signal: i32) {
    // SAFETY: signals a process that this one started and has not waited for.
    assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
}

fn member(name: &str, port: u16) -> Member {
    Member::new(name, format!("127.0.0.1:{port}").parse().unwrap()).admin("127.0.0.1:7410")
}

fn names(list: &MemberList) -> String {
    list.members.iter().map(|member| member.name.as_str()).collect::<Vec<_>>().join(" ")
}

/// Waits for a list with these names.
async fn listed(members: &mut Members, wanted: &str) -> Arc<MemberList> {
    let found = async {
        loop {
            let list = members.current();
            if names(&list) == wanted && list.is_current {
                return list;
            }
            members.next().await.unwrap();
        }
    };
    let last = tokio::time::timeout(WAIT, found).await;
    last.unwrap_or_else(|_| panic!("wanted {wanted:?}, not {:?}", members.current()))
}

async fn joined(entry: &mut Joined, joins: u64) {
    let is_joined = entry.wait(|state| state.status == JoinStatus::Joined && state.joins >= joins);
    tokio::time::timeout(WAIT, is_joined).await.expect("joined");
    assert_eq!(entry.state().joins, joins);
}

/// Records all lists of a watch of its own, from one with these members on.
async fn record(membership: &EtcdMembership, first: &str) -> Arc<Mutex<Vec<Arc<MemberList>>>> {
    let mut members = membership.watch();
    let lists = Arc::new(Mutex::new(vec![listed(&mut members, first).await]));
    let to = lists.clone();
    tokio::spawn(async move {
        while let Some(list) = members.next().await {
            to.lock().unwrap().push(list);
        }
    });
    lists
}

/// Checks that these members stayed from the first list that has them all.
fn stayed(lists: &Mutex<Vec<Arc<MemberList>>>, wanted: &[&str]) {
    let sets: Vec<BTreeSet<String>> = (lists.lock().unwrap().iter())
        .map(|list| list.members.iter().map(|member| member.name.clone()).collect())
        .collect();
    let has_all = |set: &BTreeSet<String>| wanted.iter().all(|name| set.contains(*name));
    let first = sets.iter().position(has_all).expect("a list with all");
    assert!(sets[first..].iter().all(has_all), "{sets:?}");
}

#[tokio::test]
async fn members_join_leave_and_expire() {
    let Some(server) = Server::start() else { return };
    let membership = server.membership();
    let (a, b) = (member("a", 1), member("b", 2));
    let mut first = membership.join(a.clone(), LEASE).unwrap();
    let mut second = membership.join(b.clone(), 10 * LEASE).unwrap();
    let mut members = membership.watch();
    assert_eq!(listed(&mut members, "a b").await.members, [a, b]);
    joined(&mut first, 1).await;
    joined(&mut second, 1).await;
    // Of another cluster.
    let other = format!("etcd://{}/other", server.endpoint()).parse().unwrap();
    let mut foreign = EtcdMembership::new(other).join(member("x", 3), LEASE).unwrap();
    joined(&mut foreign, 1).await;
    let begun = Instant::now();
    second.leave().await;
    listed(&mut members, "a").await;
    assert!(begun.elapsed() < 10 * LEASE, "leaving does not wait for the lease");
    tokio::time::sleep(2 * LEASE).await;
    assert_eq!(names(&members.current()), "a", "its lease is renewed");
    drop(first);
    listed(&mut members, "").await;
}

#[tokio::test]
async fn bad_requests_and_entries_are_refused() {
    let Some(server) = Server::start() else { return };
    let membership = server.membership();
    let refused = membership.join(member("a/b", 1), LEASE).unwrap_err();
    assert!(matches!(&refused, MembershipError::Member { name, .. } if name == "a/b"), "{refused}");
    let refused = membership.join(member("a", 1), Duration::from_millis(10)).unwrap_err();
    assert!(matches!(refused, MembershipError::Lease { .. }), "{refused}");
    let mut entry = membership.join(member("a", 1), LEASE).unwrap();
    joined(&mut entry, 1).await;
    let mut client = Client::connect([server.endpoint()], None).await.unwrap();
    for (key, value) in [
        ("x", "garbage".to_owned()),
        ("y", r#"{"name":"z","address":"h:1","started_ms":3}"#.to_owned()),
        ("q", r#"{"name":"q","address":"h","started_ms":3}"#.to_owned()),
        ("long", "x".repeat(100_000)),
    ] {
        client.put(format!("/kvpool/test/members/{key}"), value, None).await.unwrap();
    }
    let mut members = membership.watch();
    listed(&mut members, "a").await;
    client.put("/kvpool/test/members/w", "more garbage", None).await.unwrap();
    client.delete("/kvpool/test/members/x", None).await.unwrap();
    let mut more = membership.join(member("b", 1), LEASE).unwrap();
    joined(&mut more, 1).await;
    listed(&mut members, "a b").await;
}

#[tokio::test]
async fn an_entry_that_is_deleted_or_whose_lease_is_revoked_is_made_again() {
    let Some(server) = Server::start() else { return };
    let membership = server.membership();
    let mut entry = membership.join(member("a", 1), LEASE).unwrap();
    joined(&mut entry, 1).await;
    let mut client = Client::connect([server.endpoint()], None).await.unwrap();
    client.delete("/kvpool/test/members/a", None).await.unwrap();
    joined(&mut entry, 2).await;
    let found = client.get("/kvpool/test/members/a", None).await.unwrap();
    client.lease_revoke(found.kvs()[0].lease()).await.unwrap();
    joined(&mut entry, 3).await;
    listed(&mut membership.watch(), "a").await;
}

#[tokio::test]
async fn of_two_processes_with_one_name_the_later_one_counts() {
    let Some(server) = Server::start() else { return };
    let membership = server.membership();
    let early = member("a", 1);
    let mut late = member("a", 2);
    late.started_ms = early.started_ms + 1;
    let mut first = membership.join(early.clone(), LEASE).unwrap();
    joined(&mut first, 1).await;
    let mut second = membership.join(late.clone(), LEASE).unwrap();
    joined(&mut second, 1).await;
    let displaced = first.wait(|state| match &state.status {
        JoinStatus::Waiting { reason } => {
            reason.contains("another process") && reason.contains("127.0.0.1:2")
        }
        _ => false,
    });
    tokio::time::timeout(WAIT, displaced).await.expect("displaced");
    let mut members = membership.watch();
    assert_eq!(listed(&mut members, "a").await.members, [late]);
    tokio::time::sleep(LEASE).await;
    assert_eq!(second.state().joins, 1, "the first one leaves it alone");
    second.leave().await;
    joined(&mut first, 2).await;
    assert_eq!(listed(&mut members, "a").await.members, [early]);
}

/// Processes that started in the same millisecond: one of them counts, they do not replace each other by
/// turns, and no attempt leaves a lease behind.
#[tokio::test]
async fn of_many_processes_that_join_at_once_one_counts() {
    let Some(server) = Server::start() else { return };
    let (membership, lease) = (server.membership(), Duration::from_secs(24));
    let same = |port| {
        let mut member = member("a", port);
        member.started_ms = 1;
        member
    };
    let all: Vec<_> = (1..8).map(|port| membership.join(same(port), lease).unwrap()).collect();
    let mut members = membership.watch();
    let last = async {
        while listed(&mut members, "a").await.members != [same(7)] {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(WAIT, last).await.expect("the last one is a member");
    let mut client = Client::connect([server.endpoint()], None).await.unwrap();
    let began = Instant::now();
    // Those that were replaced notice it when they renew.
    let leases = loop {
        let leases = client.leases().await.unwrap().leases().len();
        if leases == 1 || began.elapsed() > lease * 5 / 6 {
            break leases;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    assert_eq!(leases, 1);
    assert_eq!(members.current().members, [same(7)]);
    let joins: Vec<_> = all.iter().map(|one| one.state().joins).collect();
    assert_eq!(joins[6], 1, "{joins:?}");
}

/// The other process of the next test: it joins, and prints how often it has.
#[tokio::test]
async fn child() {
    let Ok(location) = std::env::var(ROLE) else { return };
    let membership = EtcdMembership::new(location.parse().unwrap());
    let mut entry = membership.join(member("paused", 9), LEASE).unwrap();
    for joins in 1.. {
        entry.wait(|state| state.status == JoinStatus::Joined && state.joins >= joins).await;
        println!("\njoins {}", entry.state().joins);
    }
}

/// A process that is joined.
struct Paused {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Paused {
    fn start(server: &Server) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, server.location().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    fn joins(&mut self) -> u64 {
        let joins = |line: std::io::Result<String>| line.unwrap().strip_prefix("joins ")?.parse().ok();
        self.lines.find_map(joins).expect("the child says that it joined")
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[tokio::test]
async fn a_process_that_is_paused_for_longer_than_its_lease_joins_again() {
    let Some(server) = Server::start() else { return };
    let membership = server.membership();
    let mut members = membership.watch();
    let mut paused = Paused::start(&server);
    assert_eq!(paused.joins(), 1);
    let before = listed(&mut members, "paused").await.members.clone();
    send(&paused.child, libc::SIGSTOP);
    listed(&mut members, "").await;
    tokio::time::sleep(LEASE).await;
    send(&paused.child, libc::SIGCONT);
    assert_eq!(paused.joins(), 2);
    assert_eq!(listed(&mut members, "paused").await.members, before);
    // A pause that is shorter than the lease is none.
    send(&paused.child, libc::SIGSTOP);
    tokio::time::sleep(LEASE / 4).await;
    send(&paused.child, libc::SIGCONT);
    tokio::time::sleep(2 * LEASE).await;
    assert_eq!(names(&members.current()), "paused");
    // The process is killed.
    drop(paused);
    listed(&mut members, "").await;
}

#[tokio::test]
async fn members_stay_while_etcd_is_away_and_the_watch_goes_on() {
    let Some(mut server) = Server::start() else { return };
    let membership = server.membership();
    let mut first = membership.join(member("a", 1), LEASE).unwrap();
    let mut second = membership.join(member("b", 2), LEASE).unwrap();
    joined(&mut first, 1).await;
    joined(&mut second, 1).await;
    let mut members = membership.watch();
    listed(&mut members, "a b").await;
    let recorded = record(&membership, "a b").await;
    let lists = recorded.clone();
    server.kill();
    let late = membership.join(member("c", 3), LEASE).unwrap();
    tokio::time::sleep(3 * LEASE).await;
    let list = members.current();
    assert_eq!((names(&list).as_str(), list.is_current), ("a b", false));
    assert!(matches!(late.state().status, JoinStatus::Waiting { .. }));
    assert!(matches!(first.state().status, JoinStatus::Waiting { .. }));
    server.run();
    listed(&mut members, "a b c").await;
    first.wait(|state| state.status == JoinStatus::Joined).await;
    // It follows changes again.
    second.leave().await;
    listed(&mut members, "a c").await;
    // The other watch returns at a time of its own: b has left by then, or leaves later.
    let is_last = |list: &Arc<MemberList>| names(list) == "a c" && list.is_current;
    let seen = async {
        while !lists.lock().unwrap().last().is_some_and(is_last) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(WAIT, seen).await.expect("the other watch goes on");
    let mut lists = lists.lock().unwrap();
    assert!(lists.iter().any(|list| !list.is_current), "the outage is seen");
    let returned = lists.iter().rposition(|list| !list.is_current).unwrap();
    lists.truncate(returned + 1);
    drop(lists);
    stayed(&recorded, &["a", "b"]);
}

#[tokio::test]
async fn members_stay_when_etcd_loses_its_data() {
    let Some(mut server) = Server::start() else { return };
    let membership = server.membership();
    let mut first = membership.join(member("a", 1), LEASE).unwrap();
    let second = membership.join(member("gone", 2), LEASE).unwrap();
    joined(&mut first, 1).await;
    let mut members = membership.watch();
    listed(&mut members, "a gone").await;
    let lists = record(&membership, "a gone").await;
    tokio::time::sleep(LEASE / 2).await;
    server.kill();
    server.lose_data();
    // A member that ends meanwhile cannot say so.
    drop(second);
    server.run();
    joined(&mut first, 2).await;
    listed(&mut members, "a").await;
    stayed(&lists, &["a"]);
}

#[tokio::test]
async fn an_etcd_that_stops_answering_is_noticed() {
    let Some(server) = Server::start() else { return };
    let membership = server.membership();
    let mut first = membership.join(member("a", 1), LEASE).unwrap();
    joined(&mut first, 1).await;
    let mut members = membership.watch();
    listed(&mut members, "a").await;
    server.signal(libc::SIGSTOP);
    let lost = async { while members.next().await.unwrap().is_current {} };
    tokio::time::timeout(WAIT, lost).await.expect("the watch notices");
    assert_eq!(names(&members.current()), "a");
    first.wait(|state| matches!(state.status, JoinStatus::Waiting { .. })).await;
    server.signal(libc::SIGCONT);
    first.wait(|state| state.status == JoinStatus::Joined).await;
    listed(&mut members, "a").await;
}

/// Needs no etcd: a server that answers something else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_directory_out_of_reach_says_why() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let location = format!("etcd://{}/prod", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _ = stream.unwrap().write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let membership = EtcdMembership::new(location.parse().unwrap());
    let (joined, members) = (membership.join(member("a", 1), LEASE).unwrap(), membership.watch());
    let reporters = Reporters::new();
    reporters.add(MembershipReporter::new("etcd", &members, Some(&joined)));
    let admin = PoolAdmin::new("a", kv::pool(kv::plain(), 10)).reporters(reporters);
    let began = Instant::now();
    let etcd = loop {
        let etcd = admin.stats().await.unwrap().extra["membership"]["etcd"].clone();
        if etcd["failures"].as_u64() > Some(3) {
            break etcd;
        }
        assert!(began.elapsed() < WAIT, "{etcd}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let last = etcd["last_error"].as_str().unwrap();
    assert!(last.contains("cannot join") || last.contains("out of reach"), "{last}");
    assert!(last.contains(&location) && etcd["last_error_s"].as_u64() < Some(60), "{etcd}");
    let text = admin.scrape().await.unwrap().encode("a");
    let counted = "kvpool_service_failures_total{pool=\"a\",group=\"membership\",name=\"etcd\"}";
    assert!(text.contains(counted), "{text}");
}

#[tokio::test]
async fn a_node_may_start_before_etcd() {
    let Some(mut server) = Server::prepare() else { return };
    let membership = server.membership();
    let mut entry = membership.join(member("a", 1), LEASE).unwrap();
    let mut members = membership.watch();
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(matches!(entry.state().status, JoinStatus::Waiting { .. }));
    assert!(!members.current().is_current);
    server.run();
    joined(&mut entry, 1).await;
    listed(&mut members, "a").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_find_each_other_and_go_on_without_etcd() {
    let Some(mut server) = Server::start() else { return };
    let membership = server.membership();
    let local = || Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
    let mut nodes = Vec::new();
    for name in ["a", "b"] {
        let builder = Node::builder(kv::pool(kv::plain(), 100)).name(name).listen(local());
        let (node, arrivals) = builder.start().await.unwrap();
        let node = Arc::new(node);
        let entry = Member::new(name, node.addresses()[0].to_string().parse().unwrap());
        let entry = membership.join(entry, LEASE).unwrap();
        let follower = Follower::start(&node, membership.watch(), vec![]);
        nodes.push((node, arrivals, entry, follower));
    }
    let [(a, .., mut entry, _follow_a), (b, mut to_b, leaving, _follow_b)] =
        <[_; 2]>::try_from(nodes).ok().unwrap();
    let linked = async |node: &Node, peer: &str, is_up: bool| {
        let wanted = (peer.to_owned(), is_up);
        let found = async {
            while !node.peers().await.unwrap().contains(&wanted) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(WAIT, found).await.expect("a change of links");
    };
    linked(&a, "b", true).await;
    joined(&mut entry, 1).await;
    server.kill();
    tokio::time::sleep(2 * LEASE).await;
    let tokens = kv::prompt(1, 42);
    let sequence = kv::admit(a.pool(), 7, &tokens).unwrap();
    a.pool().migrate_to_node(sequence, "b").await.unwrap();
    kv::check(b.pool(), &to_b.recv().await.unwrap().sequence, &tokens);
    server.run();
    entry.wait(|state| state.status == JoinStatus::Joined).await;
    // The follower of b goes with it, and so do its peers: otherwise b would connect again at once.
    drop(_follow_b);
    b.set_peers(Vec::new());
    leaving.leave().await;
    linked(&a, "b", false).await;
    assert_eq!(a.unreached(), []);
}

/// Anything may have been written to etcd: the entries that are read are bounded, whatever their size.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn entries_without_a_bound() {
    const MEMBERS_MAX: usize = 1024;
    let Some(server) = Server::start() else { return };
    let mut members = server.membership().watch();
    listed(&mut members, "").await;
    let client = Client::connect([server.endpoint()], None).await.unwrap();
    let put = async |name: &str, entry: String| {
        let key = format!("/kvpool/test/members/{name}");
        client.clone().put(key, entry, None).await.unwrap();
    };
    let entry = |name: &str| format!(r#"{{"name":"{name}","address":"127.0.0.1:7","started_ms":3}}"#);
    // Together, more bytes than a message to the client may have.
    for number in 0..6 {
        put(&format!("large-{number}"), "x".repeat(1 << 20)).await;
    }
    put("a", entry("a")).await;
    listed(&mut server.membership().watch(), "a").await;
    let names: Vec<String> = (0..MEMBERS_MAX + 20).map(|number| format!("m{number:04}")).collect();
    for name in &names {
        put(name, entry(name)).await;
    }
    // In the order of their keys, with the malformed ones among them.
    let mut members = server.membership().watch();
    let read = format!("a {}", names[..MEMBERS_MAX - 7].join(" "));
    listed(&mut members, &read).await;
    // Changes are followed as far as there is room, and always those of known members.
    for name in ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"] {
        put(name, entry(name)).await;
    }
    listed(&mut members, &format!("{read} n0 n1 n2 n3 n4 n5")).await;
    put("a", entry("a").replace(":7", ":8")).await;
    while members.current().members[0].address != "127.0.0.1:8".parse().unwrap() {
        tokio::time::timeout(WAIT, members.next()).await.unwrap();
    }
}

//! Memory of a process with an idle node and its admin interface, over that of the same process
//! with the pool alone, and for each link.
//!
//! Each figure is of a fresh process, which starts the same runtime and the same pool, and waits
//! before it looks. *Heap* is what is allocated and not freed, by a counting allocator: not what
//! the allocator adds to a request. *Resident* is what the system reports, medians of several
//! processes; it counts pages, and code that was executed for the first time. The peers are in a
//! process of their own. Each process proves afterwards that its node serves: the admin interface
//! answers, with as many links as there should be.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use kvpool::{KvLayout, Pool};
use kvpool_node::Node;
use kvpool_node::admin::{AdminServer, Client, Limits};
use kvpool_node::transport::tcp::{Address, PeerSettings};

/// What a process does: absent for the one that starts the others.
const ROLE: &str = "KVPOOL_IDLE_NODE_BENCH_ROLE";

/// Processes per figure.
const ROUNDS: usize = 5;
const BLOCKS: usize = 16_384;
const LINKS: [usize; 3] = [1, 8, 32];

/// Time between the start and the look, in which a node is idle.
const IDLE: Duration = Duration::from_secs(2);

/// Counts the bytes that are allocated and not freed.
struct Counting;

static BYTES: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), Relaxed);
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        BYTES.fetch_add(size, Relaxed);
        BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

/// Memory of a process.
#[derive(Clone, Copy, Default)]
struct Used {
    heap: f64,
    resident: f64,
}

impl Used {
    fn now() -> Self {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok());
        let resident = kib.map_or(f64::NAN, |kib| kib * 1024.0);
        Self { heap: BYTES.load(Relaxed) as f64, resident }
    }
}

fn main() {
    let role = std::env::var(ROLE).unwrap_or_default();
    match role.split(' ').collect::<Vec<_>>()[..] {
        ["peers", count] => return peers(count.parse().expect("a number")),
        ["pool"] => return alone(),
        ["node", ref peers @ ..] => return with_node(peers),
        _ => {}
    }
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("idle_node: to measure, run `cargo bench -p kvpool-node --bench idle_node`");
        return;
    }
    println!("KiB over the same process with the pool alone, medians of {ROUNDS} processes");
    println!("{:<28} {:>10} {:>10} {:>14} {:>14}", "", "heap", "resident", "heap a link", "resident");
    let pool = measured("pool");
    let node = measured("node");
    print("node and admin interface", node, pool, None);
    for links in LINKS {
        let (mut child, addresses) = start_peers(links);
        let linked = measured(&format!("node {addresses}"));
        let _ = child.kill();
        let _ = child.wait();
        print(&format!("the same with {links} links"), linked, pool, Some((node, links as f64)));
    }
    println!("the process with the pool alone: {:.0} and {:.0}", pool.heap / 1024.0, pool.resident / 1024.0);
}

fn print(name: &str, used: Used, base: Used, links: Option<(Used, f64)>) {
    let kib = |more: f64, less: f64| (more - less) / 1024.0;
    let (heap, resident) = (kib(used.heap, base.heap), kib(used.resident, base.resident));
    let Some((node, links)) = links else { return println!("{name:<28} {heap:>10.0} {resident:>10.0}") };
    let (heap_each, resident_each) =
        (kib(used.heap, node.heap) / links, kib(used.resident, node.resident) / links);
    println!("{name:<28} {heap:>10.0} {resident:>10.0} {heap_each:>14.1} {resident_each:>14.1}");
}

/// Returns the medians over processes with a role.
fn measured(role: &str) -> Used {
    let (mut heaps, mut residents) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let program = std::env::current_exe().expect("a path");
        let output =
            Command::new(program).env(ROLE, role).stderr(Stdio::inherit()).output().expect("a process");
        assert!(output.status.success(), "{role}: {}", output.status);
        let text = String::from_utf8(output.stdout).expect("numbers");
        let figures: Vec<f64> = text.split_whitespace().map(|word| word.parse().expect("a number")).collect();
        heaps.push(figures[0]);
        residents.push(figures[1]);
    }
    Used { heap: support::median(&mut heaps), resident: support::median(&mut residents) }
}

fn pool(blocks: usize) -> Pool {
    let layout = KvLayout::named("tiny").expect("a known name");
    Pool::builder(layout).blocks(blocks).build().expect("memory")
}

/// The runtime of every process here.
fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().expect("threads")
}

fn local() -> Address {
    Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

fn report(used: Used) {
    println!("{} {}", used.heap, used.resident);
}

/// A process with a pool alone.
fn alone() {
    let pool = pool(BLOCKS);
    runtime().block_on(async {
        // So that its timer exists here too.
        tokio::time::sleep(IDLE).await;
        report(Used::now());
    });
    assert_eq!(pool.free_blocks(), BLOCKS);
}

/// A process with a node, linked to peers at these addresses.
fn with_node(addresses: &[&str]) {
    let peer = |(number, address): (usize, &&str)| {
        PeerSettings::new(&format!("peer-{number}"), Address::Tcp(address.parse().expect("an address")))
    };
    let peers: Vec<PeerSettings> = addresses.iter().enumerate().map(peer).collect();
    let pool = pool(BLOCKS);
    runtime().block_on(async {
        let address = "127.0.0.1:0".parse().expect("an address");
        let server = AdminServer::bind(&address, None, Limits::default()).expect("a free port");
        let url = format!("http://{}", server.address());
        let builder = Node::builder(pool.clone()).name("idle").listen(local()).peers(peers).admin(server);
        let (node, _arrivals) = builder.start().await.expect("a free port");
        while node.peers().await.expect("it runs").iter().filter(|(_, is_up)| *is_up).count()
            < addresses.len()
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        tokio::time::sleep(IDLE).await;
        report(Used::now());
        let client = Client::new(url.parse().expect("an address"), None);
        let stats = client.get("/stats").await.expect("an answer");
        assert_eq!(stats["extra"]["node"]["peers_up"], addresses.len(), "{stats}");
    });
}

/// Starts a process with nodes to link to. Returns it with their addresses.
fn start_peers(count: usize) -> (Child, String) {
    let program = std::env::current_exe().expect("a path");
    let mut command = Command::new(program);
    let command = command.env(ROLE, format!("peers {count}")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("a process");
    let mut line = String::new();
    let from = child.stdout.take().expect("piped");
    BufReader::new(from).read_line(&mut line).expect("addresses");
    (child, line.trim().to_owned())
}

/// A process with nodes, until its input ends.
fn peers(count: usize) {
    let runtime = runtime();
    let nodes: Vec<_> = (0..count)
        .map(|number| {
            let node = Node::builder(pool(16)).name(format!("peer-{number}")).listen(local());
            runtime.block_on(node.start()).expect("a free port")
        })
        .collect();
    let address = |node: &Node| match &node.addresses()[0] {
        Address::Tcp(address) => address.to_string(),
        other => panic!("{other:?}"),
    };
    println!("{}", nodes.iter().map(|(node, _)| address(node)).collect::<Vec<_>>().join(" "));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

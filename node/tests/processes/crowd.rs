//! Clients and a server that send sequences to and fro.
//!
//! A client opens a sequence, moves it to the server, waits until the server has moved it back, compares
//! every byte and closes it. A process has several clients, each a node with a pool of its own. The
//! server sends everything back to the client of its origin, also to one that was started again and
//! knows nothing of it.
//!
//! | command | answer |
//! |---|---|
//! | `go`, `pause` | `done`: clients open sequences from now on, or do not |
//! | `state` | sums of the counts of all nodes of the process, and those of the process |
//! | `sizes` | live allocations of the heap by their size |
//! | `audit` | `sound`, or what is not |

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpool::{Pool, Sequence};
use kvpool_node::protocol::Timing;
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::wire::Limits;
use kvpool_node::{Arrivals, Node};
use tokio::sync::oneshot;

use crate::lines::{What, answer, tell};
use crate::{content, kv, memory, state};

/// Sequences that a client has open at the same time.
const CONVERSATIONS: usize = 2;

/// Blocks of the server: less than all clients have, so that it also refuses.
const SERVER_BLOCKS: usize = 4_000;

/// Blocks of a client.
const CLIENT_BLOCKS: usize = 300;

/// Shortest and longest pause behind a failure.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(200));

/// Returns the number of the client that opened a sequence.
pub fn client_of(id: u64) -> usize {
    (id >> 48) as usize
}

async fn start(pool: Pool, name: &str, server: Option<SocketAddr>) -> (Node, Arrivals) {
    let mut limits = Limits::default();
    limits.heartbeat = Duration::from_millis(500);
    limits.silence = Duration::from_secs(4);
    limits.item_bytes = 4 << 10;
    limits.streams = 2;
    let mut builder = Node::builder(pool)
        .name(name)
        .timing(Timing { transfer_deadline_ms: 4_000, retry_ms: 250, limit_ms: 60_000 })
        .limits(limits);
    builder = match server {
        Some(address) => builder.peers(vec![PeerSettings::new("server", Address::Tcp(address))]),
        None => builder.listen(Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))),
    };
    builder.start().await.unwrap()
}

/// Moves a sequence until it has succeeded.
async fn move_to(pool: &Pool, mut sequence: Sequence, to: &str) {
    let (id, mut pause) = (sequence.id().0, PAUSE.0);
    loop {
        tell(What::Leaves, id, "");
        match pool.migrate_to_node(sequence, to).await {
            Ok(_) => return tell(What::Moved, id, ""),
            Err(failed) => {
                tell(What::Owns, id, &failed.error);
                sequence = *failed.sequence;
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE.1);
    }
}

/// Notes a sequence that arrived, and compares its bytes.
fn take_in(pool: &Pool, sequence: &Sequence, from: &str) {
    tell(What::Owns, sequence.id().0, format!("from {from}"));
    if !content::is_right(pool, sequence) {
        tell(What::Wrong, sequence.id().0, format!("from {from}"));
    }
}

/// Runs the server until its parent is gone.
pub fn serve(seed: u64) {
    let runtime = runtime();
    let (node, mut arrivals) =
        runtime.block_on(start(content::pool(kv::other(), SERVER_BLOCKS), "server", None));
    let Some(Address::Tcp(address)) = node.addresses().first() else { panic!("no address") };
    answer(address);
    let pool = node.pool().clone();
    runtime.spawn(async move {
        let mut random = fastrand::Rng::with_seed(seed);
        while let Some(arrival) = arrivals.recv().await {
            take_in(&pool, &arrival.sequence, &arrival.from);
            let (pool, rest) = (pool.clone(), Duration::from_millis(random.u64(0..20)));
            tokio::spawn(async move {
                tokio::time::sleep(rest).await;
                move_to(&pool, arrival.sequence, &arrival.from).await;
            });
        }
    });
    obey(&runtime, &[Arc::new(node)], &AtomicBool::new(true), &AtomicUsize::new(0));
}

/// Runs clients until their parent is gone: `count` nodes from number `first` on. The number of the
/// process makes ids unique.
pub fn join(server: SocketAddr, first: usize, count: usize, process: u64) {
    let runtime = runtime();
    let is_paused = Arc::new(AtomicBool::new(true));
    let waiting = Arc::new(AtomicUsize::new(0));
    let next = Arc::new(AtomicU64::new(0));
    let mut nodes = Vec::new();
    for number in first..first + count {
        let pool = content::pool(kv::plain(), CLIENT_BLOCKS);
        let (node, arrivals) = runtime.block_on(start(pool.clone(), &format!("c{number}"), Some(server)));
        let returns = Returns::default();
        runtime.spawn(close_returned(pool.clone(), arrivals, returns.clone()));
        for _ in 0..CONVERSATIONS {
            let client = Client {
                pool: pool.clone(),
                prefix: (number as u64) << 48 | process << 24,
                next: next.clone(),
                returns: returns.clone(),
                is_paused: is_paused.clone(),
                waiting: waiting.clone(),
            };
            runtime.spawn(client.converse());
        }
        nodes.push(Arc::new(node));
    }
    answer("ready");
    obey(&runtime, &nodes, &is_paused, &waiting);
}

/// Sequences that are expected back.
type Returns = Arc<Mutex<HashMap<u64, oneshot::Sender<()>>>>;

struct Client {
    pool: Pool,
    prefix: u64,
    next: Arc<AtomicU64>,
    returns: Returns,
    is_paused: Arc<AtomicBool>,
    waiting: Arc<AtomicUsize>,
}

impl Client {
    async fn converse(self) {
        loop {
            if self.is_paused.load(Relaxed) {
                tokio::time::sleep(Duration::from_millis(5)).await;
                continue;
            }
            self.waiting.fetch_add(1, Relaxed);
            let id = self.prefix | self.next.fetch_add(1, Relaxed);
            let sequence = kv::admit(&self.pool, id, &content::tokens(id)).unwrap();
            tell(What::Owns, id, "");
            let (sender, returned) = oneshot::channel();
            self.returns.lock().unwrap().insert(id, sender);
            move_to(&self.pool, sequence, "server").await;
            returned.await.expect("the server lives");
            self.waiting.fetch_sub(1, Relaxed);
        }
    }
}

async fn close_returned(pool: Pool, mut arrivals: Arrivals, returns: Returns) {
    while let Some(arrival) = arrivals.recv().await {
        let id = arrival.sequence.id().0;
        take_in(&pool, &arrival.sequence, &arrival.from);
        tell(What::Closed, id, "");
        drop(arrival);
        // None: a former process of this client sent it.
        if let Some(sender) = returns.lock().unwrap().remove(&id) {
            let _ = sender.send(());
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Obeys commands until the parent is gone.
fn obey(
    runtime: &tokio::runtime::Runtime,
    nodes: &[Arc<Node>],
    is_paused: &AtomicBool,
    waiting: &AtomicUsize,
) {
    for line in std::io::stdin().lines() {
        answer(match line.unwrap().as_str() {
            "go" => {
                is_paused.store(false, Relaxed);
                "done".into()
            }
            "pause" => {
                is_paused.store(true, Relaxed);
                "done".into()
            }
            "state" => {
                let mut sums = vec![("waiting", waiting.load(Relaxed))];
                for node in nodes {
                    for (place, (name, count)) in
                        runtime.block_on(state::counts(node)).into_iter().enumerate()
                    {
                        match sums.get_mut(place + 1) {
                            Some((_, sum)) => *sum += count,
                            None => sums.push((name, count)),
                        }
                    }
                }
                sums.extend(state::usage());
                state::text(&sums)
            }
            "sizes" => memory::sizes(),
            "audit" => {
                let audits = nodes.iter().filter_map(|node| node.pool().audit().err());
                audits.map(|error| error.to_string()).next().unwrap_or("sound".into())
            }
            line => panic!("unknown command {line}"),
        });
    }
    std::process::exit(0);
}

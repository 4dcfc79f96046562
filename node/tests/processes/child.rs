//! A node in a process of its own, which obeys commands.
//!
//! | command | answer |
//! |---|---|
//! | `admit ID` | `open`: a sequence with the tokens of this id |
//! | `migrate ID PEER`, `replicate ID PEER`, `offload ID PEER` | `begun`; an event says how it ended |
//! | `check ID` | `right`, `wrong` or `absent` |
//! | `cached ID` | cached full blocks of these tokens, all of which were compared, or `wrong` |
//! | `close ID` | `closed` or `absent` |
//! | `state` | counts, as `name=number` |
//! | `audit` | `sound`, or what is not |

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvpool::Sequence;
use kvpool_node::protocol::Timing;
use kvpool_node::transport::tcp::{Address, PeerSettings};
use kvpool_node::wire::Limits;
use kvpool_node::{Arrivals, Node};

use crate::lines::{What, answer, tell};
use crate::{content, kv, state};

/// The transfer deadline.
pub const TRANSFER_DEADLINE: Duration = Duration::from_millis(400);

/// Blocks of each pool.
const BLOCKS: usize = 300;

/// Bytes of a data item: a transfer has several.
const ITEM_BYTES: usize = 4 << 10;

/// The sequences that this process may run.
type Open = Arc<Mutex<HashMap<u64, Sequence>>>;

struct Engine {
    node: Node,
    open: Open,
    /// Requests without a result.
    requests: Arc<()>,
}

/// Runs a node until its parent is gone. Name and address of its peer are `-` for none.
pub fn run(name: &str, peer: &str, address: &str) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.unwrap();
    let engine = runtime.block_on(start(name, peer, address));
    let Some(Address::Tcp(address)) = engine.node.addresses().first() else { panic!("no address") };
    answer(address);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        answer(runtime.block_on(engine.obey(&line)));
    }
    std::process::exit(0);
}

async fn start(name: &str, peer: &str, address: &str) -> Engine {
    let layout = if name.starts_with('a') { kv::plain() } else { kv::other() };
    let transfer_deadline_ms = TRANSFER_DEADLINE.as_millis() as u64;
    let mut limits = Limits::default();
    limits.heartbeat = TRANSFER_DEADLINE / 8;
    limits.silence = TRANSFER_DEADLINE;
    limits.item = TRANSFER_DEADLINE * 4;
    limits.handshake = TRANSFER_DEADLINE * 8;
    limits.item_bytes = ITEM_BYTES;
    limits.streams = 2;
    let peer = (peer != "-").then(|| PeerSettings::new(peer, Address::Tcp(address.parse().unwrap())));
    let builder = Node::builder(content::pool(layout, BLOCKS))
        .name(name)
        .listen(Address::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))))
        .timing(Timing {
            transfer_deadline_ms,
            retry_ms: transfer_deadline_ms / 10,
            limit_ms: 300 * transfer_deadline_ms,
        })
        .limits(limits)
        .peers(peer.into_iter().collect());
    let (node, arrivals) = builder.start().await.unwrap();
    let open = Open::default();
    tokio::spawn(take_in(arrivals, open.clone()));
    Engine { node, open, requests: Arc::default() }
}

async fn take_in(mut arrivals: Arrivals, open: Open) {
    while let Some(arrival) = arrivals.recv().await {
        keep(&open, arrival.sequence, "it arrived");
    }
}

fn keep(open: &Open, sequence: Sequence, why: &str) {
    let id = sequence.id().0;
    tell(What::Owns, id, why);
    assert!(open.lock().unwrap().insert(id, sequence).is_none(), "sequence {id} is here twice");
}

impl Engine {
    async fn obey(&self, line: &str) -> String {
        let (pool, words) = (self.node.pool(), line.split(' ').collect::<Vec<_>>());
        let id = words.get(1).map_or(0, |word| word.parse().unwrap());
        match words[..] {
            ["admit", _] => {
                let sequence = kv::admit(pool, id, &content::tokens(id)).unwrap();
                keep(&self.open, sequence, "it was opened");
                "open".into()
            }
            ["migrate", _, peer] => self.migrate(id, peer),
            ["replicate", _, peer] => self.replicate(id, peer),
            ["offload", _, peer] => self.offload(id, peer),
            ["check", _] => match self.open.lock().unwrap().get(&id) {
                None => "absent".into(),
                Some(sequence) if content::is_right(pool, sequence) => "right".into(),
                Some(_) => "wrong".into(),
            },
            ["cached", _] => {
                let tokens = [&content::tokens(id)[..], &[0]].concat();
                let counted = || kv::cached(pool, &tokens);
                let counted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(counted));
                counted.map_or("wrong".into(), |blocks| blocks.to_string())
            }
            ["close", _] => match self.open.lock().unwrap().remove(&id) {
                Some(sequence) => {
                    tell(What::Closed, id, "");
                    drop(sequence);
                    "closed".into()
                }
                None => "absent".into(),
            },
            ["ended", _, peer] => format!("{:?}", self.node.declare_ended(peer).await),
            ["state"] => self.state().await,
            ["audit"] => pool.audit().map_or_else(|error| error.to_string(), |_| "sound".into()),
            _ => panic!("unknown command {line}"),
        }
    }

    fn migrate(&self, id: u64, peer: &str) -> String {
        let Some(sequence) = self.open.lock().unwrap().remove(&id) else { return "absent".into() };
        tell(What::Leaves, id, "");
        let (pool, open, request) = (self.node.pool().clone(), self.open.clone(), self.requests.clone());
        let peer = peer.to_owned();
        tokio::spawn(async move {
            match pool.migrate_to_node(sequence, &peer).await {
                Ok(_) => tell(What::Moved, id, ""),
                Err(failed) => {
                    let why = failed.error.to_string();
                    keep(&open, *failed.sequence, &why);
                }
            }
            drop(request);
        });
        "begun".into()
    }

    fn replicate(&self, id: u64, peer: &str) -> String {
        let Some(sequence) = self.open.lock().unwrap().remove(&id) else { return "absent".into() };
        let (pool, open, request) = (self.node.pool().clone(), self.open.clone(), self.requests.clone());
        let peer = peer.to_owned();
        tokio::spawn(async move {
            let copied = pool.replicate_to_node(&sequence, &peer).await;
            // Before the event, behind which the parent checks it.
            open.lock().unwrap().insert(id, sequence);
            match copied {
                Ok(_) => tell(What::Copied, id, ""),
                Err(error) => tell(What::Uncopied, id, error),
            }
            drop(request);
        });
        "begun".into()
    }

    /// Moves all cached blocks away. The id only names the request.
    fn offload(&self, id: u64, peer: &str) -> String {
        let (pool, request) = (self.node.pool().clone(), self.requests.clone());
        let peer = peer.to_owned();
        tokio::spawn(async move {
            match pool.offload_to_node(&peer, BLOCKS).await {
                Ok(report) => tell(What::Copied, id, format!("{report:?}")),
                Err(error) => tell(What::Uncopied, id, error),
            }
            drop(request);
        });
        "begun".into()
    }

    async fn state(&self) -> String {
        let mut counts = state::counts(&self.node).await;
        counts.push(("requests", Arc::strong_count(&self.requests) - 1));
        counts.push(("kept", self.open.lock().unwrap().len()));
        state::text(&counts)
    }
}

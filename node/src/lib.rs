//! Moves sequences and cached blocks of `kvpool` between the pools of different processes and
//! hosts.
//!
//! A [`Node`] is a pool with links to other nodes. Its peers are destinations of the pool, by name;
//! their sequences arrive as a stream:
//!
//! ```no_run
//! use kvpool::{Pool, storage::KvLayout};
//! use kvpool_node::Node;
//! use kvpool_node::transport::tcp::{Address, PeerSettings};
//!
//! # async fn run(sequence: kvpool::Sequence) -> Result<(), Box<dyn std::error::Error>> {
//! let pool = Pool::builder(KvLayout::named("llama-3-8b")?).blocks(10_000).build()?;
//! let address = |text: &str| text.parse().map(Address::Tcp);
//! let (node, mut arrivals) = Node::builder(pool.clone())
//!     .name("gpu-node-1")
//!     .listen(address("127.0.0.1:7411")?)
//!     .peers(vec![PeerSettings::new("gpu-node-2", address("127.0.0.1:7412")?)])
//!     .start()
//!     .await?;
//! // It continues there, with the same id, tokens and bytes, and is closed here.
//! pool.migrate_to_node(sequence, "gpu-node-2").await?;
//! while let Some(arrival) = arrivals.recv().await {
//!     println!("{} came from {}", arrival.sequence.id(), arrival.from);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! | module | contents |
//! |---|---|
//! | [`wire`] | the form of what peers send, and its bounds |
//! | [`protocol`] | who owns a copy when, without input or output |
//! | [`transport`] | links, and bytes from frames to frames: TCP, Unix sockets, TLS, NIXL |
//! | [`membership`] | the nodes of a cluster, by a fixed list or etcd |
//! | [`topology`] | devices, NUMA nodes, NICs, and the path between any two |
//! | [`settings`] | settings of a node's process: flags, environment, file |
//! | [`services`] | the services that settings name, over a pool |
//! | [`events`] | events of the prefix cache for request routers, over ZeroMQ |
//! | [`hints`] | hints of routers and orchestrators, in their wire form |
//! | [`metrics`] | metrics for Prometheus |
//! | [`admin`] | the HTTP interface |
//! | [`log`] | the text of log messages |
//! | [`tier`] | a cluster-wide tier of cached blocks: in process, a node, Redis, Mooncake |

pub mod admin;
pub mod events;
pub mod hints;
pub mod log;
pub mod membership;
pub mod metrics;
mod node;
pub mod protocol;
pub mod services;
pub mod settings;
pub mod tier;
pub mod topology;
pub mod transport;
pub mod wire;

pub use node::{
    Arrival, Arrivals, Node, NodeBuilder, NodeCounters, NodeError, Offers, OffloadBelow, PartError,
    SendPartError,
};
pub use settings::Restarts;

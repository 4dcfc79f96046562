//! A node: a pool with links to the pools of other processes.
//!
//! ```text
//!            Node, Remote (any thread)          transports: bytes between frames
//!                 | requests                         ^ grants, submissions
//!                 v                                  |
//! links  --->  driver: one task, all migrations  --> work: exports, imports, checksums, on blocking threads
//! (a reader and a writer task each)      <-- results --
//! ```
//!
//! Only the [driver](driver) changes the [machines of the protocol](crate::protocol) and their
//! resources. It never waits: messages go through bounded queues of the links and are dropped when
//! these are full, which the protocol repairs; work runs elsewhere and borrows its export or
//! import.
//!
//! # Ownership of the blocks of a migration
//!
//! | | the export or import is | until |
//! |---|---|---|
//! | between two tasks | in the driver's job | the next task borrows it |
//! | during a task | in the task | its result returns it, also if the migration has ended meanwhile |
//! | in a transport | kept by a hold | the transport drops it: see [`kvpool::transport`] |
//!
//! A migration that ends while a task has its export is finished or restored when the task returns;
//! the task is told to stop.
//!
//! An export travels with the request that waits for it (`parcel`): wherever it is dropped, also
//! with the driver or the runtime, the request gets it back. If the peer was sent `Commit` by then,
//! the error is [`TransferError::InDoubt`](kvpool::TransferError::InDoubt).
//!
//! # Parts
//!
//! The parts of a copy share one import, which lives as long as any of them: the first part
//! reserves the blocks, and the commit of the last one takes it. The bytes of a part arrive in a
//! [staging](staging) and are written to the import when they are verified.
//!
//! # Incarnations
//!
//! Each start of a node has a number. Another number under the same name is another process, and
//! proves nothing about the former one, which may live behind a partitioned network with a sequence
//! that this node has in doubt. Whether it has ended decides who owns that sequence.
//!
//! | another process of a name links | then |
//! |---|---|
//! | while a link of the present one lives | it is refused |
//! | and began earlier than the present one | it is refused |
//! | and proves that the present one has ended | it is the present one; doubts are resolved |
//! | and nothing depends on it | it is the present one |
//! | otherwise | it is the present one; the former is remembered, with its doubts |
//!
//! The operator resolves doubts about a former process ([`Node::declare_ended`]). Two things depend
//! on the end of a process: a copy that only one side may continue with (at a source that has sent
//! `Commit`, and at a target until the source has answered), and grants by which a peer writes
//! memory directly.
//!
//! *Proof* is a kernel lock (`name_lock`) that both processes state: one process at a time holds
//! it, until it ends. A node that ends with doubts, in a process that lives on, keeps it. A later
//! start is no proof, since an orchestrator may replace a node that it cannot reach; neither is a
//! certificate, which two processes may share, nor the listener's address, which may move to
//! another host. On another host, in another container, or after a reboot, there is no proof, and
//! the operator decides, or [`Restarts::ByName`] if something else guarantees that at most one
//! process of a name lives. With certificates, a peer can lie about the lock of its own name only;
//! nodes that share only a token trust each other with their names.

mod admin;
mod arrival;
mod builder;
mod caught;
mod dialers;
mod driver;
mod error;
mod job;
mod message;
mod name_lock;
#[expect(clippy::module_inception, reason = "the room is named after its main type")]
mod node;
mod offload;
mod operator;
mod parcel;
mod part;
mod parts;
mod peers;
mod questions;
mod remote;
mod reports;
mod staging;
mod status;
mod work;

pub use arrival::{Arrival, Arrivals};
pub use builder::NodeBuilder;
pub use error::NodeError;
pub use node::Node;
pub use offload::{Offers, OffloadBelow};
pub use part::{PartError, SendPartError};
pub use status::NodeCounters;

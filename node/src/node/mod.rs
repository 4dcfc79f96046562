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
//! The [driver](driver) is the only place that changes the [machines of the
//! protocol](crate::protocol) and what belongs to them. It never waits: messages go through
//! bounded queues of the links and are dropped where these are full, which the protocol repairs;
//! work runs elsewhere, and takes the export or import that it works on along.
//!
//! # Who has the blocks of a migration
//!
//! | | export or import is | until |
//! |---|---|---|
//! | between two tasks | in the driver's job | the next task takes it along |
//! | during a task | in the task | its result gives it back, also if the migration has ended meanwhile |
//! | in a transport | kept by a hold | the transport drops it: see [`kvpool::transport`] |
//!
//! A migration that ends while its export is in a task is finished, or restored, when the task
//! returns: the task is told to stop.
//!
//! An export travels with the request that waits for it (`parcel`): wherever it is dropped, also with
//! the driver or the runtime, the request gets it back. If the peer was told to commit by then, it
//! comes with [`TransferError::InDoubt`](kvpool::TransferError::InDoubt).
//!
//! # Parts
//!
//! The parts of a copy share one import, which lives as long as any of them: the first part reserves
//! the blocks, and the last one's commit takes it. The bytes of a part arrive in a [staging](staging)
//! and go into the import when they are verified.
//!
//! # Incarnations
//!
//! Each start of a node has a number. Another number under the same name is another process, and says
//! nothing of the former one: that may live behind a network that is cut, with a sequence that this
//! node has in doubt. Whether it has ended decides who owns that sequence.
//!
//! | another process of a name links | then |
//! |---|---|
//! | while a link of the present one lives | it is refused |
//! | and began earlier than the present one | it is refused |
//! | and proves that the present one has ended | it is the present one; doubts are resolved |
//! | and nothing depends on it | it is the present one |
//! | otherwise | it is the present one; the former is remembered, with its doubts |
//!
//! Doubts of a former process end by the operator's word ([`Node::declare_ended`]). What depends on
//! the end of a process: a copy that only one side may go on with, at a source that has told the
//! target to commit, and at a target until the source has answered; and grants by which a peer
//! writes memory by itself.
//!
//! *Proof* is a lock of the kernel (`name_lock`) that both processes state: one process has it at a
//! time, and until it ends; a node that ends with doubts, in a process that lives on, keeps it. A
//! later start is no proof, since an orchestrator may replace a node that it cannot reach; neither
//! is a certificate, of which two processes may have copies, nor the listener's address, which may
//! be moved to another host. On another host, in another container, or after a boot, there is no
//! proof, and the operator decides, or [`Restarts::ByName`] if something else guarantees that at
//! most one process of a name lives. A peer that lies about its lock can only lie about its own name
//! where certificates are used; nodes that share only a token trust each other with their names.

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
mod serving;
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

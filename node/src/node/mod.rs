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
//! # Incarnations
//!
//! A process of a peer is replaced by another one only when no link of the former is alive. A
//! handshake with a second process while the first one answers is refused, and tried again: an old
//! process whose packets are late is not taken for a new one.

mod admin;
mod arrival;
mod builder;
mod dialers;
mod driver;
mod error;
mod job;
mod message;
#[expect(clippy::module_inception, reason = "the room is named after its main type")]
mod node;
mod operator;
mod part;
mod parts;
mod peers;
mod remote;
mod serving;
mod spill;
mod staging;
mod status;
mod work;

pub use arrival::{Arrival, Arrivals};
pub use builder::NodeBuilder;
pub use error::NodeError;
pub use node::Node;
pub use part::{PartError, SendPartError};
pub use spill::{Offers, Spill};
pub use status::NodeCounters;

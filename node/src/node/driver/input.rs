use std::sync::Arc;

use kvpool::prefix::BlockHash;
use kvpool::transfer::{Fetched, Imported};
use kvpool::transport::{PeerId, TransportError};
use kvpool::{Carried, TransferError};
use tokio::sync::oneshot;

use crate::node::error::NodeError;
use crate::node::job::Incoming;
use crate::node::message::{NodeMessage, Way};
use crate::node::parcel::Parcel;
use crate::node::questions::Cached;
use crate::node::status::NodeStatus;
use crate::node::work::{Lost, Reserved, Verified};
use crate::protocol::{
    AbortReason, Attempt, Grant, Incarnation, LinkId, MachineId, ManifestBytes, MigrationId, Part, Refusal,
    Text,
};
use crate::transport::tcp::{Held, Link};

/// Capacity of the driver's queue. Readers of links wait for a slot: backpressure to peers.
pub(in crate::node) const INPUTS: usize = 1024;

pub(in crate::node) enum Input {
    LinkUp(Arc<Link>),
    LinkLost(LinkId, Arc<Link>),
    /// A peer sent a message. It counts towards the link's receive budget until it is handled.
    Message(LinkId, Arc<Link>, Box<NodeMessage>, Held),
    Done(MachineId, Box<Done>),
    /// Adding a peer to NIXL has succeeded or failed.
    Reached(LinkId, Incarnation, Result<PeerId, TransportError>),
    Over(LinkId, Way, u64),
    /// Sends an export, or a part of one.
    Send(Box<Parcel>, Option<(MigrationId, Part)>),
    Fetch(String, Vec<BlockHash>, oneshot::Sender<Result<Fetched, TransferError>>),
    AskCached(String, Vec<BlockHash>, Cached),
    /// Declares that a peer's process has ended; the answer has the sequences that were in doubt.
    PeerEnded(String, oneshot::Sender<Result<Vec<u64>, NodeError>>),
    Cut(String),
    Status(oneshot::Sender<NodeStatus>),
    /// Cancels what can be cancelled, and ends the driver when nothing is left.
    Drain,
}

/// The result of a task, and what the task borrowed.
pub(in crate::node) enum Done {
    Exported(Option<Parcel>, Result<(ManifestBytes, usize), AbortReason>),
    Transferred(Parcel, Attempt, Grant, Result<Carried, Lost>),
    Reserved(Result<Reserved<Incoming>, (Refusal, u64)>),
    Verified(Incoming, Attempt, Result<Verified, Text>),
    Committed(Result<Imported, Text>),
}

//! A node of the simulation, what happens to it, and the weather.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use kvpool_node::protocol::*;

use crate::pool::Pool;

pub type NodeId = usize;

/// Something that happens to one node.
#[derive(Clone, Debug)]
pub enum Input {
    Message {
        from: NodeId,
        envelope: Envelope,
    },
    LinkUp {
        peer: NodeId,
        incarnation: Incarnation,
    },
    LinkLost {
        peer: NodeId,
    },
    Job {
        machine: MachineId,
        job: Job,
    },
    /// A timer that was set for this time.
    Wake {
        planned: u64,
    },
}

/// Work of a node that takes time.
#[derive(Clone, Debug)]
pub enum Job {
    Export { what: Option<FetchBytes> },
    Transfer { attempt: Attempt, places: Places, tag: u64 },
    Reserve { manifest: ManifestBytes, part: Option<CopyPart> },
    Verify { attempt: Attempt },
    Commit,
}

#[derive(Clone, Debug)]
pub enum Happening {
    Input {
        node: NodeId,
        incarnation: Incarnation,
        input: Input,
    },
    Request {
        node: NodeId,
    },
    /// The engines of all ranks are asked for the parts of a copy.
    Parts,
    Part {
        node: NodeId,
        request: Request,
    },
    Clear {
        node: NodeId,
    },
    Engine,
    Fault,
    Death {
        node: NodeId,
    },
    Resume {
        node: NodeId,
    },
    Restart {
        node: NodeId,
    },
    Mend {
        a: NodeId,
        b: NodeId,
    },
    Heal,
}

pub struct Node {
    pub migrations: Migrations,
    pub pool: Pool,
    pub is_alive: bool,
    pub is_paused: bool,
    pub inbox: VecDeque<Input>,
    pub wake_at: Option<u64>,
    /// Its transfers never end.
    pub is_mute: bool,
    /// Of a source: the sequence here, the one at the target, and the kind.
    pub sequences: BTreeMap<MachineId, (u64, u64, Kind)>,
    /// Targets whose sources have said that their cache was cleared.
    pub cleared: BTreeSet<MachineId>,
    /// Of all machines: the peer.
    pub links: BTreeMap<MachineId, NodeId>,
    /// Time of the last report of a handshake, per peer.
    pub shaken: BTreeMap<NodeId, u64>,
}

/// How bad the network and the nodes are, in one schedule.
pub struct Weather {
    pub lost: f64,
    pub doubled: f64,
    pub late: f64,
    pub corrupt: f64,
    pub struck: f64,
    /// No faults at all: then no side may believe in one.
    pub is_calm: bool,
    pub horizon: u64,
    pub timing: Timing,
}

/// The link to a node; all nodes number their links alike.
pub fn link(peer: NodeId) -> LinkId {
    LinkId(peer as u32)
}

pub fn name(message: &Message) -> &'static str {
    match message {
        Message::ToTarget(message) => match message {
            ToTarget::Prepare { .. } => "Prepare",
            ToTarget::Sent { .. } => "Sent",
            ToTarget::Commit { .. } => "Commit",
            ToTarget::Abort { .. } => "Abort",
            ToTarget::Query { .. } => "Query",
            ToTarget::Heartbeat { .. } => "Heartbeat",
            ToTarget::Forget { .. } => "Forget",
        },
        Message::ToSource(message) => match message {
            ToSource::Fetch { .. } => "Fetch",
            ToSource::Prepared { .. } => "Prepared",
            ToSource::Refused { .. } => "Refused",
            ToSource::Verified { .. } => "Verified",
            ToSource::Status { .. } => "Status",
            ToSource::Committed { .. } => "Committed",
            ToSource::Aborted { .. } => "Aborted",
        },
    }
}

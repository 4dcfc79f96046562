use serde::{Deserialize, Serialize};

use super::machine::Machine;
use super::path::{Path, paths};

/// A machine, the paths between its parts, and the links to its peers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TopologyReport {
    /// The machine.
    pub machine: Machine,
    /// The paths.
    pub paths: Vec<Path>,
    /// Links to peers of a running node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<PeerLink>,
}

/// The link to a peer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PeerLink {
    /// Name of the peer.
    pub name: String,
    /// Address to which this node connects; `None` for a peer that connects itself.
    pub address: Option<String>,
    /// Whether a link is up.
    pub is_up: bool,
    /// Why there is no link, or what impairs transfers over it, if known.
    pub reason: Option<String>,
}

impl TopologyReport {
    /// Returns a machine with these paths.
    pub fn new(machine: Machine, paths: Vec<Path>) -> Self {
        Self { machine, paths, links: Vec::new() }
    }

    /// Returns a machine with all paths between its parts.
    pub fn of(machine: Machine) -> Self {
        let paths = paths(&machine);
        Self::new(machine, paths)
    }
}

impl PeerLink {
    /// Describes the link to a peer.
    pub fn new(name: String, address: Option<String>, is_up: bool, reason: Option<String>) -> Self {
        Self { name, address, is_up, reason }
    }
}

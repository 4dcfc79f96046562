//! What a node is asked for, and within which bounds.

use serde::{Deserialize, Serialize};

use super::message::{FetchBytes, Kind, MigrationId, Part, PartFault};

/// Number of a link; each peer has one, for as long as the node's process lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct LinkId(pub u32);

/// Number of one side of a migration in this process; never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct MachineId(pub u64);

/// Bounds of what a node has under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Migrations that this node asked for.
    pub local_max: u32,
    /// Migrations that one peer asked for.
    pub per_peer_max: u32,
    /// Committed copies whose source was not heard of again, for one peer.
    pub committed_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { local_max: 1_024, per_peer_max: 64, committed_max: 4_096 }
    }
}

/// A migration that a node is asked for by its engine, its operator or itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Random; the same request twice has the same, and so have the requests for the parts of a copy.
    pub id: MigrationId,
    /// The peer.
    pub link: LinkId,
    /// What to do.
    pub command: Command,
    /// Part of the copy that this node has; `None` for all of it. Only sequences move in parts.
    pub part: Option<Part>,
}

/// What a request asks for.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Command {
    /// Move a sequence to the peer.
    Migrate {
        /// The sequence.
        sequence: u64,
    },
    /// Copy a sequence to the peer.
    Replicate {
        /// The sequence.
        sequence: u64,
    },
    /// Move cached blocks to the peer.
    Offload {
        /// Description of the blocks.
        what: FetchBytes,
    },
    /// Get cached blocks of the peer.
    BringBack {
        /// Description of the blocks.
        what: FetchBytes,
    },
}

impl Command {
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Migrate { .. } => Kind::Migrate,
            Self::Replicate { .. } => Kind::Replicate,
            Self::Offload { .. } => Kind::Cached,
            Self::BringBack { .. } => Kind::Fetch,
        }
    }

    pub(super) fn sequence(&self) -> Option<u64> {
        match *self {
            Self::Migrate { sequence } | Self::Replicate { sequence } => Some(sequence),
            Self::Offload { .. } | Self::BringBack { .. } => None,
        }
    }
}

/// Reason for which a request does not begin.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The peer was never reached, or its process has ended.
    #[error("no link to peer {} is up", .0.0)]
    NoLink(LinkId),
    /// The same request is under way.
    #[error("migration {0} is under way")]
    SameId(MigrationId),
    /// The sequence is being migrated or replicated.
    #[error("migration {0} of this sequence is under way")]
    SameSequence(MigrationId),
    /// The sequence came by a migration of which its source does not know yet that it was committed.
    ///
    /// If this node died, that source would go on with its copy; therefore the sequence stays here
    /// until the source has answered, or its process has ended.
    #[error("the source of migration {0} does not know yet that the sequence arrived")]
    Unconfirmed(MigrationId),
    /// The part of the copy cannot exist.
    #[error("{part} of the copy: {fault}")]
    Part {
        /// The part.
        part: Part,
        /// Its fault.
        fault: PartFault,
    },
    /// Too many requests are under way.
    #[error("{max} requests are under way")]
    Many {
        /// Requests permitted.
        max: u32,
    },
}

/// Reason for which a migration cannot be cancelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CancelError {
    /// It has ended, or never began.
    #[error("the migration is unknown")]
    Unknown,
    /// The target was told to commit.
    #[error("the target was told to commit")]
    Committing,
}

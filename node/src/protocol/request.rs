use serde::{Deserialize, Serialize};

use super::message::{FetchBytes, Kind, MigrationId, Part, PartFault};

/// Number of a peer's link, constant while the node's process lives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct LinkId(pub u32);

/// Number of one side of a migration in this process; never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct MachineId(pub u64);

/// Limits on a node's migrations in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Limits {
    /// Migrations that this node requested.
    pub local_max: u32,
    /// Migrations that one peer requested.
    pub per_peer_max: u32,
    /// Committed copies of one peer whose source has not confirmed.
    pub committed_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self { local_max: 1_024, per_peer_max: 64, committed_max: 4_096 }
    }
}

/// A migration requested by the engine, the operator or the node itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// Random; equal for a repeated request, and for the requests of all parts of a copy.
    pub id: MigrationId,
    /// The peer.
    pub link: LinkId,
    /// What to do.
    pub command: Command,
    /// Part of the copy that this node has; `None` for the whole copy. Only sequences move in
    /// parts.
    pub part: Option<Part>,
}

/// What to do.
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
    /// Fetch cached blocks from the peer.
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

/// Why a request does not begin.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The peer was never reached, or its process has ended.
    #[error("no link to peer {} is up", .0.0)]
    NoLink(LinkId),
    /// The same request is in progress.
    #[error("migration {0} is under way")]
    SameId(MigrationId),
    /// The sequence is being migrated or replicated.
    #[error("migration {0} of this sequence is under way")]
    SameSequence(MigrationId),
    /// The sequence came by a migration whose commit its source has not confirmed.
    ///
    /// If this node died, the source would continue with its copy; so the sequence stays until the
    /// source has answered, or its process has ended.
    #[error("the source of migration {0} does not know yet that the sequence arrived")]
    Unconfirmed(MigrationId),
    /// The part of the copy cannot exist.
    #[error("{part} of the copy: {fault}")]
    Part {
        /// The part.
        part: Part,
        /// What is wrong with it.
        fault: PartFault,
    },
    /// Too many requests are in progress.
    #[error("{max} requests are under way")]
    Many {
        /// Requests permitted.
        max: u32,
    },
}

/// Why a migration cannot be cancelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CancelError {
    /// It has ended, or never began.
    #[error("the migration is unknown")]
    Unknown,
    /// The target was sent `Commit`.
    #[error("the target was told to commit")]
    Committing,
}

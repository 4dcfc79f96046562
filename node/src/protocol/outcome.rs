use serde::{Deserialize, Serialize};

use super::message::{AbortReason, Kind, MigrationId, Part, Refusal};
use super::timing::Millis;

/// Side of a migration.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub enum Side {
    /// The copy leaves this node.
    Source,
    /// The copy comes to this node.
    Target,
}

/// Node that requested a migration.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Origin {
    /// This node.
    Local,
    /// The peer.
    Peer,
}

/// Result of one side of a migration.
///
/// Each side gets exactly one final outcome, unless its process ends; at most one
/// [`InDoubt`](Self::InDoubt) may precede it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Outcome {
    /// The target has committed. At the source: its own copy was closed, kept or evicted, as the
    /// [`Kind`] says. At the target: the copy can be scheduled.
    Done,
    /// The target refused. The source's copy is unchanged.
    Refused {
        /// Reason.
        reason: Refusal,
        /// Blocks that are free at the target or can be reclaimed there.
        free: u64,
    },
    /// It failed. The source's copy is unchanged; the target has nothing.
    Failed(Cause),
    /// The target may have committed a copy that is not exclusive; the source keeps its own.
    Unconfirmed,
    /// Not final: the target was sent `Commit`, and has not answered. The source holds its copy and
    /// does not run it.
    InDoubt {
        /// When it was told.
        since: Millis,
        /// Why there is no answer.
        doubt: Doubt,
    },
}

impl Outcome {
    /// Returns whether no other outcome follows.
    pub fn is_final(&self) -> bool {
        !matches!(self, Self::InDoubt { .. })
    }
}

/// Reason of a doubt.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Doubt {
    /// No answer came within the transfer deadline.
    Silent,
    /// The link was lost.
    LinkLost,
}

/// Why a migration failed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// This node gave up.
    #[error("{0}")]
    Own(AbortReason),
    /// The peer was silent.
    #[error("the peer was silent for {waited_ms} ms")]
    Silent {
        /// Time since the peer's last message, in milliseconds.
        waited_ms: u64,
    },
    /// It took longer than permitted.
    #[error("not committed within {limit_ms} ms")]
    Limit {
        /// Time permitted in milliseconds.
        limit_ms: u64,
    },
    /// The peer's process has ended, and with it the other copy.
    #[error("the peer's process has ended")]
    PeerEnded,
    /// The link was lost during a transfer of cached blocks, which does not wait for the next link.
    #[error("the link was lost")]
    LinkLost,
    /// The peer gave up.
    #[error("the peer gave up: {0}")]
    Peer(AbortReason),
}

/// An outcome and its migration.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Report {
    /// The migration.
    pub id: MigrationId,
    /// Side of this node.
    pub side: Side,
    /// Kind.
    pub kind: Kind,
    /// Part of the copy; `None` for the whole copy.
    pub part: Option<Part>,
    /// Node that requested it.
    pub origin: Origin,
    /// Blocks whose checksums were wrong, over all attempts.
    pub bad_blocks: u64,
    /// Result.
    pub outcome: Outcome,
}

//! Messages between the two sides of a migration.
//!
//! All are idempotent. After `Prepare`, a message names the target's reservation; a message about
//! another reservation changes nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::bounded::{Bytes, List, Text};
use super::places::{Places, RANGES_MAX, Range};

/// Bytes of the largest manifest.
pub const MANIFEST_BYTES_MAX: usize = 4 << 20;

/// Bytes of the largest description of cached blocks to fetch.
pub const FETCH_BYTES_MAX: usize = 1 << 20;

/// Serialized manifest of an export; opaque to the protocol.
pub type ManifestBytes = Bytes<MANIFEST_BYTES_MAX>;

/// Serialized description of cached blocks; opaque to the protocol.
pub type FetchBytes = Bytes<FETCH_BYTES_MAX>;

/// Number of a migration: random, chosen by the requested node, never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MigrationId(pub u128);

impl fmt::Debug for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for MigrationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Number of one start of a node's process: random.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Incarnation(pub u64);

/// Number of a reservation: chosen by the target, unique in its incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct ReservationId(pub u64);

/// Number of times that bad places were sent again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct Attempt(pub u8);

impl Attempt {
    /// The last attempt: bad places are sent again at most twice.
    pub const LAST: Self = Self(2);

    /// Returns the next attempt, if permitted.
    pub fn next(self) -> Option<Self> {
        (self < Self::LAST).then_some(Self(self.0 + 1))
    }
}

/// Purpose of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// Moves a sequence: the source closes its own once the target has committed.
    Migrate,
    /// Copies a sequence: the source's own continues.
    Replicate,
    /// Moves cached blocks: the source evicts its own once the target has committed.
    Cached,
    /// Copies cached blocks to a node that asked for them: the source keeps its own.
    Fetch,
}

impl Kind {
    /// Returns whether exactly one side may continue with the copy.
    ///
    /// Only such a transfer can be in doubt.
    pub fn is_exclusive(self) -> bool {
        self == Self::Migrate
    }

    /// Returns whether cached blocks are transferred, whose loss costs only a second transfer.
    pub fn is_of_cache(self) -> bool {
        matches!(self, Self::Cached | Self::Fetch)
    }
}

/// Parts of the largest copy.
pub const PARTS_MAX: u16 = 256;

/// One source's part of a copy, where several sources feed one target.
///
/// The parts of a copy share one [`MigrationId`]. A part has some heads of every block.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Part {
    /// Number of the part, from 0.
    pub index: u16,
    /// Number of parts.
    pub of: u16,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "part {} of {}", self.index, self.of)
    }
}

/// Why a target refuses a part.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum PartFault {
    /// Its number is not below the number of parts, or there are too many.
    #[error("it does not exist, or there are more than {PARTS_MAX}")]
    Number,
    /// Cached blocks do not move in parts.
    #[error("cached blocks do not move in parts")]
    Cached,
    /// Another node sends this part.
    #[error("another node sends it")]
    Repeated,
    /// The copy has another number of parts, or another kind.
    #[error("the others are of another number of parts, or for another purpose")]
    Disagrees,
    /// The copy is already being committed.
    #[error("the copy is being committed")]
    Late,
    /// The target does not know its heads.
    #[error("the node was not told which heads it has")]
    HeadsUnknown,
    /// It is the last part, and no part has some heads of the target.
    #[error("no part has {missing} of the node's {heads} heads")]
    HeadsMissing {
        /// Missing heads.
        missing: u32,
        /// Heads of the target.
        heads: u32,
    },
    /// The target lacks the memory to stage all blocks of the part that it needs.
    #[error("{needed} bytes are needed until they are checked, and {free} are free")]
    Staging {
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
}

/// Permission for the transport to write the bytes of places.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Grant {
    /// Number of the transport, as the node assigns it.
    pub way: u8,
    /// Number of the transport's grant.
    pub tag: u64,
    /// Number of the target's storage at its transport.
    pub region: u32,
    /// Frames of the places, in the order of the places.
    pub runs: List<Range, RANGES_MAX>,
}

/// Why a target refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Too few blocks are free or can be reclaimed.
    #[error("{needed} blocks are needed")]
    Full {
        /// Blocks needed.
        needed: u64,
    },
    /// The target has this sequence, or a copy in doubt.
    #[error("the sequence exists here")]
    Exists,
    /// The manifest is invalid, or does not fit this pool.
    #[error("the manifest does not fit: {0}")]
    Manifest(Text),
    /// A part of a copy does not fit.
    #[error("{part} of the copy: {fault}")]
    Part {
        /// The part.
        part: Part,
        /// Its fault.
        fault: PartFault,
    },
    /// Cached blocks that were not asked for, or are no longer wanted.
    #[error("these blocks were not asked for")]
    NotAsked,
    /// The peer has too many migrations in progress.
    #[error("{max} migrations of this peer are under way")]
    Busy {
        /// Migrations permitted.
        max: u32,
    },
    /// The engine has not taken too many arrived sequences.
    #[error("{max} sequences wait for its engine")]
    Unread {
        /// Sequences permitted.
        max: u32,
    },
    /// The target accepts nothing now.
    #[error("the node takes no blocks: {0}")]
    Closed(Text),
}

/// Why a side gave up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum AbortReason {
    /// It was cancelled.
    #[error("it was cancelled")]
    Cancelled,
    /// The transfer deadline passed without renewal.
    #[error("the transfer deadline passed")]
    Lapsed,
    /// It took longer than permitted.
    #[error("it took too long")]
    Limit,
    /// The side has no such migration: it ended, or never began.
    #[error("the migration is unknown")]
    Unknown,
    /// Places were bad after the last attempt.
    #[error("{0} blocks have bad checksums")]
    Checksums(u64),
    /// The bytes could not be sent.
    #[error("the transfer failed: {0}")]
    Transfer(Text),
    /// The blocks could not be exported, verified or committed.
    #[error("{0}")]
    Local(Text),
    /// The peer violated the protocol.
    #[error("violation of the protocol: {0}")]
    Violation(Text),
    /// The peer has too many migrations in progress.
    #[error("{max} migrations of this peer are under way")]
    Busy {
        /// Migrations permitted.
        max: u32,
    },
    /// The fetch quota of the peer is used up.
    #[error("{asked} blocks are asked for, and {under_way} of {max} blocks of this peer are under way")]
    Quota {
        /// Blocks of this request.
        asked: u64,
        /// Blocks of other requests of the peer.
        under_way: u64,
        /// Blocks permitted.
        max: u64,
    },
    /// The source cleared its cache, which had the blocks.
    #[error("the cache of the source was cleared")]
    Cleared,
    /// Another part of the copy has ended.
    #[error("another part of the copy has ended: {0}")]
    OtherPart(Text),
}

/// Phase of a target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Phase {
    /// It asked for cached blocks.
    Asking,
    /// It is reserving blocks.
    Reserving,
    /// It waits for bytes.
    Receiving,
    /// It is comparing checksums.
    Verifying,
    /// All checksums are right.
    Ready,
    /// The source of this part has sent its commit; those of other parts have not.
    Agreed,
    /// It is committing.
    Committing,
    /// The copy is committed.
    Committed,
}

/// A message to a target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToTarget {
    /// Asks for blocks to be reserved.
    Prepare {
        /// Purpose.
        kind: Kind,
        /// Part of the copy; `None` for the whole copy.
        part: Option<Part>,
        /// Description of the copy.
        manifest: ManifestBytes,
    },
    /// The bytes of an attempt are written.
    Sent {
        /// The target's reservation.
        reservation: ReservationId,
        /// The attempt.
        attempt: Attempt,
    },
    /// The target may commit, once the sources of all parts have sent this.
    Commit {
        /// The target's reservation.
        reservation: ReservationId,
        /// Whether the source's cache was not cleared since the export; otherwise the blocks must
        /// not be found in the target's cache.
        is_current: bool,
    },
    /// This source will not commit.
    Abort {
        /// The target's reservation; `None` if unknown: any of this migration.
        reservation: Option<ReservationId>,
        /// Reason.
        reason: AbortReason,
    },
    /// Asks for the last answer again.
    Query {
        /// The target's reservation.
        reservation: ReservationId,
    },
    /// Renews the transfer deadline.
    Heartbeat {
        /// The target's reservation.
        reservation: ReservationId,
    },
    /// The source has received the commit.
    Forget {
        /// The target's reservation.
        reservation: ReservationId,
    },
}

/// A message to a source.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToSource {
    /// Asks a node to be the source of cached blocks.
    Fetch {
        /// Description of the blocks.
        what: FetchBytes,
    },
    /// Blocks are reserved.
    Prepared {
        /// Number of the reservation that begins.
        reservation: ReservationId,
        /// Places that the target has, or reserved a block for: for a sequence, all.
        accepted: Places,
        /// Those of them whose bytes are missing.
        missing: Places,
        /// Where to write them.
        grant: Grant,
    },
    /// Nothing is reserved.
    Refused {
        /// Reason.
        reason: Refusal,
        /// Blocks that are free or can be reclaimed.
        free: u64,
    },
    /// Checksums were compared.
    Verified {
        /// The target's reservation.
        reservation: ReservationId,
        /// The attempt.
        attempt: Attempt,
        /// Places with wrong bytes.
        bad: Places,
        /// Where to write them.
        grant: Grant,
    },
    /// Phase of a target that has no answer yet.
    Status {
        /// The target's reservation.
        reservation: ReservationId,
        /// Phase.
        phase: Phase,
    },
    /// The target has committed the copy.
    Committed {
        /// The target's reservation.
        reservation: ReservationId,
    },
    /// There was no commit in this reservation, and never will be.
    Aborted {
        /// The target's reservation.
        reservation: ReservationId,
        /// Reason.
        reason: AbortReason,
    },
}

/// A message to one of the sides.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Message {
    /// To the target.
    ToTarget(ToTarget),
    /// To the source.
    ToSource(ToSource),
}

/// A message with its address.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Envelope {
    /// The migration.
    pub id: MigrationId,
    /// Incarnation of the sender.
    pub from: Incarnation,
    /// Incarnation of the receiver, as far as the sender knows it.
    pub to: Incarnation,
    /// The message.
    pub message: Message,
}

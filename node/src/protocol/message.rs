//! Messages between the two sides of a migration.
//!
//! All of them are idempotent. Behind `Prepare`, a message names the reservation of the target that
//! it is about; a message about another reservation changes nothing.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::bounded::{Bytes, List, Text};
use super::places::{Places, RANGES_MAX, Range};

/// Bytes of the largest manifest.
pub const MANIFEST_BYTES_MAX: usize = 4 << 20;

/// Bytes of the largest description of cached blocks that are to be fetched.
pub const FETCH_BYTES_MAX: usize = 1 << 20;

/// Serialized manifest of an export; the protocol does not read it.
pub type ManifestBytes = Bytes<MANIFEST_BYTES_MAX>;

/// Serialized description of cached blocks; the protocol does not read it.
pub type FetchBytes = Bytes<FETCH_BYTES_MAX>;

/// Number of a migration: random, chosen by the node that was asked for it, never used twice.
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

/// Number of a reservation: chosen by the target, used once in its incarnation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct ReservationId(pub u64);

/// Number of times that bad places of a transfer were sent again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct Attempt(pub u8);

impl Attempt {
    /// The last one permitted: bad places are sent again at most twice.
    pub const LAST: Self = Self(2);

    /// Returns the next attempt, if it is permitted.
    pub fn next(self) -> Option<Self> {
        (self < Self::LAST).then_some(Self(self.0 + 1))
    }
}

/// Purpose of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kind {
    /// A sequence moves: the source closes its own once the target has committed.
    Migrate,
    /// A sequence is copied: the source's own goes on.
    Replicate,
    /// Cached blocks move: the source evicts its own once the target has committed.
    Cached,
    /// Cached blocks are copied to a node that asked for them: the source keeps its own.
    Fetch,
}

impl Kind {
    /// Returns whether exactly one side may go on with the copy.
    ///
    /// Only such a transfer can be in doubt: otherwise the source keeps its own whatever the target
    /// did.
    pub fn is_exclusive(self) -> bool {
        self == Self::Migrate
    }

    /// Returns whether cached blocks are transferred: to lose them costs nothing but a second transfer.
    pub fn is_of_cache(self) -> bool {
        matches!(self, Self::Cached | Self::Fetch)
    }
}

/// Parts of the largest copy.
pub const PARTS_MAX: u16 = 256;

/// Part of a copy that a source has, where several sources feed one target.
///
/// The parts of a copy have the same [`MigrationId`]. A part holds some heads of every block.
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

/// Fault of a part, for which its target refuses it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum PartFault {
    /// Its number is not below the number of parts, or there are too many.
    #[error("it does not exist, or there are more than {PARTS_MAX}")]
    Number,
    /// Only sequences move in parts.
    #[error("cached blocks do not move in parts")]
    Cached,
    /// Another node sends the part.
    #[error("another node sends it")]
    Repeated,
    /// The copy has another number of parts, or another purpose.
    #[error("the others are of another number of parts, or for another purpose")]
    Disagrees,
    /// The copy is being committed without it.
    #[error("the copy is being committed")]
    Late,
    /// The target does not know which heads it has itself.
    #[error("the node was not told which heads it has")]
    HeadsUnknown,
    /// It is the last one, and heads of the target are in no part.
    #[error("no part has {missing} of the node's {heads} heads")]
    HeadsMissing {
        /// Heads that no part has.
        missing: u32,
        /// Heads of the target.
        heads: u32,
    },
    /// The target has too little memory for the bytes of a part until they are checked: all blocks
    /// of the part that it lacks at once.
    #[error("{needed} bytes are needed until they are checked, and {free} are free")]
    Staging {
        /// Bytes needed.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
}

/// Permission to write the bytes of places, for the transport.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Grant {
    /// Number of the transport; the node knows its meaning.
    pub way: u8,
    /// Number of the transport's grant.
    pub tag: u64,
    /// Number of the target's storage at its transport.
    pub region: u32,
    /// Frames of the places, in the order of the places.
    pub runs: List<Range, RANGES_MAX>,
}

/// Reason for which a target refused.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Too few blocks are free or can be reclaimed.
    #[error("{needed} blocks are needed")]
    Full {
        /// Blocks needed.
        needed: u64,
    },
    /// The target has this sequence, or a copy of it that is in doubt.
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
    /// Cached blocks that were not asked for, or not any more.
    #[error("these blocks were not asked for")]
    NotAsked,
    /// The peer has too many migrations under way.
    #[error("{max} migrations of this peer are under way")]
    Busy {
        /// Migrations permitted.
        max: u32,
    },
    /// Too many sequences that arrived were not taken by the engine.
    #[error("{max} sequences wait for its engine")]
    Unread {
        /// Sequences permitted.
        max: u32,
    },
    /// The target takes nothing now.
    #[error("the node takes no blocks: {0}")]
    Closed(Text),
}

/// Reason for which a side gave up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum AbortReason {
    /// It was cancelled there.
    #[error("it was cancelled")]
    Cancelled,
    /// The transfer deadline passed without being renewed.
    #[error("the transfer deadline passed")]
    Lapsed,
    /// It took longer than permitted.
    #[error("it took too long")]
    Limit,
    /// The side has no such migration: it has ended, or never began.
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
    /// The peer did what the protocol does not permit.
    #[error("violation of the protocol: {0}")]
    Violation(Text),
    /// The peer has too many migrations under way.
    #[error("{max} migrations of this peer are under way")]
    Busy {
        /// Migrations permitted.
        max: u32,
    },
    /// The source sends the peer as many cached blocks as it may at a time.
    #[error("{asked} blocks are asked for, and {under_way} of {max} blocks of this peer are under way")]
    Quota {
        /// Blocks of this request.
        asked: u64,
        /// Blocks of other requests of the peer.
        under_way: u64,
        /// Blocks permitted.
        max: u64,
    },
    /// The source cleared its cache, of which the blocks were.
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
    /// It reserves blocks.
    Reserving,
    /// It waits for bytes.
    Receiving,
    /// It compares checksums.
    Verifying,
    /// All checksums are right.
    Ready,
    /// The source of this part has said its commit; those of other parts have not.
    Agreed,
    /// It makes the copy its own.
    Committing,
    /// The copy is its own.
    Committed,
}

/// A message to a target.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum ToTarget {
    /// Asks for blocks to be reserved.
    Prepare {
        /// Purpose.
        kind: Kind,
        /// Part of the copy; `None` for all of it.
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
    /// The copy is the target's, once the sources of all of its parts have said so.
    Commit {
        /// The target's reservation.
        reservation: ReservationId,
        /// Whether the source's cache was not cleared since the copy was exported: otherwise its
        /// blocks must not be found in the target's cache.
        is_current: bool,
    },
    /// There will be no commit by this source.
    Abort {
        /// The target's reservation; `None` if it is not known, for any of this migration.
        reservation: Option<ReservationId>,
        /// Reason.
        reason: AbortReason,
    },
    /// Asks for the last answer.
    Query {
        /// The target's reservation.
        reservation: ReservationId,
    },
    /// Renews the transfer deadline.
    Heartbeat {
        /// The target's reservation.
        reservation: ReservationId,
    },
    /// The source has heard of the commit.
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
        /// Places that the target has, or reserved a block for: all of a sequence.
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
    /// The copy is the target's.
    Committed {
        /// The target's reservation.
        reservation: ReservationId,
    },
    /// There was no commit in this reservation, and there will be none.
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

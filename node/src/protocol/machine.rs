//! What both machines take and return.

use smallvec::SmallVec;

use super::bounded::Text;
use super::copies::{CopyEvent, CopyPart};
use super::message::{AbortReason, Attempt, FetchBytes, Grant, ManifestBytes, Refusal};
use super::outcome::Outcome;
use super::places::Places;

/// An event for a machine that receives messages `M`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event<M> {
    /// A message of the peer.
    Message(M),
    /// Work of this node is done.
    Done(Work),
    /// The link is up, and the peer's process is the one that it was.
    LinkUp,
    /// The link was lost.
    LinkLost,
    /// The peer's process has ended, and all that it had in memory is gone.
    PeerEnded,
    /// The node cancels the migration.
    Cancel,
    /// Of a source: the cache was cleared since the export.
    Cleared,
    /// Of the target of a part: what the other parts do.
    Copy(CopyEvent),
    /// Time has passed.
    Tick,
}

/// Result of a [`Task`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Work {
    /// The copy is exported and does not run.
    Exported(ManifestBytes),
    /// There is nothing to export, or it cannot be exported.
    ExportFailed(Text),
    /// The peer asked for more blocks than it may at this time; the reason says so.
    ExportRefused(AbortReason),
    /// The bytes of an attempt are written.
    Transferred(Attempt),
    /// The bytes of an attempt were not written, or it is not known if they were.
    TransferFailed(Attempt, Text),
    /// Blocks are reserved.
    Reserved {
        /// Places that this node has, or reserved a block for.
        accepted: Places,
        /// Those of them whose bytes are missing.
        missing: Places,
        /// Where to write them.
        grant: Grant,
    },
    /// Nothing is reserved.
    ReserveRefused {
        /// Reason.
        reason: Refusal,
        /// Blocks that are free or can be reclaimed.
        free: u64,
    },
    /// Checksums were compared.
    Verified {
        /// The attempt.
        attempt: Attempt,
        /// Places with wrong bytes.
        bad: Places,
        /// Where to write these places.
        grant: Grant,
    },
    /// Checksums could not be compared.
    VerifyFailed(Text),
    /// The copy is this node's own.
    Committed {
        /// The number that the sequence has here; `None` for cached blocks.
        sequence: Option<u64>,
    },
    /// The copy could not be made this node's own; it is gone.
    CommitFailed(Text),
}

/// Work for the node.
///
/// Each of the first six but `Retain` is answered by one [`Work`]. The others end what the machine had: nothing is
/// answered, and a task of the machine that is still under way is given up, now or when its result
/// comes.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Task {
    /// Source: export the copy. For a peer's request, `what` describes the cached blocks.
    Export {
        /// Description of cached blocks, if a peer asked for them.
        what: Option<FetchBytes>,
    },
    /// Source: of cached blocks, keep those at these places in the export, and return the others to
    /// the cache: the target has no room for them. Not answered.
    Retain(Places),
    /// Source: write the bytes of these places.
    Transfer {
        /// The attempt.
        attempt: Attempt,
        /// Places to send.
        places: Places,
        /// Where to write them.
        grant: Grant,
    },
    /// Target: check the manifest, reserve blocks, and permit the peer to write the missing ones.
    /// Blocks are reserved once for all parts of a copy.
    Reserve {
        /// Description of the copy, or of the part.
        manifest: ManifestBytes,
        /// The part, if it is one.
        part: Option<CopyPart>,
    },
    /// Target: end the grant, compare all checksums that are not known to be right, and permit the
    /// peer to write the bad places again.
    Verify(Attempt),
    /// Target: make the copy this node's own, with all of its parts.
    Commit {
        /// Whether its blocks may be found in the cache from now on.
        is_current: bool,
    },
    /// Source: the target has the copy. Close, keep or evict this one, as the kind says.
    Finish,
    /// Source: stop a transfer under way, and go on with the copy as before the export.
    Restore,
    /// Target: end the grant and free what was reserved.
    Release,
}

/// What a machine that sends messages `M` wants done, in order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action<M> {
    /// Send a message to the peer. It may be lost.
    Send(M),
    /// Do some work.
    Do(Task),
    /// Report an outcome.
    Report {
        /// The outcome.
        outcome: Outcome,
        /// Blocks whose checksums were wrong, over all attempts.
        bad_blocks: u64,
    },
}

/// Actions of one event, in order.
pub type Actions<M> = SmallVec<[Action<M>; 4]>;

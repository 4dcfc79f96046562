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
    /// Work of this node has finished.
    Done(Work),
    /// The link is up, to the same process of the peer.
    LinkUp,
    /// The link was lost.
    LinkLost,
    /// The peer's process has ended, and its memory is gone.
    PeerEnded,
    /// The node cancels the migration.
    Cancel,
    /// For a source: the cache was cleared since the export.
    Cleared,
    /// For the target of a part: an event of the other parts.
    Copy(CopyEvent),
    /// Time has passed.
    Tick,
}

/// Result of a [`Task`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Work {
    /// The copy is exported and stopped.
    Exported(ManifestBytes),
    /// There is nothing to export, or the export failed.
    ExportFailed(Text),
    /// The peer asked for more blocks than it may at this time.
    ExportRefused(AbortReason),
    /// The bytes of an attempt are written.
    Transferred(Attempt),
    /// The bytes of an attempt were not written, or may not have been.
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
    /// The copy is committed.
    Committed {
        /// Id of the sequence here; `None` for cached blocks.
        sequence: Option<u64>,
    },
    /// The commit failed; the copy is gone.
    CommitFailed(Text),
}

/// Work for the node.
///
/// Each of the first six but `Retain` is answered by one [`Work`]. The others end what the machine
/// had: they have no answer, and stop a task of the machine that is still running, now or when its
/// result arrives.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Task {
    /// Source: export the copy, or the cached blocks that a peer asks for in `what`.
    Export {
        /// Description of the cached blocks.
        what: Option<FetchBytes>,
    },
    /// Source: keep these places of cached blocks in the export, and return the others to the
    /// cache, because the target has no room for them. Not answered.
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
    /// All parts of a copy share one reservation of blocks.
    Reserve {
        /// Description of the copy, or of the part.
        manifest: ManifestBytes,
        /// The part, if it is one.
        part: Option<CopyPart>,
    },
    /// Target: end the grant, compare all checksums that are not verified yet, and permit the peer
    /// to write the bad places again.
    Verify(Attempt),
    /// Target: commit the copy with all of its parts.
    Commit {
        /// Whether its blocks may be found in the cache.
        is_current: bool,
    },
    /// Source: the target has the copy. Close, keep or evict the local one, as the kind says.
    Finish,
    /// Source: stop a running transfer, and continue with the copy as before the export.
    Restore,
    /// Target: end the grant and free what was reserved.
    Release,
}

/// An output of a machine that sends messages `M`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action<M> {
    /// Send a message to the peer. It may be lost.
    Send(M),
    /// Run a task.
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

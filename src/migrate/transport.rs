//! How bytes of blocks get from the frames of one pool into those of another.
//!
//! A [`Transport`] writes frames of this process into frames of a peer: by a copy within the
//! process, over a socket, or by remote direct memory access. It knows frames and runs of frames,
//! but neither blocks nor sequences.
//!
//! # One transfer
//!
//! ```text
//!   target                              source
//!   grant(tag, runs, hold)
//!        |---- tag and runs, by another way ---->|
//!                                        submit(write, local runs, remote runs, tag, hold)
//!        |<=============== bytes ================|
//!                                        poll -> Done | Failed | Quarantined
//!   revoke(tag) -> Done | Quarantined
//! ```
//!
//! # States of a transfer
//!
//! | state | may bytes still be read or written? | next |
//! |---|---|---|
//! | in flight | yes | done, failed, quarantined |
//! | done | no; all of them arrived | - |
//! | failed | no | - |
//! | quarantined | yes: the transport has lost track of it | failed, once it is known to be over, or the transport is gone |
//!
//! # Invariant
//!
//! ```text
//! a transport drops the hold of a transfer, or of a grant, only in a state in which no byte of it can be
//! read or written any more
//! ```
//!
//! The hold owns the references on the blocks. Frames of a quarantined transfer are therefore not
//! reused, however long it takes; a late write of a peer cannot reach another owner's block.

use std::any::Any;
use std::sync::Arc;
use std::task::Waker;
use std::time::Instant;

use crate::ids::Run;
use crate::storage::Storage;

/// What keeps the frames of a transfer from being reused; dropped when the transfer is over.
pub type Hold = Arc<dyn Any + Send + Sync>;

/// Number of a storage that was registered with a transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct RegionId(pub u32);

/// Number of a peer that was added to a transport.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PeerId(pub u32);

/// Number of a submitted transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct TransferId(pub u64);

/// Number by which both ends name the same grant; chosen by the target, never used twice.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Tag(pub u64);

/// Direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Operation {
    /// From local frames to frames of the peer.
    Write,
    /// From frames of the peer to local frames. Not every transport can.
    Read,
}

/// A transfer to be submitted.
///
/// Both lists of runs have the same number of frames; the first local frame corresponds to the
/// first remote one, and so on.
pub struct Submission {
    /// Its direction.
    pub operation: Operation,
    /// The registered storage whose frames `local` are.
    pub region: RegionId,
    /// The peer.
    pub peer: PeerId,
    /// Frames of this process.
    pub local: Vec<Run>,
    /// Frames of the peer, all within the grant.
    pub remote: Vec<Run>,
    /// The peer's grant.
    pub tag: Tag,
    /// Keeps the local frames.
    pub hold: Hold,
}

/// Permission for a peer to write frames.
pub struct Grant {
    /// Its number.
    pub tag: Tag,
    /// The registered storage whose frames `runs` are.
    pub region: RegionId,
    /// The frames.
    pub runs: Vec<Run>,
    /// The only peer that may write them.
    pub peer: PeerId,
    /// Keeps the frames.
    pub hold: Hold,
}

/// State of a transfer; see the [module](self).
#[derive(Debug)]
#[non_exhaustive]
pub enum TransferState {
    /// Bytes are on their way.
    InFlight,
    /// All bytes arrived.
    Done,
    /// It is over, and not all bytes arrived.
    Failed(TransportError),
    /// It is not known to be over. Its frames stay with the transport.
    Quarantined(TransportError),
}

/// Reason for which a transport refused or failed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The transport is not available in this process.
    #[error("transport {name} is not available: {reason}")]
    Unavailable {
        /// Name of the transport.
        name: &'static str,
        /// What is missing.
        reason: String,
    },
    /// The peer cannot be reached, or the connection to it was lost.
    #[error("peer {peer} is gone: {reason}")]
    PeerGone {
        /// The peer.
        peer: String,
        /// What the connection reported.
        reason: String,
    },
    /// The peer made no progress until the deadline.
    #[error("peer {peer} made no progress for {waited_ms} ms")]
    Stalled {
        /// The peer.
        peer: String,
        /// Time without progress in milliseconds.
        waited_ms: u64,
    },
    /// A number names no registered storage, peer, grant or transfer.
    #[error("{what} {number} is unknown to the transport")]
    Unknown {
        /// What the number names.
        what: &'static str,
        /// The number.
        number: u64,
    },
    /// The lists of a submission have different numbers of frames, or are empty.
    #[error("{local} local and {remote} remote frames cannot be transferred into each other")]
    FramesDiffer {
        /// Frames of the local runs.
        local: usize,
        /// Frames of the remote runs.
        remote: usize,
    },
    /// A run is outside of the registered storage, or of the grant.
    #[error("frames {start}..{end} are outside of {of}")]
    OutOfRange {
        /// First frame of the run.
        start: u64,
        /// Frame behind its last one.
        end: u64,
        /// What it is outside of.
        of: &'static str,
    },
    /// The transport, or the storage, cannot do this.
    #[error("transport {name} cannot {what}")]
    Unsupported {
        /// Name of the transport.
        name: &'static str,
        /// What was asked for.
        what: String,
    },
    /// A storage failed to read or write its frames.
    #[error("the storage failed: {0}")]
    Storage(String),
    /// The peer's metadata cannot be read, or are those of an incompatible version.
    #[error("the peer's metadata are invalid: {0}")]
    Metadata(String),
    /// A limit that holds for each peer is reached.
    #[error("{asked} more {what} are refused: {used} of {max} are in use")]
    Quota {
        /// What is limited.
        what: &'static str,
        /// Amount asked for.
        asked: u64,
        /// Amount in use.
        used: u64,
        /// The limit.
        max: u64,
    },
    /// The transfer, or the grant, was given up.
    #[error("it was given up")]
    Cancelled,
    /// The transport is being stopped.
    #[error("the transport is closed")]
    Closed,
}

/// Writes frames of this process into frames of peers.
///
/// No method blocks, except as it says: the bytes move on threads or tasks of the transport, or by
/// the hardware. Every transfer ends or becomes quarantined by a deadline of the transport.
pub trait Transport: Send + Sync {
    /// Returns a short name for reports: `process`, `tcp`, `nixl`.
    fn name(&self) -> &'static str;

    /// Makes the frames of a storage available for transfers. May block.
    ///
    /// # Errors
    /// [`TransportError::Unsupported`] for memory that the transport cannot reach.
    fn register(&self, storage: &Arc<dyn Storage>) -> Result<RegionId, TransportError>;

    /// Returns what a peer needs to know to reach this end: at most 64 KiB.
    fn metadata(&self) -> Vec<u8>;

    /// Adds a peer by its metadata. May block. Adding the same peer again returns the same number.
    ///
    /// # Errors
    /// [`TransportError::Metadata`], [`TransportError::PeerGone`].
    fn add_peer(&self, metadata: &[u8]) -> Result<PeerId, TransportError>;

    /// Forgets a peer: its transfers in flight fail, or are quarantined.
    fn remove_peer(&self, peer: PeerId);

    /// Permits a peer to write frames, until the grant is revoked.
    ///
    /// # Errors
    /// [`TransportError::Unknown`], [`TransportError::OutOfRange`]; the hold is dropped.
    ///
    /// # Safety
    /// While the hold lives, no other thread reads or writes the granted frames.
    unsafe fn grant(&self, grant: Grant) -> Result<(), TransportError>;

    /// Ends a grant.
    ///
    /// `Done` if no byte of it can arrive any more; its hold was dropped. `Quarantined` otherwise;
    /// the transport drops the hold as soon as that is certain. `Failed` for an unknown tag.
    fn revoke(&self, tag: Tag) -> TransferState;

    /// Begins a transfer.
    ///
    /// # Errors
    /// [`TransportError`]; the hold is dropped, and no byte was moved.
    ///
    /// # Safety
    /// While the hold lives, the local frames keep their bytes; for [`Operation::Read`], no other
    /// thread reads or writes them.
    unsafe fn submit(&self, submission: Submission) -> Result<TransferId, TransportError>;

    /// Returns the state of a transfer. Wakes `waker`, if given, when the state changes.
    ///
    /// `Failed` with [`TransportError::Unknown`] for a transfer that was already reported as done or
    /// failed.
    fn poll(&self, transfer: TransferId, waker: Option<&Waker>) -> TransferState;

    /// Gives up a transfer: it fails at once, or is quarantined.
    fn cancel(&self, transfer: TransferId) -> TransferState;

    /// Accepts no further submissions, and blocks until all transfers are over, or the deadline.
    ///
    /// Returns the number of transfers and grants that are not over.
    fn drain(&self, deadline: Instant) -> usize;
}

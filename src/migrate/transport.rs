//! How bytes of blocks get from the frames of one pool into those of another process's.
//!
//! A [`Transport`] writes frames of this process into frames of a peer, over a socket or by remote
//! direct memory access. It knows frames and runs of frames, but neither blocks nor sequences.
//!
//! # One transfer
//!
//! ```text
//!   target                              source
//!   grant(tag, runs, hold)
//!        |---- tag and runs, by another way ---->|
//!                                        submit(local runs, remote runs, tag, hold)
//!        |<=============== bytes ================|
//!                                        poll -> Done | Failed | Quarantined
//!        |<------ done or failed, by another way ------|
//!   revoke(tag, over) -> Done | Quarantined
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

pub use crate::error::TransportError;
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

/// A transfer to be submitted, from local frames to as many of the peer, in order.
pub struct Submission {
    /// The registered storage whose frames `local` are.
    pub region: RegionId,
    /// The peer.
    pub peer: PeerId,
    /// The peer's storage whose frames `remote` are.
    pub remote_region: RegionId,
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

/// What a target knows of the transfers into a grant that it revokes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SourceState {
    /// The source reported that each of its transfers into the grant is done or failed.
    Over,
    /// A transfer may be in flight.
    Unknown,
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

/// Writes frames of this process into frames of peers. Methods do not block unless documented:
/// threads or tasks of the transport, the hardware, or [`submit`](Self::submit) move the bytes.
/// Every transfer ends or becomes quarantined by a deadline of the transport.
pub trait Transport: Send + Sync {
    /// Returns a short name for reports: `tcp`, `nixl`.
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

    /// Removes a peer: its transfers in flight fail, or are quarantined.
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
    /// `Done` if no byte of it can arrive any more; its hold was dropped. `Failed` for an unknown
    /// tag. Otherwise `Quarantined`: the transport drops the hold as soon as that is certain, by
    /// itself or when the grant is revoked again with [`SourceState::Over`]. A transport whose
    /// peers write to memory by themselves cannot know when they have ended; one that receives
    /// every byte itself needs no answer from the source.
    fn revoke(&self, tag: Tag, source: SourceState) -> TransferState;

    /// Begins a transfer. A transport without threads of its own moves the bytes here.
    ///
    /// # Errors
    /// [`TransportError`]; the hold is dropped, and no byte was moved.
    ///
    /// # Safety
    /// While the hold lives, the local frames keep their bytes.
    unsafe fn submit(&self, submission: Submission) -> Result<TransferId, TransportError>;

    /// Returns the state of a transfer. Wakes `waker`, if given, when the state changes. `Failed`
    /// with [`TransportError::Unknown`] for a transfer already reported as done or failed.
    fn poll(&self, transfer: TransferId, waker: Option<&Waker>) -> TransferState;

    /// Gives up a transfer: it fails at once, or is quarantined.
    fn cancel(&self, transfer: TransferId) -> TransferState;

    /// Accepts no further submissions, and blocks until all transfers are over, or the deadline.
    /// Returns the number of transfers and grants that are not over.
    fn drain(&self, deadline: Instant) -> usize;
}

use thiserror::Error;

use super::StorageError;

/// Reason why a transport refused a request, or failed.
#[derive(Clone, PartialEq, Debug, Error)]
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
    /// The two lists of a submission differ in their numbers of frames, or are empty.
    #[error("{local} local and {remote} remote frames cannot be transferred into each other")]
    FramesDiffer {
        /// Frames of the local runs.
        local: usize,
        /// Frames of the remote runs.
        remote: usize,
    },
    /// A run is outside the registered storage or the grant.
    #[error("frames {start}..{end} are outside of {of}")]
    OutOfRange {
        /// First frame of the run.
        start: u64,
        /// End of the run, exclusive.
        end: u64,
        /// The storage or grant.
        of: &'static str,
    },
    /// The transport or the storage does not support the operation.
    #[error("transport {name} cannot {what}")]
    Unsupported {
        /// Name of the transport.
        name: &'static str,
        /// The operation.
        what: String,
    },
    /// A storage failed to read or write its frames, as reported by a peer or the system.
    #[error("the storage failed: {0}")]
    Storage(String),
    /// A storage of this process failed to read or write its frames.
    #[error(transparent)]
    LocalStorage(#[from] StorageError),
    /// A storage panicked while reading or writing its frames.
    #[error("a storage panicked during a transfer")]
    Panicked,
    /// The peer's metadata cannot be read, or have an incompatible version.
    #[error("the peer's metadata are invalid: {0}")]
    Metadata(String),
    /// The limit per peer is reached.
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
    /// The transfer or the grant was cancelled.
    #[error("it was given up")]
    Cancelled,
    /// The transport is being stopped.
    #[error("the transport is closed")]
    Closed,
}

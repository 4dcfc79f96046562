use thiserror::Error;

use super::{AllocError, HandleError, Invalid, SequenceError, StorageError, TransportError};
use crate::ids::{PoolTag, SequenceId, Ticket};

/// Reason why a transfer failed. Both pools are unchanged, apart from evictions to make room.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The sequence does not belong to the source pool.
    #[error("sequence {id} does not belong to pool {pool}")]
    ForeignSequence {
        /// Id of the sequence.
        id: SequenceId,
        /// Pool asked to send it.
        pool: PoolTag,
    },
    /// A batch in flight writes to the sequence: the bytes may be incomplete.
    #[error("sequence {id} is written by batch {batch}, which is still in flight")]
    BeingWritten {
        /// Id of the sequence.
        id: SequenceId,
        /// The batch; the newest one if there are several.
        batch: Ticket,
    },
    /// The pool was built without storage: it has no bytes to send or receive.
    #[error("pool {pool} was built without storage")]
    NoStorage {
        /// Tag of the pool.
        pool: PoolTag,
    },
    /// The pool was built without a prefix cache.
    #[error("pool {pool} has no prefix cache")]
    NoCache {
        /// Tag of the pool.
        pool: PoolTag,
    },
    /// The destination could not allocate blocks.
    #[error("no room: {0}")]
    Alloc(#[from] AllocError),
    /// The sequence cannot be opened in the destination pool.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// A block has the maximum number of references.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The block formats of the two pools differ, or a copy failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// An argument or a manifest is invalid: it contradicts itself, or its blocks do not fit.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The transport failed.
    #[error(transparent)]
    Transport(TransportError),
    /// Blocks have not arrived, or were not verified.
    #[error("{missing} blocks have not arrived, or were not verified")]
    Incomplete {
        /// Number of these blocks.
        missing: usize,
    },
    /// The bytes of a block do not match its checksum.
    #[error("the bytes of block {place} do not have the manifest's checksum")]
    Checksum {
        /// Place of the block in the manifest.
        place: u32,
    },
    /// A transport may still read or write the blocks.
    #[error("a transport still has {holds} holds on the blocks")]
    InTransfer {
        /// Number of holds.
        holds: usize,
    },
    /// The block was computed in this pool before its cache was cleared, and was sent back.
    #[error("block {place} was computed here, before the cache was cleared")]
    Stale {
        /// Place of the block in the manifest.
        place: u32,
    },
    /// The pool knows no node of this name.
    #[error("no node is known as {name}")]
    UnknownNode {
        /// The name.
        name: String,
    },
    /// The other node refused the transfer, or was lost.
    #[error("node {node}: {reason}")]
    Node {
        /// Name of the node.
        node: String,
        /// What it reported.
        reason: String,
    },
    /// The other node's blocks have another layout, so none can move between the two.
    #[error("node {node}: its blocks have another layout")]
    OtherLayout {
        /// Name of the node.
        node: String,
    },
    /// The other node was told to commit and has not answered: it may have the sequence.
    ///
    /// The sequence returned with this error must not continue until it is certain that the other
    /// node has not committed, for example because its process has ended.
    #[error("node {node} may have the sequence: {reason}")]
    InDoubt {
        /// Why its answer is no longer awaited.
        node: String,
        /// Why its answer is not awaited any longer.
        reason: String,
    },
    /// The pool already belongs to a node.
    #[error("pool {pool} belongs to a node already")]
    HasNodes {
        /// Tag of the pool.
        pool: PoolTag,
    },
    /// The transfer did not complete: the runtime stopped, or a storage panicked.
    #[error("the transfer was dropped: its runtime stopped, or a storage panicked")]
    Dropped,
}

impl TransferError {
    /// Returns whether the transfer was refused before anything was copied.
    pub(crate) fn is_refusal(&self) -> bool {
        use TransferError::*;
        match self {
            Storage(error) => matches!(error, StorageError::OtherForm { .. }),
            Transport(_) | Node { .. } | InDoubt { .. } | Dropped | Incomplete { .. } | Checksum { .. } => {
                false
            }
            _ => true,
        }
    }
}

impl From<TransportError> for TransferError {
    /// Keeps a failure of a local storage as a storage error.
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::LocalStorage(error) => Self::Storage(error),
            TransportError::Panicked => Self::Dropped,
            error => Self::Transport(error),
        }
    }
}

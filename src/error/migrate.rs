//! Errors of the migrate floor.

use thiserror::Error;

use super::{AllocError, HandleError, PrefixError, SequenceError, StorageError};
use crate::ids::{PoolTag, SequenceId, Ticket};

/// Reason why a transfer failed. Both pools are unchanged, except that cached blocks may have been
/// evicted to make room.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// Source and destination are the same pool.
    #[error("pool {pool} cannot send blocks to itself")]
    SamePool {
        /// Tag of the pool.
        pool: PoolTag,
    },
    /// The sequence does not belong to the source pool.
    #[error("sequence {id} does not belong to pool {pool}")]
    ForeignSequence {
        /// Id of the sequence.
        id: SequenceId,
        /// Pool asked to send it.
        pool: PoolTag,
    },
    /// A batch that writes to the sequence is in flight: the bytes may be incomplete.
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
    /// The prefix caches hash differently: a block cached in one is never found in the other.
    #[error(
        "the prefix caches of pools {from} and {to} hash differently; configure the same hashing and key for both"
    )]
    OtherHashing {
        /// Source pool.
        from: PoolTag,
        /// Destination pool.
        to: PoolTag,
    },
    /// The destination could not allocate blocks.
    #[error("no room: {0}")]
    Alloc(#[from] AllocError),
    /// The sequence cannot be opened in the destination pool.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// The keys of a prefix are invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// A block has the maximum number of references.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The block formats of the two pools differ, or a copy failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The transfer did not complete: the runtime stopped, or a storage panicked.
    #[error("the transfer was dropped: its runtime stopped, or a storage panicked")]
    Dropped,
}

//! What the migrate floor refuses.

use thiserror::Error;

use super::{AllocError, HandleError, PrefixError, SequenceError, StorageError};
use crate::ids::{PoolTag, SequenceId, Ticket};

/// Why blocks did not go to another pool. Both pools are as they were, but for cached blocks that were evicted to make room.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// Both are the same pool.
    #[error("pool {pool} is asked to send blocks to itself")]
    SamePool {
        /// The pool.
        pool: PoolTag,
    },
    /// The sequence is of another pool than the one that was asked to send it.
    #[error("sequence {id} belongs to another pool than {pool}")]
    ForeignSequence {
        /// The sequence.
        id: SequenceId,
        /// The pool that was asked.
        pool: PoolTag,
    },
    /// A batch that wrote to the sequence, or one that began before it, is in flight: the bytes may not be there yet.
    #[error("sequence {id} is written by batch {batch}, which has not ended, or one before it has not")]
    BeingWritten {
        /// The sequence.
        id: SequenceId,
        /// The newest batch that wrote to it.
        batch: Ticket,
    },
    /// The pool was built without storage, so that there are no bytes to be sent or received.
    #[error("pool {pool} keeps no bytes: it was built without storage")]
    NoStorage {
        /// The pool.
        pool: PoolTag,
    },
    /// The pool was built without a prefix cache.
    #[error("pool {pool} has no prefix cache")]
    NoCache {
        /// The pool.
        pool: PoolTag,
    },
    /// The prefix caches hash differently, so that what is cached in one is never found in the other.
    #[error(
        "the prefix caches of pools {from} and {to} hash differently: give both the same hashing and key"
    )]
    OtherHashing {
        /// The pool that was to send.
        from: PoolTag,
        /// The pool that was to receive.
        to: PoolTag,
    },
    /// There were no blocks to receive it.
    #[error("no room: {0}")]
    Alloc(#[from] AllocError),
    /// The sequence cannot be opened where it was to go.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// The keys of a prefix make no sense.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// A block has as many owners as it can.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The blocks of the two pools are of different form, or a copy failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// Nobody carried it to its end: the runtime stopped, or a storage panicked.
    #[error("the transfer was dropped: its runtime stopped, or a storage panicked")]
    Dropped,
}

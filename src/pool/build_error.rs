//! Why a pool could not be built.

use thiserror::Error;

use crate::error::{PrefixError, SizingError, StorageError};
use crate::storage::KvLayout;

/// Why a pool could not be built.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The number of blocks is missing or zero.
    #[error("a pool needs at least one block; call `blocks` or `sizing`")]
    NoBlocks,
    /// More blocks than a block word can address.
    #[error("{blocks} blocks requested; a pool holds at most {max}")]
    TooManyBlocks {
        /// Requested number of blocks, initial or maximal.
        blocks: usize,
        /// Maximum for any pool.
        max: usize,
    },
    /// The maximum size is below the initial size.
    #[error("the initial size of {blocks} blocks exceeds the maximum of {max}")]
    MaxBelowStart {
        /// Initial number of blocks.
        blocks: usize,
        /// Requested maximum.
        max: usize,
    },
    /// The reserve covers the whole pool, and leaves no block for requests that are not urgent.
    #[error("a reserve of {reserve} blocks must be smaller than the pool, which has {blocks}")]
    Reserve {
        /// Requested size of the reserve.
        reserve: usize,
        /// Initial number of blocks.
        blocks: usize,
    },
    /// The segment size is not a power of two, or is below one bitmap word.
    #[error("a segment of {frames} frames; it must be a power of two and at least {min}")]
    Segment {
        /// Requested frames per segment.
        frames: usize,
        /// Minimum.
        min: usize,
    },
    /// The magazine size is above the maximum.
    #[error("magazines of {blocks} blocks; the maximum is {max}")]
    Magazine {
        /// Requested blocks per magazine.
        blocks: usize,
        /// Maximum.
        max: usize,
    },
    /// Too many threads expected; each takes memory when the pool is built.
    #[error("{threads} threads expected; the maximum is {max}")]
    Threads {
        /// Requested number of threads.
        threads: usize,
        /// Maximum.
        max: usize,
    },
    /// A block holds more tokens than a sequence can have.
    #[error("blocks of {tokens} tokens; a sequence has at most {max}")]
    BlockTokens {
        /// Tokens per block in the layout.
        tokens: usize,
        /// Maximum number of tokens in a sequence.
        max: usize,
    },
    /// The order for fragmentation exceeds that of the largest possible pool.
    #[error("fragmentation order {order}; the maximum is {max}")]
    Order {
        /// Requested order.
        order: u8,
        /// Maximum.
        max: u8,
    },
    /// The given storage has another layout than the pool.
    #[error("the storage has layout {storage}, but the pool has {pool}")]
    OtherLayout {
        /// Layout of the storage.
        storage: Box<KvLayout>,
        /// Layout of the pool.
        pool: Box<KvLayout>,
    },
    /// The given storage has too few frames for the pool.
    #[error("the storage holds {storage} frames; the pool needs {frames}")]
    StorageTooSmall {
        /// Frames that the storage has, or can grow to.
        storage: usize,
        /// Frames that the pool needs, including the null block's.
        frames: usize,
    },
    /// The given storage has other references, perhaps from another pool. Two pools would hand out
    /// the same bytes.
    #[error("the storage has other references; a pool needs exclusive storage")]
    StorageShared,
    /// `zero_on_free` was set for a pool that has no storage.
    #[error("`zero_on_free` needs a pool with storage")]
    NothingToZero,
    /// The configuration of the prefix cache is invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// The sizing cannot be satisfied.
    #[error(transparent)]
    Sizing(#[from] SizingError),
    /// The storage could not be allocated.
    #[error(transparent)]
    Storage(#[from] StorageError),
}

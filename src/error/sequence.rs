//! What the sequence floor refuses.

use thiserror::Error;

use super::{AllocError, HandleError, PrefixError, StorageError};
use crate::ids::{BlockId, SequenceId};

/// Why a sequence or a batch refused. Nothing was changed.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum SequenceError {
    /// There were no blocks for the tokens.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A block could not be shared.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The storage refused.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The keys of a prefix, or its retention, make no sense.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// Tokens were announced behind final ones whose ids nobody gave.
    #[error("sequence {id} has final tokens whose ids are not known, from token {known} on")]
    TokensUnknown {
        /// The sequence.
        id: SequenceId,
        /// Tokens that are known.
        known: usize,
    },
    /// Tokens that were announced are not all appended, and others came with their ids: these belong behind them.
    #[error("sequence {id} has {length} tokens of {announced} that were announced; append the others first")]
    TokensAhead {
        /// The sequence.
        id: SequenceId,
        /// Tokens that it has.
        length: usize,
        /// Tokens that were announced.
        announced: usize,
    },
    /// A sequence of this id is open.
    #[error("sequence {id} is already open")]
    AlreadyOpen {
        /// The sequence.
        id: SequenceId,
    },
    /// Zero tokens were appended.
    #[error("asked to append zero tokens to sequence {id}")]
    ZeroTokens {
        /// The sequence.
        id: SequenceId,
    },
    /// The sequence would pass the length that a kernel's i32 can say.
    #[error("asked to append {asked} tokens to the {length} of sequence {id}; {max} is the most")]
    TooLong {
        /// The sequence.
        id: SequenceId,
        /// Tokens to append.
        asked: usize,
        /// Tokens that it has.
        length: usize,
        /// The most that it may have.
        max: usize,
    },
    /// More tokens were called final than there are.
    #[error("asked to commit {asked} tokens of sequence {id}, which has {length}")]
    CommitBeyondLength {
        /// The sequence.
        id: SequenceId,
        /// The length to commit.
        asked: usize,
        /// Tokens that it has.
        length: usize,
    },
    /// A sequence cannot be truncated to more than it has.
    #[error("asked to truncate sequence {id} to {asked} tokens; it has {length}")]
    TruncateBeyondLength {
        /// The sequence.
        id: SequenceId,
        /// The length to truncate to.
        asked: usize,
        /// Tokens that it has.
        length: usize,
    },
    /// A range of tokens that runs backwards, or past the end of the sequence.
    #[error("tokens {start}..{end} of sequence {id}, which has {length}")]
    TokensOutOfRange {
        /// The sequence.
        id: SequenceId,
        /// First token of the range.
        start: usize,
        /// The token after the last.
        end: usize,
        /// Tokens that the sequence has.
        length: usize,
    },
    /// A token's block must not be written: it is shared or sealed, or another batch is about to seal it.
    #[error("token {position} of sequence {id} cannot be stored: block {block} is shared or final")]
    NotWritable {
        /// The sequence.
        id: SequenceId,
        /// The first token that cannot be stored.
        position: usize,
        /// Its block.
        block: BlockId,
    },
    /// The batch and the sequence are of different pools.
    #[error("sequence {id} belongs to another pool than the batch")]
    ForeignSequence {
        /// The sequence.
        id: SequenceId,
    },
    /// The pool was built without storage, so that there are no bytes to store or load.
    #[error("the pool keeps no bytes: it was built without storage")]
    NoStorage,
}

//! Errors of the sequence floor.

use thiserror::Error;

use super::{AllocError, HandleError, PrefixError, StorageError};
use crate::ids::{BlockId, SequenceId};

/// Reason why a [step](crate::Batch::step) failed. No sequence has changed.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The pool has too few blocks for the step.
    #[error("{} of the step's sequences lack blocks, the first is {}: {error}", sequences.len(), sequences[0])]
    Lacking {
        /// The sequences for which blocks were missing, in the order of the step.
        sequences: Vec<SequenceId>,
        /// The refusal of the first block that was missing.
        error: AllocError,
    },
    /// The tokens of one sequence were refused for another reason.
    #[error("sequence {id}: {error}")]
    Sequence {
        /// Id of the sequence.
        id: SequenceId,
        /// The reason.
        error: SequenceError,
    },
}

/// Reason why an operation of a sequence or batch failed. Nothing was changed.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum SequenceError {
    /// The pool could not allocate blocks for the tokens.
    #[error(transparent)]
    Alloc(#[from] AllocError),
    /// A block could not be shared.
    #[error(transparent)]
    Handle(#[from] HandleError),
    /// The storage refused the operation.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The keys of a prefix, or its retention, are invalid.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// Tokens were announced after final tokens with unknown ids.
    #[error("the ids of sequence {id}'s final tokens are unknown from token {known} on")]
    TokensUnknown {
        /// Id of the sequence.
        id: SequenceId,
        /// Number of known tokens.
        known: usize,
    },
    /// Tokens with ids were appended before all announced tokens were; append the announced ones
    /// first.
    #[error("sequence {id} has {length} of {announced} announced tokens; append the others first")]
    TokensAhead {
        /// Id of the sequence.
        id: SequenceId,
        /// Number of tokens in the sequence.
        length: usize,
        /// Number of tokens announced.
        announced: usize,
    },
    /// A sequence with this id is already open.
    #[error("sequence {id} is already open")]
    AlreadyOpen {
        /// Id of the sequence.
        id: SequenceId,
    },
    /// No sequence with this id is open: it was closed, or never opened.
    #[error("sequence {id} is not open")]
    NotOpen {
        /// Id of the sequence.
        id: SequenceId,
    },
    /// The request was to append zero tokens.
    #[error("cannot append zero tokens to sequence {id}")]
    ZeroTokens {
        /// Id of the sequence.
        id: SequenceId,
    },
    /// The sequence would exceed the maximum length, which kernels hold in an `i32`.
    #[error("cannot append {asked} tokens to the {length} of sequence {id}; the maximum is {max}")]
    TooLong {
        /// Id of the sequence.
        id: SequenceId,
        /// Number of tokens to append.
        asked: usize,
        /// Number of tokens in the sequence.
        length: usize,
        /// Maximum number of tokens.
        max: usize,
    },
    /// The length to commit exceeds the sequence's length.
    #[error("cannot commit {asked} tokens of sequence {id}, which has {length}")]
    CommitBeyondLength {
        /// Id of the sequence.
        id: SequenceId,
        /// Length to commit.
        asked: usize,
        /// Number of tokens in the sequence.
        length: usize,
    },
    /// The length to truncate to exceeds the sequence's length.
    #[error("cannot truncate sequence {id} to {asked} tokens; it has {length}")]
    TruncateBeyondLength {
        /// Id of the sequence.
        id: SequenceId,
        /// Length to truncate to.
        asked: usize,
        /// Number of tokens in the sequence.
        length: usize,
    },
    /// The token range is reversed, or extends past the end of the sequence.
    #[error("the token range {start}..{end} is invalid for sequence {id} of {length} tokens")]
    TokensOutOfRange {
        /// Id of the sequence.
        id: SequenceId,
        /// First token of the range.
        start: usize,
        /// Token after the last one of the range.
        end: usize,
        /// Number of tokens in the sequence.
        length: usize,
    },
    /// The token's block is not writable: it is shared or sealed, or another batch is about to seal
    /// it.
    #[error("token {position} of sequence {id} cannot be stored: block {block} is shared or sealed")]
    NotWritable {
        /// Id of the sequence.
        id: SequenceId,
        /// First token that cannot be stored.
        position: usize,
        /// Block of that token.
        block: BlockId,
    },
    /// The sequence has no block at this index.
    #[error("block index {index} is outside the {blocks} blocks of sequence {id}")]
    BlockOutOfRange {
        /// Id of the sequence.
        id: SequenceId,
        /// Index of the block in the sequence.
        index: usize,
        /// Number of blocks of the sequence.
        blocks: usize,
    },
    /// The block's bytes are not final, and the sequence does not own it alone.
    #[error("block {block} at index {index} of sequence {id} cannot be read in place: it is open and shared")]
    NotReadable {
        /// Id of the sequence.
        id: SequenceId,
        /// Index of the block in the sequence.
        index: usize,
        /// The block.
        block: BlockId,
    },
    /// The batch and the sequence belong to different pools.
    #[error("sequence {id} and the batch belong to different pools")]
    ForeignSequence {
        /// Id of the sequence.
        id: SequenceId,
    },
    /// The pool was built without storage: it has no bytes to store or load.
    #[error("the pool was built without storage")]
    NoStorage,
}

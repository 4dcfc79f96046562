use std::fmt::Display;

use thiserror::Error;

use super::{AllocError, HandleError, Invalid, PrefixError, StorageError, TenantError};
use crate::ids::{BlockId, SequenceId};

/// Reason why a [step](crate::Batch::step) failed. No sequence was changed.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum StepError {
    /// The pool, or the quota of a tenant, has too few blocks for the step.
    #[error("{} of the step's sequences lack blocks, the first is {}: {error}", sequences.len(), sequences[0])]
    Lacking {
        /// Sequences that lack blocks, in the order of the step.
        sequences: Vec<SequenceId>,
        /// Error of the first allocation that failed.
        error: AllocError,
    },
    /// The tokens of one sequence were refused for another reason.
    #[error("{}{error}", error.prefix(*id))]
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
    /// Its tenant is not one of the pool's; also of a sequence that comes from another pool.
    #[error(transparent)]
    Tenant(#[from] TenantError),
    /// A number of tokens, or an index, is invalid for the sequence.
    #[error("sequence {id}: {error}")]
    Invalid {
        /// Id of the sequence.
        id: SequenceId,
        /// The argument.
        error: Invalid,
    },
    /// Tokens were announced after final tokens whose ids are unknown.
    #[error("the ids of sequence {id}'s final tokens are unknown from token {known} on")]
    TokensUnknown {
        /// Id of the sequence.
        id: SequenceId,
        /// Number of known tokens.
        known: usize,
    },
    /// Tokens with ids were appended before all announced tokens; append the announced ones first.
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
    /// The token's block is not writable: shared, sealed, or about to be sealed by another batch.
    #[error("token {position} of sequence {id} cannot be stored: block {block} is shared or sealed")]
    NotWritable {
        /// Id of the sequence.
        id: SequenceId,
        /// First token that cannot be stored.
        position: usize,
        /// Block of that token.
        block: BlockId,
    },
    /// The block's bytes are not final, and the sequence is not its only owner.
    #[error("block {block} at index {index} of sequence {id} cannot be read in place: it is open and shared")]
    NotReadable {
        /// Id of the sequence.
        id: SequenceId,
        /// Index of the block in the sequence.
        index: usize,
        /// The block.
        block: BlockId,
    },
    /// The token has left the sequence's [window](crate::Window): its block was given up.
    #[error("token {position} of sequence {id} has left the window; tokens from {kept_from} on are kept")]
    BehindWindow {
        /// Id of the sequence.
        id: SequenceId,
        /// Position of the token.
        position: usize,
        /// First position behind the blocks that were given up.
        kept_from: usize,
    },
    /// A [state](crate::pool::PoolBuilder::states) is behind more tokens, and cannot be taken back.
    #[error("the states of sequence {id} are behind {tokens} tokens, and cannot be taken back to {asked}")]
    StateAhead {
        /// Id of the sequence.
        id: SequenceId,
        /// Number of tokens asked for.
        asked: usize,
        /// Number of tokens that the states were computed from.
        tokens: usize,
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

impl SequenceError {
    /// Returns the words that name the sequence, or nothing if the error's own text names it.
    fn prefix(&self, id: SequenceId) -> String {
        match self {
            Self::Alloc(_) | Self::Handle(_) | Self::Storage(_) | Self::Prefix(_) | Self::NoStorage => {
                format!("sequence {id}: ")
            }
            _ => String::new(),
        }
    }

    /// Returns the error for an invalid argument of a call on this sequence.
    #[cold]
    pub(crate) fn invalid(
        id: SequenceId,
        what: &'static str,
        got: impl Display,
        limit: impl Display,
    ) -> Self {
        Self::Invalid { id, error: Invalid::new(what, got, limit) }
    }
}

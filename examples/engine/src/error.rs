//! Errors of the engine.

use kvpool::{SequenceError, StepError, TransferError};
use thiserror::Error;

/// Why a request was refused. The engine is unchanged.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// A token of the prompt does not exist.
    #[error("token {token} of the prompt is out of range: the model has {vocab}")]
    Token {
        /// The token.
        token: u32,
        /// Number of tokens that exist.
        vocab: usize,
    },
    /// The request asks for no tokens, or for no answers, or for too many answers.
    #[error(
        "{tokens} tokens of {answers} answers requested; at least one of 1 to {answers_max} are possible"
    )]
    Nothing {
        /// Requested number of tokens per answer.
        tokens: usize,
        /// Requested number of answers.
        answers: u32,
        /// Maximum number of answers.
        answers_max: u32,
    },
    /// The prompt and the answer exceed what one sequence may have.
    #[error("a prompt of {prompt} tokens and {tokens} more exceed the maximum of {max}")]
    TooLong {
        /// Number of tokens of the prompt.
        prompt: usize,
        /// Number of tokens requested.
        tokens: usize,
        /// Maximum for both together.
        max: usize,
    },
    /// The engine is shutting down, or a worker has failed.
    #[error("the engine is closed")]
    Closed,
}

/// Why a worker stopped. The streams of all requests end then.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The pool refused an operation for another reason than a lack of blocks.
    #[error(transparent)]
    Sequence(#[from] SequenceError),
    /// The pool refused a decode step for another reason than a lack of blocks.
    #[error(transparent)]
    Decode(#[from] StepError),
    /// A sequence could not be moved to or from the host pool, for another reason than a lack of
    /// blocks.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// A worker panicked.
    #[error("a worker panicked")]
    Panicked,
}

//! Errors of stores.

use thiserror::Error;

/// Reason why a store did not do what it was asked for.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store cannot be reached, or the connection was lost.
    #[error("{store} cannot be reached: {reason}")]
    Unreachable {
        /// Kind of store.
        store: &'static str,
        /// What the system or the client reported.
        reason: String,
    },
    /// The store answered with an error.
    #[error("{store} refused: {reason}")]
    Refused {
        /// Kind of store.
        store: &'static str,
        /// What it answered.
        reason: String,
    },
    /// The store answered something else than was asked.
    #[error("{store} answered {reason}")]
    Answer {
        /// Kind of store.
        store: &'static str,
        /// What is wrong with the answer.
        reason: String,
    },
}

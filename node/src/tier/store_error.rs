use thiserror::Error;

/// Why a call of a store failed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store cannot be reached, or the connection was lost.
    #[error("{store} cannot be reached: {reason}")]
    Unreachable {
        /// Kind of store.
        store: &'static str,
        /// Error of the system or the client.
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
    /// The answer does not fit the command.
    #[error("{store} answered {reason}")]
    Answer {
        /// Kind of store.
        store: &'static str,
        /// What is wrong with the answer.
        reason: String,
    },
    /// The store found the value damaged, and has dropped it: the key is a miss.
    #[error("{store} found a value damaged, and dropped it")]
    Damaged {
        /// Kind of store.
        store: &'static str,
    },
}

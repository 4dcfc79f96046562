use std::path::PathBuf;

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
    /// The store did not take a value, by its settings: for example, it is full and has not seen
    /// the key before, or its write rate is used up.
    #[error("{store} declined a value: {reason}")]
    Declined {
        /// Kind of store.
        store: &'static str,
        /// Why.
        reason: &'static str,
    },
    /// The disk is full, and no other value could be replaced.
    #[error("{store}: no space is left on the disk for {}", path.display())]
    NoSpace {
        /// Kind of store.
        store: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The file system cannot be written.
    #[error("{store}: the file system of {} is read-only", path.display())]
    ReadOnly {
        /// Kind of store.
        store: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The drive failed.
    #[error("{store} cannot {operation} {}: {reason}", path.display())]
    Drive {
        /// Kind of store.
        store: &'static str,
        /// The operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        reason: String,
    },
}

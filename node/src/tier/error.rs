//! Errors of a tier's construction. Later failures are [outcomes](super::Outcome).

use kvpool::{PrefixError, TransferError};
use thiserror::Error;

use super::file_error::FileError;
use super::store_error::StoreError;

/// Why a tier cannot be used.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TierError {
    /// The namespace is empty.
    #[error("the namespace of a tier is empty: name the model and the revision of its weights")]
    Namespace,
    /// A setting is out of range.
    #[error("{what} of a tier is {value}; it is from 1 to {max}")]
    OutOfRange {
        /// Name of the setting.
        what: &'static str,
        /// Its value.
        value: usize,
        /// Largest value.
        max: usize,
    },
    /// The address of the store is not valid.
    #[error("`{address}` is no address of a {store} server: {reason}")]
    Address {
        /// Kind of store.
        store: &'static str,
        /// The address, without a password.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The store's client is not part of this build.
    #[error("{store}: this build lacks the feature `{feature}`")]
    NotBuilt {
        /// Kind of store.
        store: &'static str,
        /// Name of the feature.
        feature: &'static str,
    },
    /// The store's library cannot be loaded.
    #[error("{store}: {reason}")]
    Library {
        /// Kind of store.
        store: &'static str,
        /// Why, and the paths tried.
        reason: String,
    },
    /// The store did not do what it confirmed.
    #[error("{store} is not used: {reason}")]
    Probe {
        /// Kind of store.
        store: &'static str,
        /// What it did with a test value.
        reason: String,
    },
    /// The directory of a store cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The pool cannot send or receive cached blocks.
    #[error(transparent)]
    Pool(#[from] TransferError),
    /// The events of the pool cannot be followed.
    #[error(transparent)]
    Events(#[from] PrefixError),
    /// A thread could not be started.
    #[error("a thread of the tier cannot be started: {reason}")]
    Thread {
        /// The system's error.
        reason: String,
    },
}

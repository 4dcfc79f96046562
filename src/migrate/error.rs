//! The error of a migration, which returns the sequence.

use thiserror::Error;

use crate::error::TransferError;
use crate::sequence::{AnySequence, Sequence};

/// A migration that failed, with the sequence that was to be migrated.
#[derive(Debug, Error)]
#[error("sequence {} was not migrated: {error}", sequence.id())]
pub struct MigrateError<S: AnySequence = Sequence> {
    /// The cause.
    pub error: TransferError,
    /// The sequence, unchanged.
    pub sequence: Box<S>,
}

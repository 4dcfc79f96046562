//! A migration that did not happen, with what was to migrate.

use thiserror::Error;

use crate::error::TransferError;
use crate::sequence::Sequence;

/// Why a sequence stayed where it is.
#[derive(Debug, Error)]
#[error("sequence {} stays where it is: {error}", sequence.id())]
pub struct MigrateError {
    /// What was in the way.
    pub error: TransferError,
    /// The sequence, as it was.
    pub sequence: Box<Sequence>,
}

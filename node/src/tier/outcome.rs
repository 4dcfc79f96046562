use thiserror::Error;

use super::store_error::StoreError;
use super::value::ValueError;

/// Result of a key in one call.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// The store confirmed the put.
    Stored,
    /// The store did not take the value, by its settings. Not a failure: it is not worth a retry.
    Declined,
    /// The value was verified and written to its memory. For `exists`: the store claims to have it.
    Hit,
    /// The store does not have it.
    Miss,
    /// The store may have it or not, or has a wrong value. Equivalent to a miss.
    Failed(TierFailure),
    /// No answer by the deadline. A value that is just landing may still write its memory.
    InFlight,
}

/// Reason for an [`Outcome::Failed`].
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TierFailure {
    /// The circuit breaker is open.
    #[error("the circuit breaker of the tier is open")]
    Open,
    /// The queue is full; a put is dropped.
    #[error("the queue of the tier is full")]
    Busy,
    /// The deadline passed before the store was called.
    #[error("the deadline passed before the store was asked")]
    Late,
    /// The key failed recently, and is skipped.
    #[error("the key failed a short time ago")]
    Remembered,
    /// The tier has ended.
    #[error("the tier has ended")]
    Closed,
    /// The store panicked.
    #[error("the store panicked")]
    Panicked,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The store has a wrong value.
    #[error(transparent)]
    Value(#[from] ValueError),
}

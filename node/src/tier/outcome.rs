//! What became of a key in one call.

use thiserror::Error;

use super::store_error::StoreError;
use super::value::ValueError;

/// What became of a key in one call.
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Outcome {
    /// The store confirmed the put.
    Stored,
    /// The value was found, verified and written to its memory. Of `exists`: the store claims to have
    /// it, and a get is worth a try.
    Hit,
    /// The store does not have it.
    Miss,
    /// It is not known whether the store has it, or what it has is not the value. As good as a miss.
    Failed(TierFailure),
    /// The store has not answered by the deadline. The memory of a get may still be written; the tier
    /// keeps it until the store has answered.
    InFlight,
}

/// Reason of an [`Outcome::Failed`].
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum TierFailure {
    /// The store failed before, and is not asked for a while.
    #[error("the circuit breaker of the tier is open")]
    Open,
    /// The queue is full; a put is dropped.
    #[error("the queue of the tier is full")]
    Busy,
    /// The deadline passed before the store was asked.
    #[error("the deadline passed before the store was asked")]
    Late,
    /// The key failed a short time ago, and is not asked for.
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
    /// What the store has is not the value.
    #[error(transparent)]
    Value(#[from] ValueError),
}

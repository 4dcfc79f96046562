//! What a tier did.

use serde::{Deserialize, Serialize};

use super::breaker::BreakerState;

/// Counts since a tier began, and its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TierCounters {
    /// Values that the store confirmed.
    pub stored: u64,
    /// Values that were read and verified.
    pub hits: u64,
    /// Keys to be read that the store did not have.
    pub misses: u64,
    /// Keys whose operation failed, for any reason.
    pub failed: u64,
    /// Among them, keys whose value was not what its key says.
    pub bad_values: u64,
    /// Among them, keys that were not asked for, because they had failed before.
    pub remembered: u64,
    /// Keys that had no answer by the deadline of their call.
    pub overdue: u64,
    /// Values that were dropped because the queue was full.
    pub dropped_puts: u64,
    /// Keys that were looked up without being read.
    pub lookups: u64,
    /// Bytes of the values in `hits`.
    pub read_bytes: u64,
    /// Bytes of the values in `stored`.
    pub written_bytes: u64,
    /// Times that the circuit breaker opened.
    pub breaker_opened: u64,
    /// Keys of calls that the store has not answered now.
    pub in_flight: u64,
    /// State of the circuit breaker now.
    pub breaker: BreakerState,
}

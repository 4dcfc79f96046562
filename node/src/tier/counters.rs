use serde::{Deserialize, Serialize};

use super::breaker::BreakerState;

/// Counters since a tier began, and its state.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TierCounters {
    /// Values that the store confirmed.
    pub stored: u64,
    /// Values that were read and verified.
    pub hits: u64,
    /// Reads of keys that the store did not have.
    pub misses: u64,
    /// Keys whose operation failed for any reason.
    pub failed: u64,
    /// Values that were wrong: found here, of keys that failed, or by the store, of keys it missed.
    pub bad_values: u64,
    /// Of the keys that failed, those that were skipped because they had failed before.
    pub remembered: u64,
    /// Keys without an answer by the deadline of their call.
    pub overdue: u64,
    /// Values that the store declined by its settings.
    pub declined: u64,
    /// Values dropped because the queue was full.
    pub dropped_puts: u64,
    /// Keys looked up without a read.
    pub lookups: u64,
    /// Bytes of the values in `hits`.
    pub read_bytes: u64,
    /// Bytes of the values in `stored`.
    pub written_bytes: u64,
    /// Number of times the circuit breaker opened.
    pub breaker_opened: u64,
    /// Keys of calls in flight.
    pub in_flight: u64,
    /// Current state of the circuit breaker.
    pub breaker: BreakerState,
}

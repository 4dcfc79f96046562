//! What a tier did.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

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

/// The same, while they change.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) stored: AtomicU64,
    pub(super) hits: AtomicU64,
    pub(super) misses: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) bad_values: AtomicU64,
    pub(super) remembered: AtomicU64,
    pub(super) overdue: AtomicU64,
    pub(super) dropped_puts: AtomicU64,
    pub(super) lookups: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) written_bytes: AtomicU64,
    pub(super) in_flight: AtomicU64,
}

/// Adds to a counter.
pub(super) fn add(counter: &AtomicU64, count: usize) {
    // Relaxed: counters order nothing.
    counter.fetch_add(count as u64, Relaxed);
}

impl Counters {
    pub(super) fn read(&self, breaker: BreakerState, breaker_opened: u64) -> TierCounters {
        let of = |counter: &AtomicU64| counter.load(Relaxed);
        TierCounters {
            stored: of(&self.stored),
            hits: of(&self.hits),
            misses: of(&self.misses),
            failed: of(&self.failed),
            bad_values: of(&self.bad_values),
            remembered: of(&self.remembered),
            overdue: of(&self.overdue),
            dropped_puts: of(&self.dropped_puts),
            lookups: of(&self.lookups),
            read_bytes: of(&self.read_bytes),
            written_bytes: of(&self.written_bytes),
            in_flight: of(&self.in_flight),
            breaker_opened,
            breaker,
        }
    }
}

//! Settings of a tier's calls and memory of failures.

use std::time::{Duration, Instant};

use super::error::TierError;

/// The largest number of calls.
const CALLS_MAX: usize = 1024;

/// The longest time that is added to the present: 30 years.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

/// Returns the end of a time that begins now, however long it is.
pub(super) fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(FAR)
}

/// Settings of a [`SharedTier`](super::SharedTier).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TierSettings {
    /// Number of calls of the store at a time, at most 1,024, each over a connection of its own.
    /// Default 2.
    pub calls: usize,
    /// Number of values that may wait to be put; further ones are dropped. Default 64.
    pub puts_max: usize,
    /// Number of keys that may wait to be read or looked up; further ones fail. Default 16,384.
    pub reads_max: usize,
    /// Time after which a call of the store counts as failed, although it has not returned. Default 1 s.
    pub patience: Duration,
    /// Consecutive failures that open the circuit breaker. Default 3.
    pub failures: u32,
    /// Time for which the breaker stays open before the store is tried again. Default 5 s.
    pub rest: Duration,
    /// Number of failed keys that are remembered. Default 4,096.
    pub failed_keys: usize,
    /// Time for which a failed key is not asked for. Default 10 s.
    pub failed_for: Duration,
    /// Certificates (PEM) of the authorities of a server that [`connect`](super::connect) reaches
    /// by TLS. Default: those of the system.
    pub authorities: Option<Vec<u8>>,
}

impl Default for TierSettings {
    fn default() -> Self {
        Self {
            calls: 2,
            puts_max: 64,
            reads_max: 16_384,
            patience: Duration::from_secs(1),
            failures: 3,
            rest: Duration::from_secs(5),
            failed_keys: 4096,
            failed_for: Duration::from_secs(10),
            authorities: None,
        }
    }
}

impl TierSettings {
    /// Checks that the tier can work.
    pub(super) fn check(&self) -> Result<(), TierError> {
        let counts = [
            ("the number of calls", self.calls, CALLS_MAX),
            ("the number of waiting puts", self.puts_max, usize::MAX),
            ("the number of waiting reads", self.reads_max, usize::MAX),
            ("the number of failures", self.failures as usize, u32::MAX as usize),
        ];
        match counts.into_iter().find(|&(_, value, max)| !(1..=max).contains(&value)) {
            Some((what, value, max)) => Err(TierError::OutOfRange { what, value, max }),
            None => Ok(()),
        }
    }
}

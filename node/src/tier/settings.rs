use std::time::{Duration, Instant};

use super::error::TierError;

const CALLS_MAX: usize = 1024;

/// The longest duration that is added to the current time: 30 years.
pub(super) const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

/// Adds a duration to the current time, saturating at [`FAR`].
pub(super) fn after(now: Instant, time: Duration) -> Instant {
    now + time.min(FAR)
}

/// Settings of a [`SharedTier`](super::SharedTier).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct TierSettings {
    /// Concurrent calls of the store, each over its own connection; at most 1,024. Default 2.
    pub calls: usize,
    /// Values that may wait to be put; further ones are dropped. Default 64.
    pub puts_max: usize,
    /// Keys that may wait to be read or looked up; further ones fail. Default 16,384.
    pub reads_max: usize,
    /// Time after which a pending call of the store counts as failed. Default 1 s.
    pub patience: Duration,
    /// Consecutive failures that open the circuit breaker. Default 3.
    pub failures: u32,
    /// Time for which the breaker stays open before a trial. Default 5 s.
    pub rest: Duration,
    /// Capacity of the set of failed keys. Default 4,096.
    pub failed_keys: usize,
    /// Time for which a failed key is skipped. Default 10 s.
    pub failed_for: Duration,
    /// Authorities (PEM) of a server for [`connect`](super::connect). Default: the system's.
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

//! Times and deadlines. The protocol reads no clock: each event carries its time.

use serde::{Deserialize, Serialize};

/// Milliseconds since an origin that the node chose at its start. Monotonic.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
pub struct Millis(pub u64);

impl Millis {
    /// Returns the time this many milliseconds later.
    pub fn plus(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Returns the milliseconds since an earlier time.
    pub fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Durations of the protocol, in milliseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Timing {
    /// The transfer deadline: a side that receives nothing for so long gives up, or is in doubt.
    pub transfer_deadline_ms: u64,
    /// Time to the first repetition of a message; doubled each time, up to the renewal interval.
    pub retry_ms: u64,
    /// Limit of a migration's time before its commit, regardless of the peer.
    pub limit_ms: u64,
}

impl Timing {
    /// Returns the interval of renewals of the transfer deadline: a sixth of it.
    pub fn renew_ms(&self) -> u64 {
        (self.transfer_deadline_ms / 6).max(1)
    }
}

impl Default for Timing {
    /// Transfer deadlines of 30 s, repetitions after 1 s, a limit of 10 minutes.
    fn default() -> Self {
        Self { transfer_deadline_ms: 30_000, retry_ms: 1_000, limit_ms: 600_000 }
    }
}

/// Schedule of repetitions: at growing intervals, up to the renewal interval.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Repeat {
    at: Millis,
    interval_ms: u64,
}

impl Repeat {
    /// Begins with a short interval after the first message.
    pub(super) fn soon(now: Millis, timing: &Timing) -> Self {
        let interval_ms = timing.retry_ms.clamp(1, timing.renew_ms());
        Self { at: now.plus(interval_ms), interval_ms }
    }

    pub(super) fn renewing(now: Millis, timing: &Timing) -> Self {
        Self { at: now.plus(timing.renew_ms()), interval_ms: timing.renew_ms() }
    }

    pub(super) fn at(self) -> Millis {
        self.at
    }

    /// Returns whether a repetition is due; if so, schedules the next one.
    pub(super) fn is_due(&mut self, now: Millis, timing: &Timing) -> bool {
        if now < self.at {
            return false;
        }
        self.interval_ms = (self.interval_ms * 2).min(timing.renew_ms());
        self.at = now.plus(self.interval_ms);
        true
    }
}

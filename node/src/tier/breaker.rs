//! The circuit breaker of a tier.
//!
//! ```text
//! closed     --[failures in a row]-->  open  --[rest]-->  trying: one call  --[success]-->  closed
//!                                        ^                      |
//!                                        +------[failure]-------+
//! ```

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::settings::after;

/// State of a circuit breaker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BreakerState {
    /// The store is called.
    #[default]
    Closed,
    /// The store failed, and is not called for a while.
    Open,
    /// One trial call is in progress.
    Trying,
}

#[derive(Debug)]
pub(super) struct Breaker {
    state: BreakerState,
    failures_max: u32,
    rest: Duration,
    failures: u32,
    /// End of the rest, or of the trial.
    until: Instant,
    opened: u64,
}

impl Breaker {
    pub(super) fn new(failures_max: u32, rest: Duration, now: Instant) -> Self {
        Self { state: BreakerState::Closed, failures_max, rest, failures: 0, until: now, opened: 0 }
    }

    pub(super) fn state(&self) -> BreakerState {
        self.state
    }

    pub(super) fn opened(&self) -> u64 {
        self.opened
    }

    pub(super) fn admits(&mut self, now: Instant) -> bool {
        if self.state == BreakerState::Closed {
            return true;
        }
        if now < self.until {
            return false;
        }
        // Also after a trial that never ended.
        self.state = BreakerState::Trying;
        self.until = after(now, self.rest);
        true
    }

    /// Returns whether a call that proves nothing may be made: it is no trial.
    pub(super) fn admits_lookup(&self, now: Instant) -> bool {
        self.state == BreakerState::Closed || now >= self.until
    }

    /// Notes a call that proved nothing. If it was the trial, the next call is another one.
    pub(super) fn proved_nothing(&mut self, now: Instant) {
        if self.state == BreakerState::Trying {
            (self.state, self.until) = (BreakerState::Open, now);
        }
    }

    /// Notes a success. A late answer does not close an open breaker.
    pub(super) fn succeeded(&mut self) {
        if self.state != BreakerState::Open {
            (self.state, self.failures) = (BreakerState::Closed, 0);
        }
    }

    pub(super) fn failed(&mut self, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        let opens = match self.state {
            BreakerState::Closed => self.failures >= self.failures_max,
            BreakerState::Trying => true,
            BreakerState::Open => false,
        };
        if opens {
            self.open(now);
        }
    }

    /// Opens immediately: all calls of the store are stuck.
    pub(super) fn open(&mut self, now: Instant) {
        if self.state != BreakerState::Open {
            (self.state, self.until) = (BreakerState::Open, after(now, self.rest));
            self.opened += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REST: Duration = Duration::from_secs(5);

    fn opened(now: Instant) -> Breaker {
        let mut breaker = Breaker::new(3, REST, now);
        (0..3).for_each(|_| breaker.failed(now));
        assert_eq!((breaker.state(), breaker.opened()), (BreakerState::Open, 1));
        breaker
    }

    #[test]
    fn failures_in_a_row_open_it() {
        let now = Instant::now();
        let mut breaker = Breaker::new(3, REST, now);
        for _ in 0..10 {
            breaker.failed(now);
            breaker.failed(now);
            breaker.succeeded();
        }
        assert!(breaker.admits(now));
        assert!(!opened(now).admits(now));
    }

    #[test]
    fn one_call_tries_after_the_rest() {
        let now = Instant::now();
        let mut breaker = opened(now);
        breaker.succeeded();
        assert!(!breaker.admits(now + REST - Duration::from_millis(1)), "a late answer");
        assert!(breaker.admits(now + REST));
        assert!(!breaker.admits(now + REST), "a second call");
        breaker.failed(now + REST);
        assert!(!breaker.admits(now + REST * 2 - Duration::from_millis(1)));
        assert!(breaker.admits(now + REST * 2));
        breaker.succeeded();
        assert!(breaker.admits(now + REST * 2) && breaker.state() == BreakerState::Closed);
        breaker.failed(now);
        assert!(breaker.admits(now + REST * 2), "the count begins anew");
    }

    /// A store whose look-ups prove nothing.
    #[test]
    fn a_trial_that_proves_nothing_is_followed_by_another() {
        let now = Instant::now();
        let mut breaker = opened(now);
        assert!(!breaker.admits_lookup(now));
        assert!(breaker.admits_lookup(now + REST) && breaker.state() == BreakerState::Open);
        assert!(breaker.admits(now + REST) && !breaker.admits_lookup(now + REST));
        breaker.proved_nothing(now + REST);
        assert!(breaker.admits(now + REST) && !breaker.admits(now + REST));
        breaker.failed(now + REST);
        breaker.proved_nothing(now + REST);
        assert!(!breaker.admits(now + REST));
    }

    #[test]
    fn a_trial_that_never_ends_is_repeated() {
        let now = Instant::now();
        let mut breaker = opened(now);
        assert!(breaker.admits(now + REST));
        assert!(breaker.admits(now + REST * 2));
        assert_eq!(breaker.state(), BreakerState::Trying);
    }
}

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use super::key::TierKey;

/// A bounded set of keys that failed recently; the oldest is removed first.
#[derive(Debug)]
pub(super) struct FailedKeys {
    keys_max: usize,
    keep: Duration,
    failed: HashMap<TierKey, Instant>,
    /// In order; entries of keys that failed again, or were removed, are stale.
    order: VecDeque<(TierKey, Instant)>,
}

impl FailedKeys {
    pub(super) fn new(keys_max: usize, keep: Duration) -> Self {
        Self { keys_max, keep, failed: HashMap::new(), order: VecDeque::new() }
    }

    pub(super) fn note(&mut self, key: TierKey, now: Instant) {
        if self.keys_max == 0 {
            return;
        }
        while self.order.len() >= self.keys_max {
            let Some((oldest, at)) = self.order.pop_front() else { break };
            if self.failed.get(&oldest) == Some(&at) {
                self.failed.remove(&oldest);
            }
        }
        self.failed.insert(key, now);
        self.order.push_back((key, now));
    }

    pub(super) fn forget(&mut self, key: &TierKey) {
        self.failed.remove(key);
    }

    pub(super) fn has(&self, key: &TierKey, now: Instant) -> bool {
        self.failed.get(key).is_some_and(|&at| now.saturating_duration_since(at) < self.keep)
    }
}

#[cfg(test)]
mod tests {
    use kvpool::prefix::BlockHash;

    use super::super::key::Fingerprint;
    use super::*;

    fn key(hash: u128) -> TierKey {
        TierKey { fingerprint: Fingerprint::from_bytes([0; 16]), hash: BlockHash::new(hash, 0) }
    }

    #[test]
    fn keys_are_forgotten_in_time_by_number_and_by_a_success() {
        let (now, keep) = (Instant::now(), Duration::from_secs(10));
        let mut failed = FailedKeys::new(2, keep);
        failed.note(key(1), now);
        assert!(failed.has(&key(1), now) && !failed.has(&key(2), now));
        assert!(!failed.has(&key(1), now + keep));
        failed.note(key(2), now);
        failed.note(key(3), now);
        assert_eq!([1, 2, 3].map(|hash| failed.has(&key(hash), now)), [false, true, true]);
        failed.forget(&key(2));
        assert!(!failed.has(&key(2), now));
        let mut none = FailedKeys::new(0, keep);
        none.note(key(1), now);
        assert!(!none.has(&key(1), now));
    }

    #[test]
    fn a_key_that_fails_again_stays() {
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(5));
        let mut failed = FailedKeys::new(2, Duration::from_secs(10));
        failed.note(key(1), now);
        failed.note(key(1), later);
        failed.note(key(2), later);
        assert!(failed.has(&key(1), later) && failed.has(&key(2), later));
    }
}

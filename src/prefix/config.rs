//! How a prefix cache is built.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::error::PrefixError;

use super::cache::Now;
use super::policy::{Millis, Policy, PolicyKind};
use super::{EVENTS, HashKey, Hashing, PrefixHasher};

/// What a pool's prefix cache is to be like: LRU, [`Hashing::Fast`] with a random key, and the process's clock unless said
/// otherwise.
#[derive(Default)]
#[must_use]
pub struct PrefixConfig {
    policy: Chosen,
    hashing: Hashing,
    key: Option<HashKey>,
    now: Option<Now>,
    events: Option<usize>,
}

enum Chosen {
    Kind(PolicyKind),
    Given(Arc<dyn Policy>),
}

impl Default for Chosen {
    fn default() -> Self {
        Self::Kind(PolicyKind::default())
    }
}

/// What a cache is made of.
pub(super) struct Parts {
    pub(super) policy: Arc<dyn Policy>,
    /// What the policy said when it was asked for the number of its queues.
    pub(super) queues: usize,
    pub(super) hasher: PrefixHasher,
    pub(super) now: Now,
    pub(super) events: usize,
}

impl PrefixConfig {
    /// As a pool has it unless told otherwise.
    pub fn new() -> Self {
        Self::default()
    }

    /// Which evictable block goes first: one of the policies that there are.
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.policy = Chosen::Kind(policy);
        self
    }

    /// The same, by a policy of your own.
    pub fn policy_of(mut self, policy: Arc<dyn Policy>) -> Self {
        self.policy = Chosen::Given(policy);
        self
    }

    /// How tokens are hashed.
    pub fn hashing(mut self, hashing: Hashing) -> Self {
        self.hashing = hashing;
        self
    }

    /// The key of the hash. Processes with the same key compute the same hashes.
    pub fn key(mut self, key: HashKey) -> Self {
        self.key = Some(key);
        self
    }

    /// The time, in milliseconds from any moment on, for policies that learn from it and for retention.
    pub fn clock(mut self, now: impl Fn() -> Millis + Send + Sync + 'static) -> Self {
        self.now = Some(Box::new(now));
        self
    }

    /// Room for so many events that nobody has received yet; [`EVENTS`] unless given.
    pub fn events(mut self, capacity: usize) -> Self {
        self.events = Some(capacity);
        self
    }

    /// Returns the parts of a cache with blocks of `block_tokens` tokens.
    pub(super) fn parts(self, block_tokens: usize) -> Result<Parts, PrefixError> {
        let policy = match self.policy {
            Chosen::Kind(kind) => kind.build(),
            Chosen::Given(policy) => policy,
        };
        let queues = policy.queues();
        if queues == 0 || queues > super::policy::QUEUES_MAX {
            return Err(PrefixError::PolicyQueues { queues, max: super::policy::QUEUES_MAX });
        }
        let key = match self.key {
            Some(key) => key,
            None => HashKey::random()?,
        };
        let hasher = PrefixHasher::new(self.hashing, &key, block_tokens)?;
        let now = self.now.unwrap_or_else(|| {
            let began = Instant::now();
            Box::new(move || Millis(began.elapsed().as_millis() as u64))
        });
        Ok(Parts { policy, queues, hasher, now, events: self.events.unwrap_or(EVENTS) })
    }
}

impl fmt::Debug for PrefixConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policy = match &self.policy {
            Chosen::Kind(kind) => kind.name(),
            Chosen::Given(policy) => policy.name(),
        };
        f.debug_struct("PrefixConfig").field("policy", &policy).finish_non_exhaustive()
    }
}

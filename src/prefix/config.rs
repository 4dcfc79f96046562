//! Construction parameters of a prefix cache.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Invalid, PrefixError};

use super::policy::{Millis, Policy, PolicyKind};
use super::{EVENTS, HashKey, Hashing, PrefixHasher};

/// Clock used by policies and for retention.
pub type Now = Box<dyn Fn() -> Millis + Send + Sync>;

/// Configuration of a pool's prefix cache. Defaults: LRU with a [tolerance](Self::tolerance),
/// [`Hashing::Fast`] with a random key, and the process's monotonic clock.
#[derive(Default)]
#[must_use]
pub struct PrefixConfig {
    policy: Chosen,
    tolerance: Option<f64>,
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

/// Fewer runs per sequence, at hit rates that do not differ from LRU's.
const TOLERANCE: f64 = 0.05;

pub(super) struct CacheParts {
    pub(super) policy: Arc<dyn Policy>,
    pub(super) queues: usize,
    pub(super) tolerance: f64,
    pub(super) hasher: PrefixHasher,
    pub(super) now: Now,
    pub(super) events: usize,
}

impl PrefixConfig {
    /// Returns the default configuration.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the eviction policy to a built-in one.
    pub fn policy(mut self, policy: PolicyKind) -> Self {
        self.policy = Chosen::Kind(policy);
        self
    }

    /// Sets the eviction policy to a custom one.
    pub fn policy_of(mut self, policy: Arc<dyn Policy>) -> Self {
        self.policy = Chosen::Given(policy);
        self
    }

    /// Sets how early an eviction may occur in LRU's order, to complete a unit of 64 free frames,
    /// which gives sequences long runs. Default: 0.05; `docs/eviction.md` has the cost in hits.
    ///
    /// It is a share, from 0 to 1 (otherwise building the pool fails), of the releases between the
    /// block that LRU evicts next and the newest one: with 0.1, a block may be evicted early if at
    /// least nine tenths of them came after its own. Twice the share holds for the units beside a
    /// completed one, which follow as a whole. With 0, and for other policies, the order is exact.
    pub fn tolerance(mut self, share: f64) -> Self {
        self.tolerance = Some(share);
        self
    }

    /// Sets the function that hashes tokens.
    pub fn hashing(mut self, hashing: Hashing) -> Self {
        self.hashing = hashing;
        self
    }

    /// Sets the key of the hash. Processes with the same key compute the same hashes.
    pub fn key(mut self, key: HashKey) -> Self {
        self.key = Some(key);
        self
    }

    /// Sets the clock for learning policies and retention, in milliseconds from any origin.
    pub fn clock(mut self, now: impl Fn() -> Millis + Send + Sync + 'static) -> Self {
        self.now = Some(Box::new(now));
        self
    }

    /// Sets the number of events that subscribers can receive late. Default: [`EVENTS`].
    pub fn events(mut self, capacity: usize) -> Self {
        self.events = Some(capacity);
        self
    }

    pub(super) fn parts(self, block_tokens: usize) -> Result<CacheParts, PrefixError> {
        let policy = match self.policy {
            Chosen::Kind(kind) => kind.build(),
            Chosen::Given(policy) => policy,
        };
        let queues = policy.queues();
        if queues == 0 || queues > super::policy::QUEUES_MAX {
            let limit = format_args!("1 to {}", super::policy::QUEUES_MAX);
            return Err(Invalid::new("queues of the policy", queues, limit).into());
        }
        let tolerance = self.tolerance.unwrap_or(TOLERANCE);
        if !(0.0..=1.0).contains(&tolerance) {
            return Err(Invalid::new("eviction tolerance", tolerance, "a share from 0 to 1").into());
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
        let events = self.events.unwrap_or(EVENTS);
        Ok(CacheParts { policy, queues, tolerance, hasher, now, events })
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

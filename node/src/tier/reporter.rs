use std::sync::{Arc, Weak};

use serde_json::{Value, json};

use super::breaker::BreakerState;
use super::shared_tier::SharedTier;
use super::tiered::{Tiered, TieredCounters, TieredLink};
use crate::admin::{Failures, Reporter};
use crate::metrics::{self, Scrape};

/// Reports the counters of a tier, and of the pool that uses it, while they live.
#[derive(Debug)]
pub struct TierReporter {
    name: String,
    tier: Weak<SharedTier>,
    link: Option<Weak<TieredLink>>,
}

impl TierReporter {
    /// Creates a reporter; `name` identifies the tier in statistics and metrics.
    pub fn new(name: impl Into<String>, tiered: &Tiered) -> Self {
        Self { link: Some(tiered.downgrade()), ..Self::without_pool(name, tiered.tier()) }
    }

    /// Creates a reporter of a tier whose values are not those of a pool.
    pub fn without_pool(name: impl Into<String>, tier: &Arc<SharedTier>) -> Self {
        Self { name: name.into(), tier: Arc::downgrade(tier), link: None }
    }

    fn pool(&self) -> Option<TieredCounters> {
        Some(self.link.as_ref()?.upgrade()?.read_counters())
    }
}

impl Reporter for TierReporter {
    fn group(&self) -> &'static str {
        "tiers"
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// The fields of [`TierCounters`](super::TierCounters), and of
    /// [`TieredCounters`](super::TieredCounters) in the object `pool`.
    fn stats(&self) -> Option<Value> {
        let mut stats = json!(self.tier.upgrade()?.counters());
        if let Some(pool) = self.pool() {
            stats["pool"] = json!(pool);
        }
        Some(stats)
    }

    fn failures(&self) -> Option<Failures> {
        Some(self.tier.upgrade()?.failures().clone())
    }

    fn scrape(&self, scrape: &mut Scrape) {
        let Some(tier) = self.tier.upgrade() else { return };
        let (name, tier, pool) = (&*self.name, tier.counters(), self.pool().unwrap_or_default());
        for (outcome, keys) in [
            ("stored", tier.stored),
            ("hit", tier.hits),
            ("miss", tier.misses),
            ("failed", tier.failed),
            ("overdue", tier.overdue),
            ("dropped", tier.dropped_puts + pool.dropped_blocks),
        ] {
            scrape.count(&metrics::TIER_KEYS, &[name, outcome], keys);
        }
        for (direction, bytes) in [("read", tier.read_bytes), ("written", tier.written_bytes)] {
            scrape.count(&metrics::TIER_BYTES, &[name, direction], bytes);
        }
        scrape.count(&metrics::TIER_BAD_VALUES, &[name], tier.bad_values);
        scrape.count(&metrics::TIER_IN_FLIGHT, &[name], tier.in_flight);
        scrape.count(&metrics::TIER_BREAKER_OPENED, &[name], tier.breaker_opened);
        let is_up = tier.breaker != BreakerState::Open;
        scrape.count(&metrics::TIER_UP, &[name], is_up.into());
        scrape.count(&metrics::TIER_FETCHED, &[name], pool.fetched_blocks);
    }
}

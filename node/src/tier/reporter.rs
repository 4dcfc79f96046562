use std::sync::Weak;

use serde_json::{Value, json};

use super::breaker::BreakerState;
use super::tiered::{Tiered, TieredLink};
use crate::admin::{Failures, Reporter};
use crate::metrics::{self, Scrape};

/// Reports the counters of a pool with a tier, while it lives.
#[derive(Debug)]
pub struct TierReporter {
    name: String,
    link: Weak<TieredLink>,
}

impl TierReporter {
    /// Creates a reporter; `name` identifies the tier in statistics and metrics.
    pub fn new(name: impl Into<String>, tiered: &Tiered) -> Self {
        Self { name: name.into(), link: tiered.downgrade() }
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
        let link = self.link.upgrade()?;
        let mut stats = json!(link.tier.counters());
        stats["pool"] = json!(link.read_counters());
        Some(stats)
    }

    fn failures(&self) -> Option<Failures> {
        Some(self.link.upgrade()?.tier.failures().clone())
    }

    fn scrape(&self, scrape: &mut Scrape) {
        let Some(link) = self.link.upgrade() else { return };
        let (name, tier, pool) = (&*self.name, link.tier.counters(), link.read_counters());
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

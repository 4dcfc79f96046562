use std::sync::{Arc, Weak};
use std::time::Instant;

use kvpool::hints::Rejection;
use kvpool::transfer::PromptBlocks;
use serde_json::{Value, json};

use super::breaker::BreakerState;
use super::shared_tier::SharedTier;
use super::tiered::{Tiered, TieredCounters, TieredLink};
use crate::admin::{Failures, Fetching, Reporter};
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

    /// The fields of [`TierCounters`](super::TierCounters), of
    /// [`TieredCounters`](super::TieredCounters) in the object `pool`, and, if the store is in this
    /// process, of [`StoreCounters`](super::StoreCounters) in the object `store`.
    fn stats(&self) -> Option<Value> {
        let tier = self.tier.upgrade()?;
        let mut stats = json!(tier.counters());
        if let Some(store) = tier.store_counters() {
            stats["store"] = json!(store);
        }
        if let Some(pool) = self.pool() {
            stats["pool"] = json!(pool);
        }
        Some(stats)
    }

    fn prefetch(&self, blocks: &PromptBlocks, deadline: Instant) -> Result<Fetching, Rejection> {
        let link = self.link.as_ref().and_then(Weak::upgrade).ok_or(Rejection::NoTier)?;
        let (place, blocks) = (link.place_in_line()?, blocks.clone());
        Ok(Box::pin(async move { link.prefetch(&blocks, deadline, place).await }))
    }

    fn failures(&self) -> Option<Failures> {
        Some(self.tier.upgrade()?.failures().clone())
    }

    fn scrape(&self, scrape: &mut Scrape) {
        let Some(tier) = self.tier.upgrade() else { return };
        let (name, store, pool) = (&*self.name, tier.store_counters(), self.pool().unwrap_or_default());
        let tier = tier.counters();
        for (outcome, keys) in [
            ("stored", tier.stored),
            ("hit", tier.hits),
            ("miss", tier.misses),
            ("failed", tier.failed),
            ("overdue", tier.overdue),
            ("declined", tier.declined),
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
        let Some(store) = store else { return };
        for (state, slots) in [("used", store.used_slots), ("free", store.slots - store.used_slots)] {
            scrape.count(&metrics::TIER_SLOTS, &[name, state], slots);
        }
        scrape.count(&metrics::TIER_EVICTED, &[name], store.evictions);
        scrape.count(&metrics::TIER_DRIVE_WRITTEN, &[name], store.written_bytes);
        scrape.count(&metrics::TIER_DAMAGED_SLOTS, &[name], store.damaged_slots);
        scrape.count(&metrics::TIER_DISK_FULL, &[name], store.is_disk_full.into());
    }
}

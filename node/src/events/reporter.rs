use std::sync::Weak;

use serde_json::{Value, json};

use super::publisher::{KvEventPublisher, Publication};
use crate::admin::{Failures, Reporter};
use crate::metrics::{self, Scrape};

/// Reports the counters of a [`KvEventPublisher`], while it lives.
#[derive(Debug)]
pub struct KvEventReporter {
    name: String,
    publication: Weak<Publication>,
}

impl KvEventReporter {
    /// Creates a reporter; `name` identifies the publisher in statistics.
    pub fn new(name: impl Into<String>, publisher: &KvEventPublisher) -> Self {
        Self { name: name.into(), publication: publisher.downgrade() }
    }
}

impl Reporter for KvEventReporter {
    fn group(&self) -> &'static str {
        "kv_events"
    }

    fn name(&self) -> &str {
        &self.name
    }

    /// The fields of [`KvEventCounters`](super::KvEventCounters).
    fn stats(&self) -> Option<Value> {
        Some(json!(self.publication.upgrade()?.counters()))
    }

    fn failures(&self) -> Option<Failures> {
        Some(self.publication.upgrade()?.failures())
    }

    fn scrape(&self, scrape: &mut Scrape) {
        let Some(publication) = self.publication.upgrade() else { return };
        let counters = publication.counters();
        scrape.count(&metrics::EVENT_BATCHES, &[], counters.batches);
        scrape.count(&metrics::EVENT_SUBSCRIBERS, &[], counters.subscribers);
        scrape.count(&metrics::EVENTS_SKIPPED, &[], counters.skipped_batches);
        scrape.count(&metrics::EVENT_RESYNCS, &[], counters.resyncs);
        scrape.count(&metrics::EVENT_REPLAYS, &[], counters.replays);
    }
}

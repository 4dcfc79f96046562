use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvpool::SequenceId;
use kvpool::compact::Snapshot;
use serde_json::{Map, Value, json};

use super::error::NodeError;
use super::operator::Operator;
use super::status::PeerStatus;
use crate::admin::{
    Admin, AdminError, Answer, AuditOutcome, DefragOutcome, EndedOrder, EndedOutcome, Health, MigrateOrder,
    MigrationList, MigrationRecord, NotReady, OwnersReport, PoolAdmin, Readiness, ResizeOrder, ResizeOutcome,
    StatsReport, TrimOrder, TrimOutcome,
};
use crate::hints::{HintsAnswer, HintsEnvelope};
use crate::metrics::{self, Scrape};
use crate::settings::Address;
use crate::topology::{Peer, PeerLink, TopologyReport};

/// Time for which an order waits for a sequence that is in a step of the engine.
const OFFER_PATIENCE: Duration = Duration::from_secs(2);

/// Polling interval for it.
const OFFER_POLL: Duration = Duration::from_millis(2);

/// A node behind an admin interface. Its statistics have two more entries: `node`, the node's
/// [counters](super::NodeCounters), and `peers`, the state of each peer.
pub(super) struct NodeAdmin {
    operator: Operator,
    pool: PoolAdmin,
}

impl NodeAdmin {
    pub(super) fn new(operator: Operator, pool: PoolAdmin) -> Self {
        Self { operator, pool }
    }

    /// Reports from now on that the node is ending, and refuses requests that change anything.
    pub(super) fn drain(&self) {
        self.pool.drain();
    }

    async fn extra(&self) -> Result<Map<String, Value>, NodeError> {
        let (status, links) = (self.operator.status().await?, self.links().await?);
        let mut counters = json!(self.operator.counters());
        counters["peers_up"] = links.iter().filter(|link| link.is_up).count().into();
        counters["oldest_doubt_s"] = status.oldest_doubt_s().into();
        counters["quarantined_grants"] = status.quarantined_grants.into();
        let mut extra = Map::from_iter([("node".to_owned(), counters)]);
        if !links.is_empty() {
            let peers = links.into_iter().map(|link| {
                let state = if link.is_up { "up" } else { "down" };
                let reason = link.reason.map_or(String::new(), |reason| format!(": {reason}"));
                (link.name, format!("{state}{reason}").into())
            });
            extra.insert("peers".to_owned(), Map::from_iter(peers).into());
        }
        Ok(extra)
    }

    async fn add_counters(&self, scrape: &mut Scrape) -> Result<(), NodeError> {
        let counters = self.operator.counters();
        let status = self.operator.status().await?;
        for (outcome, count) in [
            ("sent", counters.sent),
            ("received", counters.received),
            ("refused", counters.refused),
            ("failed", counters.failed),
        ] {
            scrape.count(&metrics::NODE_MIGRATIONS, &[outcome], count);
        }
        scrape.count(&metrics::SENT_BYTES, &[], counters.sent_bytes);
        scrape.count(&metrics::GRANTED_BYTES, &[], counters.granted_bytes);
        scrape.count(&metrics::BAD_BLOCKS, &[], counters.bad_blocks);
        scrape.count(&metrics::DAMAGED_BLOCKS, &[], counters.damaged_blocks);
        scrape.count(&metrics::IN_DOUBT, &[], counters.in_doubt);
        scrape.number(&metrics::OLDEST_DOUBT, &[], status.oldest_doubt_s());
        scrape.count(&metrics::DROPPED_MESSAGES, &[], counters.dropped_messages);
        scrape.count(&metrics::QUARANTINES, &[], counters.quarantined_transfers);
        scrape.count(&metrics::QUARANTINED_GRANTS, &[], status.quarantined_grants as u64);
        let mut running = BTreeMap::<_, u64>::new();
        for record in status.migrations {
            if !record.has_ended() {
                *running.entry((word(&record.side), word(&record.state))).or_default() += 1;
            }
        }
        for ((side, state), count) in running {
            scrape.count(&metrics::MIGRATIONS, &[&side, &state], count);
        }
        for link in self.links().await? {
            scrape.count(&metrics::PEER_UP, &[&link.name], u64::from(link.is_up));
        }
        Ok(())
    }

    /// Returns the links to all peers that are configured or were ever linked, by name.
    async fn links(&self) -> Result<Vec<PeerLink>, NodeError> {
        let peers = self.operator.status().await?.peers;
        let mut reasons = BTreeMap::from_iter(self.operator.unreached());
        let mut links = BTreeMap::new();
        for (name, address) in self.operator.peer_addresses() {
            links.insert(name, (Some(address.to_string()), false));
        }
        for PeerStatus { name, is_up, note } in peers {
            if is_up || note.is_some() {
                reasons.remove(&name);
            }
            reasons.extend(note.map(|note| (name.clone(), note)));
            links.entry(name).or_insert((None, false)).1 = is_up;
        }
        let link = |(name, (address, is_up)): (String, (Option<String>, bool))| {
            let reason = reasons.remove(&name);
            PeerLink::new(name, address, is_up, reason)
        };
        Ok(links.into_iter().map(link).collect())
    }

    /// Begins a migration; waits while the sequence is in a step of the engine.
    async fn begin(&self, id: SequenceId, to: &str) -> Result<MigrationRecord, AdminError> {
        let asked = Instant::now();
        loop {
            if self.operator.pool.view(id).is_none() {
                return Err(AdminError::NotFound(format!("there is no sequence {}", id.0)));
            }
            match self.operator.migrate(id, to).await {
                Err(NodeError::NotOffered { .. }) if asked.elapsed() < OFFER_PATIENCE => {
                    tokio::time::sleep(OFFER_POLL).await;
                }
                result => return Ok(result?),
            }
        }
    }
}

impl From<NodeError> for AdminError {
    fn from(error: NodeError) -> Self {
        let text = error.to_string();
        match error {
            NodeError::UnknownPeer { .. } => Self::NotFound(text),
            NodeError::NotOffered { .. } | NodeError::NotBegun { .. } | NodeError::PeerLives { .. } => {
                Self::Conflict(text)
            }
            NodeError::Stopped => Self::Unavailable(text),
            _ => Self::Failed(text),
        }
    }
}

impl Admin for NodeAdmin {
    fn health(&self) -> Health {
        self.pool.health()
    }

    fn ready(&self) -> Readiness {
        let mut readiness = self.pool.ready();
        if !self.operator.has_tried_peers() {
            readiness.reasons.push(NotReady::PeersNotTried);
            readiness.ready = false;
        }
        readiness
    }

    fn snapshot(&self) -> Answer<'_, Snapshot> {
        self.pool.snapshot()
    }

    fn owners(&self, limit: usize) -> Answer<'_, OwnersReport> {
        self.pool.owners(limit)
    }

    fn peers(&self) -> Answer<'_, Vec<PeerLink>> {
        Box::pin(async { Ok(self.links().await?) })
    }

    fn topology(&self) -> Answer<'_, TopologyReport> {
        Box::pin(async {
            let links = self.links().await?;
            let mut machine = self.pool.topology().await?.machine;
            let nixl = self.operator.status().await?.nixl_peers;
            let peer = |link: &PeerLink| {
                let peer = Peer::new(&link.name, &link.address.as_ref()?.parse::<Address>().ok()?);
                Some(Peer { rdma: nixl.contains(&link.name), ..peer })
            };
            machine.peers = links.iter().filter_map(peer).collect();
            Ok(TopologyReport { links, ..TopologyReport::of(machine) })
        })
    }

    fn scrape(&self) -> Answer<'_, Scrape> {
        Box::pin(async {
            let mut scrape = self.pool.scrape().await?;
            match self.add_counters(&mut scrape).await {
                // The pool lives as long as the process.
                Ok(()) | Err(NodeError::Stopped) => Ok(scrape),
                Err(error) => Err(error.into()),
            }
        })
    }

    fn hints(&self, envelope: HintsEnvelope) -> Answer<'_, HintsAnswer> {
        self.pool.hints(envelope)
    }

    fn trim(&self, order: TrimOrder) -> Answer<'_, TrimOutcome> {
        self.pool.trim(order)
    }

    fn stats(&self) -> Answer<'_, StatsReport> {
        Box::pin(async {
            let mut report = self.pool.stats().await?;
            match self.extra().await {
                Ok(extra) => report.extra.extend(extra),
                // The pool lives as long as the process.
                Err(NodeError::Stopped) => {}
                Err(error) => return Err(error.into()),
            }
            Ok(report)
        })
    }

    fn migrations(&self) -> Answer<'_, MigrationList> {
        Box::pin(async { Ok(MigrationList { migrations: self.operator.status().await?.migrations }) })
    }

    fn defragment(&self) -> Answer<'_, DefragOutcome> {
        self.pool.defragment()
    }

    fn resize(&self, order: ResizeOrder) -> Answer<'_, ResizeOutcome> {
        self.pool.resize(order)
    }

    fn migrate(&self, order: MigrateOrder) -> Answer<'_, MigrationRecord> {
        Box::pin(async move {
            self.pool.check_serving()?;
            self.begin(SequenceId(order.sequence), &order.to).await
        })
    }

    /// Also while the node is ending, which a doubt delays.
    fn declare_ended(&self, order: EndedOrder) -> Answer<'_, EndedOutcome> {
        Box::pin(async move {
            let sequences = self.operator.declare_ended(&order.peer).await?;
            Ok(EndedOutcome { peer: order.peer, sequences })
        })
    }

    fn audit(&self) -> Answer<'_, AuditOutcome> {
        self.pool.audit()
    }
}

fn word(value: &impl serde::Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

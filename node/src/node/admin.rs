//! The admin interface of a node: that of its pool, with peers and migrations.

use std::time::{Duration, Instant};

use kvpool::SequenceId;
use serde_json::{Map, Value, json};

use super::error::NodeError;
use super::operator::Operator;
use crate::admin::{
    Admin, AdminError, Answer, AuditOutcome, DefragOutcome, Health, MigrateOrder, MigrationList,
    MigrationRecord, PoolAdmin, ResizeOrder, ResizeOutcome, StatsReport,
};

/// Time for which an order waits for a sequence that is in a step of the engine.
const OFFER_PATIENCE: Duration = Duration::from_secs(2);

/// Time between two questions for it.
const OFFER_POLL: Duration = Duration::from_millis(2);

/// A node behind an admin interface.
///
/// Its statistics have two more entries: `node`, the node's [counters](super::NodeCounters), and
/// `peers`, the state of each peer.
pub(super) struct NodeAdmin {
    operator: Operator,
    pool: PoolAdmin,
}

impl NodeAdmin {
    /// Creates the admin interface of a node from that of its pool.
    pub(super) fn new(operator: Operator, pool: PoolAdmin) -> Self {
        Self { operator, pool }
    }

    /// States from now on that the node ends. Requests that change anything are refused.
    pub(super) fn drain(&self) {
        self.pool.drain();
    }

    /// Returns the counters of the node and the state of its peers, by name.
    async fn extra(&self) -> Result<Map<String, Value>, NodeError> {
        let (mut peers, mut links_up) = (Map::new(), 0);
        for (name, reason) in self.operator.unreached() {
            peers.insert(name, format!("down: {reason}").into());
        }
        let status = self.operator.status().await?;
        for (name, is_up) in status.peers {
            links_up += usize::from(is_up);
            if is_up {
                peers.insert(name, "up".into());
            } else {
                peers.entry(name).or_insert("down".into());
            }
        }
        let mut counters = json!(self.operator.counters());
        counters["peers_up"] = links_up.into();
        counters["quarantined_grants"] = status.quarantined_grants.into();
        let mut extra = Map::from_iter([("node".to_owned(), counters)]);
        if !peers.is_empty() {
            extra.insert("peers".to_owned(), peers.into());
        }
        Ok(extra)
    }

    /// Begins a migration; waits while the engine has the sequence in a step.
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
            NodeError::NotOffered { .. } | NodeError::NotBegun { .. } => Self::Conflict(text),
            NodeError::Stopped => Self::Unavailable(text),
            _ => Self::Failed(text),
        }
    }
}

impl Admin for NodeAdmin {
    fn health(&self) -> Health {
        self.pool.health()
    }

    fn stats(&self) -> Answer<'_, StatsReport> {
        Box::pin(async {
            let mut report = self.pool.stats().await?;
            match self.extra().await {
                Ok(extra) => report.extra.extend(extra),
                // The pool is there until the process ends.
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

    fn audit(&self) -> Answer<'_, AuditOutcome> {
        self.pool.audit()
    }
}

//! What an operator can request of a node. It does not keep the node alive.

use std::collections::HashSet;
use std::sync::{Arc, Weak};
use std::time::Duration;

use kvpool::{Pool, SequenceId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use super::dialers::Dialers;
use super::driver::Input;
use super::error::NodeError;
use super::offload::{self, AnyOffers};
use super::status::{Counters, NodeCounters, NodeStatus};
use crate::admin::{MigrationRecord, MigrationSide};
use crate::transport::tcp::Address;

/// Polling interval for a requested migration to begin.
const BEGIN_POLL: Duration = Duration::from_millis(1);

#[derive(Clone)]
pub(super) struct Operator {
    pub(super) pool: Pool,
    pub(super) inputs: mpsc::WeakSender<Input>,
    pub(super) counters: Arc<Counters>,
    pub(super) dialers: Weak<Mutex<Dialers>>,
    pub(super) offers: Option<Arc<AnyOffers>>,
}

impl Operator {
    pub(super) fn counters(&self) -> NodeCounters {
        self.counters.count(|counters| *counters)
    }

    pub(super) async fn tell(&self, input: Input) -> Result<(), NodeError> {
        let inputs = self.inputs.upgrade().ok_or(NodeError::Stopped)?;
        inputs.send(input).await.map_err(|_| NodeError::Stopped)
    }

    pub(super) async fn status(&self) -> Result<NodeStatus, NodeError> {
        let (answer, answered) = oneshot::channel();
        self.tell(Input::Status(answer)).await?;
        answered.await.map_err(|_| NodeError::Stopped)
    }

    pub(super) async fn declare_ended(&self, peer: &str) -> Result<Vec<u64>, NodeError> {
        let (answer, answered) = oneshot::channel();
        self.tell(Input::PeerEnded(peer.to_owned(), answer)).await?;
        answered.await.map_err(|_| NodeError::Stopped)?
    }

    pub(super) fn has_tried_peers(&self) -> bool {
        self.ask_dialers(Dialers::have_tried).unwrap_or(true)
    }

    pub(super) fn peer_addresses(&self) -> Vec<(String, Address)> {
        self.ask_dialers(Dialers::addresses).unwrap_or_default()
    }

    pub(super) fn unreached(&self) -> Vec<(String, String)> {
        self.ask_dialers(Dialers::unreached).unwrap_or_default()
    }

    /// Queries the dialers; `None` once the node has ended.
    fn ask_dialers<T>(&self, ask: impl FnOnce(&Dialers) -> T) -> Option<T> {
        Some(ask(&self.dialers.upgrade()?.lock()))
    }

    pub(super) async fn migrate(&self, id: SequenceId, to: &str) -> Result<MigrationRecord, NodeError> {
        let status = self.status().await?;
        let is_known = status.peers.iter().any(|peer| peer.name == to);
        if !is_known && !self.unreached().iter().any(|(name, _)| name == to) {
            return Err(NodeError::UnknownPeer { name: to.to_owned() });
        }
        let before: HashSet<_> = status.migrations.into_iter().map(|record| record.id).collect();
        let offers = self.offers.clone();
        let sequence = offers.as_ref().and_then(|offers| offers.release(id));
        let (Some(sequence), Some(offers)) = (sequence, offers) else {
            return Err(NodeError::NotOffered { id });
        };
        let (pool, name) = (self.pool.clone(), to.to_owned());
        let mut task = tokio::spawn(async move {
            let result = pool.migrate_to_node(sequence, &name).await;
            result.map(drop).map_err(|failed| {
                let reason = failed.error.to_string();
                offload::give_back(&*offers, failed);
                reason
            })
        });
        let is_it = |record: &MigrationRecord| {
            record.sequence == Some(id.0)
                && record.side == MigrationSide::Source
                && !before.contains(&record.id)
        };
        loop {
            // The task ends after the migration, whose record the driver keeps.
            let ended = tokio::time::timeout(BEGIN_POLL, &mut task).await;
            if let Some(record) = self.status().await?.migrations.into_iter().find(is_it) {
                return Ok(record);
            }
            let reason = match ended {
                Err(_) => continue,
                Ok(Ok(Err(reason))) => reason,
                Ok(Ok(Ok(()))) => "it has ended, and is forgotten".to_owned(),
                Ok(Err(error)) => error.to_string(),
            };
            return Err(NodeError::NotBegun { id, reason });
        }
    }
}

//! A node, as an engine has it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvpool::Remotes;
use kvpool::{Pool, SequenceId, Target};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::dialers::Dialers;
use super::driver::Input;
use super::error::NodeError;
use super::spill::Offers;
use super::status::{Counters, NodeCounters, NodeStatus};
use crate::admin::{MigrationRecord, MigrationSide};
use crate::transport::tcp::{Address, PeerSettings};

/// Time between two looks at a migration that was asked for.
const BEGIN_POLL: Duration = Duration::from_millis(1);

/// A pool with links to the pools of other processes.
///
/// While it exists, its peers are [destinations](kvpool::Target::node) of the pool. Dropping it ends
/// the links; migrations under way fail, except those whose target was told to commit.
/// [`shutdown`](Self::shutdown) ends it in an orderly way.
pub struct Node {
    pub(super) pool: Pool,
    pub(super) name: String,
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) addresses: Vec<Address>,
    pub(super) counters: Arc<Counters>,
    pub(super) dialers: Mutex<Dialers>,
    pub(super) accepting: JoinHandle<()>,
    pub(super) spilling: Option<JoinHandle<()>>,
    pub(super) offers: Option<Arc<dyn Offers>>,
    /// The pool has a weak reference to it.
    pub(super) _remotes: Arc<dyn Remotes>,
}

impl Node {
    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the addresses at which peers can reach it, with the ports that the system selected.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Returns counts since it began.
    pub fn counters(&self) -> NodeCounters {
        self.counters.read()
    }

    /// Replaces the peers to which this node connects by itself. Links that exist stay.
    pub fn set_peers(&self, peers: Vec<PeerSettings>) {
        self.dialers.lock().unwrap_or_else(PoisonError::into_inner).replace(peers);
    }

    /// Returns the migrations under way, and the latest that ended, the newest first.
    ///
    /// # Errors
    ///
    /// [`NodeError::Stopped`].
    pub async fn migrations(&self) -> Result<Vec<MigrationRecord>, NodeError> {
        Ok(self.status().await?.migrations)
    }

    /// Returns the peers that were ever linked, with whether a link is up.
    ///
    /// # Errors
    ///
    /// [`NodeError::Stopped`].
    pub async fn peers(&self) -> Result<Vec<(String, bool)>, NodeError> {
        Ok(self.status().await?.peers)
    }

    /// Returns the number of grants into which a peer may still write although their migrations have
    /// ended. Their blocks are owned until that is over.
    ///
    /// # Errors
    ///
    /// [`NodeError::Stopped`].
    pub async fn quarantined_grants(&self) -> Result<usize, NodeError> {
        Ok(self.status().await?.quarantined_grants)
    }

    async fn status(&self) -> Result<NodeStatus, NodeError> {
        let (answer, answered) = oneshot::channel();
        self.inputs.send(Input::Status(answer)).await.map_err(|_| NodeError::Stopped)?;
        answered.await.map_err(|_| NodeError::Stopped)
    }

    /// Moves a sequence to a peer that the engine [offers](super::NodeBuilder::offers) for it. Returns the
    /// migration once it has begun.
    ///
    /// If it fails, the engine gets the sequence back.
    ///
    /// # Errors
    ///
    /// [`NodeError::UnknownPeer`]; [`NodeError::NotOffered`] if the engine does not give it;
    /// [`NodeError::NotBegun`], and then the engine has the sequence.
    pub async fn migrate(&self, id: SequenceId, to: &str) -> Result<MigrationRecord, NodeError> {
        let status = self.status().await?;
        let is_known = status.peers.iter().any(|(name, _)| name == to);
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
            let result = pool.migrate(sequence, Target::node(&name)).await;
            result.map(drop).map_err(|error| {
                offers.take_back(*error.sequence);
                error.error.to_string()
            })
        });
        let is_it = |record: &MigrationRecord| {
            record.sequence == Some(id.0)
                && record.side == MigrationSide::Source
                && !before.contains(&record.id)
        };
        loop {
            // The task ends behind the migration, whose record the driver keeps.
            let ended = tokio::time::timeout(BEGIN_POLL, &mut task).await;
            if let Some(record) = self.migrations().await?.into_iter().find(is_it) {
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

    /// Returns the configured peers without a link that this node made, with the reason.
    pub fn unreached(&self) -> Vec<(String, String)> {
        self.dialers.lock().unwrap_or_else(PoisonError::into_inner).unreached()
    }

    /// Closes the links to a peer. Peers to which this node [connects](Self::set_peers) are linked
    /// again.
    ///
    /// # Errors
    ///
    /// [`NodeError::Stopped`].
    pub async fn cut_links(&self, peer: &str) -> Result<(), NodeError> {
        self.inputs.send(Input::Cut(peer.to_owned())).await.map_err(|_| NodeError::Stopped)
    }

    /// Declares that the process of a peer has ended and will not come back.
    ///
    /// Copies in doubt become this node's own again. If the declaration is wrong, a sequence may run on
    /// both nodes.
    ///
    /// # Errors
    ///
    /// [`NodeError::Stopped`].
    pub async fn declare_ended(&self, peer: &str) -> Result<(), NodeError> {
        self.inputs.send(Input::PeerEnded(peer.to_owned())).await.map_err(|_| NodeError::Stopped)
    }

    /// Ends the node: takes no further requests, cancels migrations that can be cancelled, and waits
    /// for the others. Returns whether nothing was left at the deadline.
    ///
    /// What is left is in doubt: the peer was told to commit, and did not answer.
    pub async fn shutdown(&self, patience: Duration) -> bool {
        self.set_peers(Vec::new());
        let (drained, is_drained) = oneshot::channel();
        let is_over = match self.inputs.send(Input::Drain(drained)).await {
            Ok(()) => tokio::time::timeout(patience, is_drained).await.is_ok(),
            Err(_) => true,
        };
        // The port is free from here on.
        self.accepting.abort();
        self.dialers.lock().unwrap_or_else(PoisonError::into_inner).close();
        is_over
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.dialers.lock().unwrap_or_else(PoisonError::into_inner).close();
        self.accepting.abort();
        self.spilling.iter().for_each(JoinHandle::abort);
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.name)
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::transfer::{HeadRange, Remotes};
use kvpool::{Pool, SequenceId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::admin::NodeAdmin;
use super::dialers::Dialers;
use super::driver::Input;
use super::error::NodeError;
use super::operator::Operator;
use super::status::NodeCounters;
use crate::admin::{Admin, AdminCredentials, MigrationRecord, Serving};
use crate::settings::AdminUrl;
use crate::transport::tcp::{Address, PeerSettings, Tls, Token};

/// Interval at which a shutdown looks whether the port is free.
const LOOK: Duration = Duration::from_millis(2);

/// A pool with links to the pools of other processes.
///
/// While it exists, its peers are [destinations](kvpool::Pool::migrate_to_node) of the pool.
/// Dropping it closes the links, and migrations in progress fail: their sequences return to the
/// requests, with [`TransferError::InDoubt`](kvpool::TransferError::InDoubt) if the peer was sent
/// `Commit`. [`shutdown`](Self::shutdown) ends it gracefully.
pub struct Node {
    pub(super) name: String,
    pub(super) operator: Operator,
    /// Dropping it ends the driver.
    pub(super) inputs: mpsc::Sender<Input>,
    pub(super) addresses: Vec<Address>,
    pub(super) dialers: Arc<Mutex<Dialers>>,
    pub(super) accepting: JoinHandle<()>,
    pub(super) offloading: Option<JoinHandle<()>>,
    pub(super) admin: Arc<NodeAdmin>,
    pub(super) serving: Option<Serving>,
    pub(super) heads: Option<HeadRange>,
    /// Number of unfinished migrations at the end of the driver.
    pub(super) ended: watch::Receiver<Option<usize>>,
    /// Closing it ends the driver.
    pub(super) _alive: watch::Sender<()>,
    /// The pool has a weak reference to it.
    pub(super) _remotes: Arc<dyn Remotes>,
}

impl Node {
    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.operator.pool
    }

    /// Returns the node's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the addresses at which peers can reach it, with the ports that the system selected.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Returns the address of the admin interface, if there is one.
    pub fn admin_address(&self) -> Option<&AdminUrl> {
        self.serving.as_ref().map(Serving::address)
    }

    /// Returns what the admin interface answers, with or without one.
    pub fn admin(&self) -> Arc<dyn Admin> {
        self.admin.clone()
    }

    /// Returns counts since it began.
    pub fn counters(&self) -> NodeCounters {
        self.operator.counters()
    }

    /// Replaces the peers to which this node connects. Existing links stay.
    pub fn set_peers(&self, peers: Vec<PeerSettings>) {
        self.dialers.lock().replace(peers);
    }

    /// Replaces the certificates and the token of the cluster and of the admin interface, for new
    /// links and requests. Existing links stay.
    ///
    /// # Errors
    /// [`NodeError::Admin`] or [`NodeError::Link`] if an address of this node would be unprotected;
    /// [`NodeError::Stopped`]. Nothing was replaced.
    pub fn set_access(
        &self,
        tls: Option<Tls>,
        token: Option<Token>,
        admin: AdminCredentials,
    ) -> Result<(), NodeError> {
        if let Some(serving) = &self.serving {
            serving.access.check(&admin)?;
        }
        let dialers = self.dialers.lock();
        dialers.endpoint().ok_or(NodeError::Stopped)?.set_access(tls, token)?;
        if let Some(serving) = &self.serving {
            serving.access.replace(admin)?;
        }
        Ok(())
    }

    /// Returns the migrations in progress, and the latest ended ones, newest first.
    ///
    /// # Errors
    /// [`NodeError::Stopped`].
    pub async fn migrations(&self) -> Result<Vec<MigrationRecord>, NodeError> {
        Ok(self.operator.status().await?.migrations)
    }

    /// Returns the peers, with whether a link is up: those that are configured or have state here,
    /// and the latest others that were linked.
    ///
    /// # Errors
    /// [`NodeError::Stopped`].
    pub async fn peers(&self) -> Result<Vec<(String, bool)>, NodeError> {
        let peers = self.operator.status().await?.peers;
        Ok(peers.into_iter().map(|peer| (peer.name, peer.is_up)).collect())
    }

    /// Returns the number of grants of ended migrations that a peer may still write.
    ///
    /// # Errors
    /// [`NodeError::Stopped`].
    pub async fn quarantined_grants(&self) -> Result<usize, NodeError> {
        Ok(self.operator.status().await?.quarantined_grants)
    }

    /// Moves a sequence that the engine [offers](super::NodeBuilder::offers) to a peer; returns
    /// once begun.
    ///
    /// If it fails, the engine gets the sequence back.
    ///
    /// # Errors
    /// [`NodeError::UnknownPeer`]; [`NodeError::NotOffered`]; [`NodeError::NotBegun`], and then the
    /// engine has the sequence.
    pub async fn migrate(&self, id: SequenceId, to: &str) -> Result<MigrationRecord, NodeError> {
        self.operator.migrate(id, to).await
    }

    /// Returns whether every configured peer was reached, or one attempt at it failed.
    pub fn has_tried_peers(&self) -> bool {
        self.operator.has_tried_peers()
    }

    /// Returns the configured peers to which this node has made no link, with the reason.
    pub fn unreached(&self) -> Vec<(String, String)> {
        self.operator.unreached()
    }

    /// Closes the links to a peer. The node [reconnects](Self::set_peers) to configured peers.
    ///
    /// # Errors
    /// [`NodeError::Stopped`].
    pub async fn cut_links(&self, peer: &str) -> Result<(), NodeError> {
        self.operator.tell(Input::Cut(peer.to_owned())).await
    }

    /// Declares that a process of a peer has ended: the former ones of its name, or else the
    /// present.
    ///
    /// Copies in doubt become this node's own again; returns the ids of their sequences. If the
    /// declaration is wrong, a sequence may run on both nodes, and RDMA writes of the process
    /// damage blocks that others use.
    ///
    /// # Errors
    /// [`NodeError::UnknownPeer`] if no process of this name has state here;
    /// [`NodeError::PeerLives`] if it has a link; [`NodeError::Stopped`].
    pub async fn declare_ended(&self, peer: &str) -> Result<Vec<u64>, NodeError> {
        self.operator.declare_ended(peer).await
    }

    /// Ends the node: takes no further requests, cancels migrations that can be cancelled, and
    /// waits for the others. Returns whether none was left at the deadline.
    ///
    /// What can be left: migrations in doubt, whose peer was sent `Commit` and did not answer, and
    /// blocking work that does not end. It continues past the deadline, and a further call waits
    /// for it. Meanwhile the admin interface reports that the node is ending. The interface itself
    /// ends last, when its requests are answered, or at the deadline.
    pub async fn shutdown(&self, patience: Duration) -> bool {
        let begun = Instant::now();
        self.admin.drain();
        self.set_peers(Vec::new());
        let mut ended = self.ended.clone();
        let drained = async {
            // Fails if the driver has ended.
            let _ = self.inputs.send(Input::Drain).await;
            ended.wait_for(Option::is_some).await.is_ok_and(|left| *left == Some(0))
        };
        let is_over = tokio::time::timeout(patience, drained).await.unwrap_or(false);
        self.accepting.abort();
        self.dialers.lock().close();
        while !self.accepting.is_finished() {
            sleep(LOOK).await;
        }
        // The port is free from here on.
        if let Some(serving) = &self.serving {
            serving.end(patience.saturating_sub(begun.elapsed())).await;
        }
        is_over
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.dialers.lock().close();
        self.accepting.abort();
        self.offloading.iter().for_each(JoinHandle::abort);
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

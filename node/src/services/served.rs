use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::time::timeout;

use super::membership::Membership;
use super::reload::{Applied, Reread, peers};
use crate::events::KvEventPublisher;
use crate::node::{Node, NodeError};
use crate::tier::Tiered;
use crate::transport::tcp::PeerSettings;

/// Time to send subscribers the last events: after the deadline of everything else, and at most.
const EVENTS_PATIENCE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

/// A node with its services. Dropping it ends them at once.
pub struct Served {
    // Dropped in this order.
    pub(super) membership: Mutex<Option<Membership>>,
    pub(super) node: Arc<Node>,
    pub(super) publisher: Mutex<Option<KvEventPublisher>>,
    pub(super) tiered: Mutex<Option<Arc<Tiered>>>,
    pub(super) applied: Mutex<Applied>,
}

impl Served {
    /// Returns the node.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Returns the pool with its tier, if there is one and it has not ended.
    pub fn tiered(&self) -> Option<Arc<Tiered>> {
        self.tiered.lock().clone()
    }

    /// Returns the longest time that a request should wait for its prefix from the tier.
    pub fn tier_wait(&self) -> Option<Duration> {
        self.applied.lock().first.tier.as_ref().map(|tier| tier.wait)
    }

    /// Returns the time that the settings give to requests and transfers at the end.
    pub fn drain(&self) -> Duration {
        self.applied.lock().first.drain
    }

    /// Returns the number of blocks that the pool had at the start.
    pub fn blocks(&self) -> usize {
        self.applied.lock().first.pool.blocks
    }

    /// Returns the addresses of the events and of their replays, as far as they are published.
    pub fn event_addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let publisher = self.publisher.lock();
        let publisher = publisher.as_ref();
        (publisher.map(KvEventPublisher::address), publisher.and_then(KvEventPublisher::replay_address))
    }

    /// Replaces the configured peers; members of the directory stay.
    pub fn set_peers(&self, peers: Vec<PeerSettings>) {
        match &*self.membership.lock() {
            // It adds the members.
            Some(membership) => membership.configure(peers),
            None => self.node.set_peers(peers),
        }
    }

    /// Applies peers, certificates and tokens completely or not at all, for new links and requests.
    /// Returns the changes as text, with those of other settings, which need a restart.
    ///
    /// # Errors
    /// As for [`Node::set_access`].
    pub fn apply(&self, reread: Reread) -> Result<String, NodeError> {
        let mut applied = self.applied.lock();
        let credentials = &reread.credentials;
        self.node.set_access(
            credentials.tls.clone(),
            credentials.token.clone(),
            credentials.admin.clone(),
        )?;
        self.set_peers(peers(&reread.settings.peers));
        Ok(applied.replace(reread))
    }

    /// Leaves the directory, and ends the node with its admin interface. Returns whether no
    /// migration was left at the deadline, as [`Node::shutdown`].
    pub async fn leave(&self, deadline: Instant) -> bool {
        let left = || deadline.saturating_duration_since(Instant::now());
        let membership = self.membership.lock().take();
        if let Some(membership) = membership {
            // It has a limit of its own, too.
            let _ = timeout(left(), membership.leave()).await;
        }
        self.node.shutdown(left()).await
    }

    /// Stores and publishes what the pool has until the deadline, and ends both services. The rest
    /// is lost to others, but not to this node. The engine's requests have ended.
    pub async fn end(&self, deadline: Instant) {
        let (tiered, publisher) = (self.tiered.lock().take(), self.publisher.lock().take());
        if let Some(tiered) = tiered {
            if !tiered.flush(deadline).await {
                tracing::warn!("the tier was not given all cached blocks: it is down, or too slow");
            }
            match Arc::into_inner(tiered) {
                Some(tiered) => tiered.close().await,
                None => {
                    tracing::warn!("the tier is still in use: it ends when the last call of it has ended")
                }
            }
        }
        let now = Instant::now();
        let deadline = deadline.clamp(now + EVENTS_PATIENCE.0, now + EVENTS_PATIENCE.1);
        if let Some(publisher) = publisher {
            publisher.close(deadline).await;
        }
    }
}

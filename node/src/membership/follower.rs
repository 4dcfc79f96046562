use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::member::Member;
use super::members::Members;
use crate::admin::{MigrationRecord, MigrationState};
use crate::node::{Node, NodeError};
use crate::transport::tcp::PeerSettings;

/// Polling interval for members that left during a migration.
const AGAIN: Duration = Duration::from_millis(500);

/// Makes the members of a cluster peers of a node, until it is dropped.
///
/// The node connects to all other members and to its configured peers, which take precedence over
/// members of the same name. A member that left stays a peer while a migration with it is in
/// progress or in doubt; then its links are closed.
#[derive(Debug)]
pub struct Follower {
    configured: watch::Sender<Vec<PeerSettings>>,
    task: JoinHandle<()>,
}

impl Follower {
    /// Starts to follow. From here on, [`configure`](Self::configure) replaces
    /// [`Node::set_peers`](crate::Node::set_peers).
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn start(node: &Arc<Node>, members: Members, configured: Vec<PeerSettings>) -> Self {
        let (configured, receiver) = watch::channel(configured);
        let following = Following {
            node: Arc::downgrade(node),
            members,
            configured: receiver,
            followed: BTreeMap::new(),
        };
        Self { configured, task: tokio::spawn(following.run()) }
    }

    /// Replaces the configured peers.
    pub fn configure(&self, peers: Vec<PeerSettings>) {
        self.configured.send_replace(peers);
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Following {
    node: Weak<Node>,
    members: Members,
    configured: watch::Receiver<Vec<PeerSettings>>,
    followed: BTreeMap<String, Followed>,
}

struct Followed {
    settings: PeerSettings,
    has_left: bool,
}

impl Following {
    async fn run(mut self) {
        loop {
            let is_settled = match self.step().await {
                Ok(is_settled) => is_settled,
                // The node has ended, or was dropped.
                Err(_) => return,
            };
            tokio::select! {
                list = self.members.next() => if list.is_none() { return },
                changed = self.configured.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(AGAIN), if !is_settled => {}
            }
        }
    }

    /// Applies the newest list to the peers. Returns whether nothing is left to do.
    async fn step(&mut self) -> Result<bool, NodeError> {
        let node = self.node.upgrade().ok_or(NodeError::Stopped)?;
        let list = self.members.current();
        let others = list.members.iter().filter(|member| member.name != node.name());
        for member in others {
            self.take(member);
        }
        let is_listed = |name: &str| list.members.iter().any(|member| member.name == name);
        for (name, followed) in &mut self.followed {
            followed.has_left = !is_listed(name);
        }
        let mut gone = Vec::new();
        if self.followed.values().any(|followed| followed.has_left) {
            let busy = busy_peers(&node.migrations().await?);
            self.followed.retain(|name, followed| {
                let is_kept = !followed.has_left || busy.contains(name);
                if !is_kept {
                    gone.push(name.clone());
                }
                is_kept
            });
        }
        let configured = self.configured.borrow_and_update().clone();
        gone.retain(|name| configured.iter().all(|peer| peer.name != *name));
        node.set_peers(merge(configured, &self.followed));
        for name in gone {
            tracing::info!(peer = name, "the member has left");
            node.cut_links(&name).await?;
        }
        Ok(self.followed.values().all(|followed| !followed.has_left))
    }

    fn take(&mut self, member: &Member) {
        let settings = PeerSettings::new(&member.name, member.address.clone().into());
        self.followed.insert(member.name.clone(), Followed { settings, has_left: false });
    }
}

/// Returns all peers: the configured ones, and members of other names.
fn merge(configured: Vec<PeerSettings>, followed: &BTreeMap<String, Followed>) -> Vec<PeerSettings> {
    let is_other = |name: &&String| configured.iter().all(|peer| peer.name != **name);
    let names = followed.keys().filter(is_other);
    let members: Vec<_> = names.map(|name| followed[name].settings.clone()).collect();
    [configured, members].concat()
}

fn busy_peers(migrations: &[MigrationRecord]) -> HashSet<String> {
    let is_over =
        |state: MigrationState| matches!(state, MigrationState::Committed | MigrationState::Aborted);
    let busy = migrations.iter().filter(|record| !is_over(record.state));
    busy.map(|record| record.peer.clone()).collect()
}

//! Members become peers of a node.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use tokio::net::lookup_host;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::member::Member;
use super::members::Members;
use crate::admin::{MigrationRecord, MigrationState};
use crate::node::{Node, NodeError};
use crate::settings::Address;
use crate::transport::tcp::{Address as LinkAddress, PeerSettings};

/// Time between two looks at members that left during a migration, or whose names are unknown.
const AGAIN: Duration = Duration::from_millis(500);

/// Longest time in which the system finds the address of a name.
const RESOLVE: Duration = Duration::from_secs(2);

/// Names that are resolved at the same time: each takes a thread of the runtime.
const RESOLVED_AT_ONCE: usize = 64;

/// Makes the members of a cluster peers of a node, until it is dropped.
///
/// The node connects to all other members and to its configured peers. Of a member and a configured
/// peer with one name, the configured one counts. A member that left stays a peer while a migration
/// with it is under way, also one in doubt; then its links are closed.
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
    ///
    /// Outside of a tokio runtime.
    pub fn start(node: &Arc<Node>, members: Members, configured: Vec<PeerSettings>) -> Self {
        let (configured, receiver) = watch::channel(configured);
        let following = Following {
            node: Arc::downgrade(node),
            members,
            configured: receiver,
            followed: BTreeMap::new(),
            unresolved: HashSet::new(),
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
    /// Members that are peers, by name.
    followed: BTreeMap<String, Followed>,
    /// Names of members whose addresses cannot be resolved.
    unresolved: HashSet<String>,
}

/// A member that is a peer.
struct Followed {
    address: Address,
    /// Of its process.
    started_ms: u64,
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

    /// Brings the peers in line with the newest list. Returns whether nothing is left to do.
    async fn step(&mut self) -> Result<bool, NodeError> {
        let node = self.node.upgrade().ok_or(NodeError::Stopped)?;
        let list = self.members.current();
        let others = list.members.iter().filter(|member| member.name != node.name());
        let unknown: Vec<Member> = others.filter(|member| !self.is_followed(member)).cloned().collect();
        self.unresolved.retain(|name| unknown.iter().any(|member| member.name == *name));
        for (member, address) in resolve_all(unknown, resolve).await {
            self.take(member, address);
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
        Ok(self.unresolved.is_empty() && self.followed.values().all(|followed| !followed.has_left))
    }

    /// Returns whether a member is a peer, with its present address.
    fn is_followed(&self, member: &Member) -> bool {
        // Another process may be on another host of the same name.
        self.followed.get(&member.name).is_some_and(|followed| {
            followed.address == member.address && followed.started_ms == member.started_ms
        })
    }

    /// Makes a member a peer, if its address is known.
    fn take(&mut self, member: Member, address: std::io::Result<LinkAddress>) {
        match address {
            Ok(address) => {
                self.unresolved.remove(&member.name);
                let settings = PeerSettings::new(&member.name, address);
                let Member { name, address, started_ms, .. } = member;
                self.followed.insert(name, Followed { address, started_ms, settings, has_left: false });
            }
            Err(error) => {
                if self.unresolved.insert(member.name.clone()) {
                    let Member { name, address, .. } = member;
                    tracing::warn!(peer = name, %address, %error, "the address of a member is unknown");
                }
            }
        }
    }
}

/// Returns all peers: the configured ones, and members of other names.
fn merge(configured: Vec<PeerSettings>, followed: &BTreeMap<String, Followed>) -> Vec<PeerSettings> {
    let is_other = |name: &&String| configured.iter().all(|peer| peer.name != **name);
    let names = followed.keys().filter(is_other);
    let members: Vec<_> = names.map(|name| followed[name].settings.clone()).collect();
    [configured, members].concat()
}

/// Returns the peers with a migration under way.
fn busy_peers(migrations: &[MigrationRecord]) -> HashSet<String> {
    let is_over =
        |state: MigrationState| matches!(state, MigrationState::Committed | MigrationState::Aborted);
    let busy = migrations.iter().filter(|record| !is_over(record.state));
    busy.map(|record| record.peer.clone()).collect()
}

/// Finds the addresses of members, of many at the same time: one that takes long delays no other.
async fn resolve_all<F>(members: Vec<Member>, resolve: impl Fn(Address) -> F) -> Vec<(Member, F::Output)>
where
    F: Future,
{
    let resolved = futures_util::stream::iter(members).map(|member| {
        let address = resolve(member.address.clone());
        async move { (member, address.await) }
    });
    resolved.buffer_unordered(RESOLVED_AT_ONCE).collect().await
}

async fn resolve(address: Address) -> std::io::Result<LinkAddress> {
    match address {
        Address::Unix(path) => Ok(LinkAddress::Unix(path)),
        Address::Tcp { host, port } => {
            let found = timeout(RESOLVE, lookup_host((host.as_str(), port))).await;
            let first = found.map_err(|_| std::io::Error::from(std::io::ErrorKind::TimedOut))??.next();
            let none = || std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address");
            first.map(LinkAddress::Tcp).ok_or_else(none)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[tokio::test]
    async fn names_that_take_long_are_resolved_at_the_same_time() {
        let (slow, began) = (Duration::from_millis(200), Instant::now());
        let member = |at: usize| Member::new(format!("n{at}"), format!("h{at}:1").parse().unwrap());
        let resolved = resolve_all((0..100).map(member).collect(), |address| async move {
            tokio::time::sleep(slow).await;
            address
        });
        let resolved = resolved.await;
        assert!(began.elapsed() < 20 * slow, "{:?}", began.elapsed());
        assert_eq!(resolved.len(), 100);
        assert!(resolved.iter().all(|(member, address)| member.address == *address));
    }
}

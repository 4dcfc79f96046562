//! Services beside the pool: a shared tier, events of the cache over ZeroMQ, and membership.
//!
//! ```text
//! start   tier, events -> traffic -> node -> membership
//! end     membership left -> transfers of the node -> traffic -> tier drained -> events flushed
//! ```
//!
//! The tier and the events begin before and end after the traffic, so that they get all blocks. A
//! node is a member only while it serves.

#[cfg(feature = "etcd")]
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use kvpool::Pool;
use kvpool_load::traffic::Fetching;
use kvpool_node::Node;
use kvpool_node::admin::Reporters;
use kvpool_node::events::{HashForm, KvEventPublisher, KvEventReporter, KvEventSettings};
#[cfg(feature = "etcd")]
use kvpool_node::membership::EtcdMembership;
use kvpool_node::membership::{Follower, Joined};
use kvpool_node::settings::{EventSettings, MembershipSettings, Settings, SharedTierSettings, TierUse};
use kvpool_node::tier::{
    self, SharedTier, TierError, TierPolicy, TierReporter, TierSettings, Tiered, TieredSettings,
};
#[cfg(feature = "etcd")]
use kvpool_node::transport::tcp::LinkError;
use kvpool_node::transport::tcp::PeerSettings;
use tokio::runtime::Handle;

use super::network;
use crate::error::named;

/// Time to send subscribers the last events: after the deadline of everything else, and at most.
const EVENTS_PATIENCE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

#[cfg(not(feature = "etcd"))]
fn no_etcd() -> anyhow::Error {
    anyhow!("--membership: {}", crate::output::not_built("etcd"))
}

/// Connects to the store of a tier, and refuses services that this build lacks, before the pool
/// takes memory.
pub(super) fn prepare(settings: &Settings) -> anyhow::Result<Option<Arc<SharedTier>>> {
    #[cfg(not(feature = "etcd"))]
    if settings.membership.is_some() {
        return Err(no_etcd());
    }
    let connect = |tier: &SharedTierSettings| {
        let mut of_store = TierSettings::default();
        (of_store.calls, of_store.patience) = (tier.threads, tier.patience);
        of_store.authorities =
            tier.ca.as_deref().map(network::pem).transpose().map_err(named("--tier-ca"))?;
        tier::connect(tier.address.expose(), of_store).map_err(named("--tier"))
    };
    settings.tier.as_ref().map(connect).transpose()
}

pub(super) struct Services {
    pub fetching: Option<Fetching>,
    pub publisher: Option<KvEventPublisher>,
}

impl Services {
    /// Starts the tier and the events, and reports their counters.
    pub async fn start(
        pool: &Pool,
        settings: &Settings,
        tier: Option<Arc<SharedTier>>,
        reporters: &Reporters,
    ) -> anyhow::Result<Self> {
        let tier = settings.tier.as_ref().zip(tier);
        let fetching = tier.map(|(settings, tier)| fetching(pool, settings, tier)).transpose();
        let fetching = fetching.map_err(named("--tier"))?;
        if let Some(Fetching { tiered, .. }) = &fetching {
            reporters.add(TierReporter::new(tiered.tier().name(), tiered));
        }
        let publisher = match &settings.kv_events {
            Some(settings) => {
                let started = KvEventPublisher::start(pool.clone(), published(settings)).await;
                Some(started.map_err(named("--kv-events"))?)
            }
            None => None,
        };
        if let Some(publisher) = &publisher {
            reporters.add(KvEventReporter::new("publisher", publisher));
        }
        Ok(Self { fetching, publisher })
    }

    /// Stores and publishes what the pool has until the deadline, and ends. The rest is lost to
    /// others, but not to this node.
    pub async fn end(self, deadline: Instant) {
        if let Some(Fetching { tiered, .. }) = self.fetching {
            if !tiered.flush(deadline).await {
                tracing::warn!("the tier was not given all cached blocks: it is down, or too slow");
            }
            // The traffic, which shared it, has ended.
            if let Some(tiered) = Arc::into_inner(tiered) {
                tiered.close().await;
            }
        }
        let now = Instant::now();
        let deadline = deadline.clamp(now + EVENTS_PATIENCE.0, now + EVENTS_PATIENCE.1);
        if let Some(publisher) = self.publisher
            && !publisher.close(deadline).await
        {
            tracing::warn!("a subscriber was not sent the last events: it reads too slowly");
        }
    }
}

fn fetching(
    pool: &Pool,
    settings: &SharedTierSettings,
    tier: Arc<SharedTier>,
) -> Result<Fetching, TierError> {
    let policy = match settings.policy {
        TierUse::OnEviction => TierPolicy::OnEviction,
        // Nothing requests an offload.
        TierUse::ReadOnly => TierPolicy::Manual,
        _ => TierPolicy::WriteThrough,
    };
    let of_pool = TieredSettings::new(&settings.namespace).policy(policy);
    let tiered = Arc::new(Tiered::new(pool.clone(), tier, of_pool)?);
    Ok(Fetching { tiered, runtime: Handle::current(), wait: settings.wait })
}

fn published(settings: &EventSettings) -> KvEventSettings {
    let mut of_publisher = KvEventSettings::new(settings.listen);
    of_publisher.replay = settings.replay;
    of_publisher.topic.clone_from(&settings.topic);
    of_publisher.hashes = if settings.full_hashes { HashForm::Bytes } else { HashForm::Integer };
    of_publisher
}

/// A node's entry in a directory, and the members that are its peers.
#[cfg_attr(not(feature = "etcd"), allow(dead_code, reason = "this build has no directory"))]
pub(super) struct Membership {
    follower: Follower,
    joined: Joined,
}

impl Membership {
    /// Joins the directory, and follows its members.
    #[cfg(feature = "etcd")]
    pub fn start(
        node: &Arc<Node>,
        settings: &MembershipSettings,
        peers: Vec<PeerSettings>,
        reporters: &Reporters,
    ) -> anyhow::Result<Self> {
        use kvpool_node::membership::{Member, Membership, MembershipReporter};
        use kvpool_node::settings::Address;
        let address = advertised(node, settings);
        let mut member = Member::new(node.name(), address.clone());
        if let Some(admin) = node.admin_address() {
            member = match (&address, admin.address()) {
                // Other hosts cannot reach it.
                (_, Address::Unix(_)) => member,
                (Address::Tcp { host, .. }, all @ Address::Tcp { port, .. }) if all.is_unspecified() => {
                    member.admin(admin.at(Address::Tcp { host: host.clone(), port: *port }).to_string())
                }
                _ => member.admin(admin.to_string()),
            };
        }
        let directory = of_etcd(settings).map_err(named("--membership"))?.grace(GRACE.max(settings.lease));
        let joined = directory.join(member, settings.lease).map_err(named("--membership"))?;
        let members = directory.watch();
        reporters.add(MembershipReporter::new("etcd", &members, Some(&joined)));
        Ok(Self { follower: Follower::start(node, members, peers), joined })
    }

    /// Fails: this build lacks the client of etcd.
    #[cfg(not(feature = "etcd"))]
    pub fn start(
        _: &Arc<Node>,
        _: &MembershipSettings,
        _: Vec<PeerSettings>,
        _: &Reporters,
    ) -> anyhow::Result<Self> {
        Err(no_etcd())
    }

    pub fn configure(&self, peers: Vec<PeerSettings>) {
        self.follower.configure(peers);
    }

    /// Removes the entry, so that members drop this node immediately.
    pub async fn leave(self) {
        drop(self.follower);
        self.joined.leave().await;
    }
}

/// Minimum time for which lost members stay after etcd was unreachable.
#[cfg(feature = "etcd")]
const GRACE: Duration = Duration::from_secs(10);

/// Creates the directory, and reads its certificates.
#[cfg(feature = "etcd")]
fn of_etcd(settings: &MembershipSettings) -> anyhow::Result<EtcdMembership> {
    let (cert, key) = settings.certificate.as_ref().map(|(cert, key)| (cert, key)).unzip();
    let read = |path: Option<&PathBuf>| path.map(|path| network::pem(path)).transpose();
    let (authorities, chain, secret) = (read(settings.ca.as_ref())?, read(cert)?, read(key)?);
    let directory = EtcdMembership::new(settings.location.clone());
    directory.tls(authorities.as_deref(), chain.as_deref().zip(secret.as_deref())).map_err(|error| {
        let path = match &error {
            LinkError::TlsFile { what: "authority", .. } => settings.ca.as_ref(),
            LinkError::TlsFile { what: "key", .. } => key,
            _ => cert,
        };
        anyhow!("{}: {error}", path.cloned().unwrap_or_default().display())
    })
}

#[cfg(feature = "etcd")]
fn advertised(node: &Node, settings: &MembershipSettings) -> kvpool_node::settings::Address {
    use kvpool_node::settings::Address;
    let bound = node.addresses().first().expect("a membership needs an address to listen on");
    let bound: Address = bound.to_string().parse().expect("an address that is in use");
    match (&settings.advertise, bound) {
        (Some(Address::Tcp { host, port: 0 }), Address::Tcp { port, .. }) => {
            Address::Tcp { host: host.clone(), port }
        }
        (Some(address), _) => address.clone(),
        (None, bound) => bound,
    }
}

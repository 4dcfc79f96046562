use std::sync::Arc;

use kvpool::Pool;
use parking_lot::Mutex;

use super::credentials::{Credentials, pem};
use super::error::{ServiceError, of};
use super::membership::Membership;
use super::reload::{Applied, peers};
use super::served::Served;
use crate::admin::{AdminServer, Limits, Reporters};
use crate::events::{HashForm, KvEventPublisher, KvEventReporter, KvEventSettings};
use crate::node::{Arrivals, Node, NodeBuilder, NodeError, OffloadBelow};
use crate::settings::{
    Address, EventSettings, Loaded, NixlLocation, Settings, SharedTierSettings, TierUse, default_socket,
    make_socket_folder,
};
use crate::tier::{
    self, SharedTier, TierError, TierPolicy, TierReporter, TierSettings, Tiered, TieredSettings,
};
use crate::transport::tcp::LinkError;
use crate::wire;

/// Services that are ready to start, before there is a pool.
pub struct Prepared {
    pub(super) settings: Settings,
    pub(super) credentials: Credentials,
    pub(super) admin: Option<AdminServer>,
    tier: Option<Arc<SharedTier>>,
}

impl Prepared {
    /// Logs the warnings of the settings, reads certificates, binds the admin interface, and
    /// connects to the store of the tier; refuses services that this build lacks. Blocks; the store
    /// needs a current tokio runtime.
    ///
    /// # Errors
    /// [`ServiceError`]. Nothing is left running.
    pub fn new(loaded: Loaded) -> Result<Self, ServiceError> {
        let settings = loaded.log_warnings();
        #[cfg(not(feature = "etcd"))]
        if settings.membership.is_some() {
            return Err(super::membership::NO_ETCD);
        }
        let credentials = Credentials::read(&settings)?;
        let limits = Limits::default().connections(settings.admin_connections);
        let bind = |address| AdminServer::bind(address, credentials.admin.clone(), limits);
        let admin = settings.admin.as_ref().map(bind).transpose().map_err(of("admin"))?;
        let tier = settings.tier.as_ref().map(store).transpose()?;
        Ok(Self { settings, credentials, admin, tier })
    }

    /// Returns the settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Takes the store of the tier, for a client that uses it without a pool.
    pub fn take_store(&mut self) -> Option<Arc<SharedTier>> {
        self.tier.take()
    }

    /// Starts the tier and the events on the current tokio runtime, and reports their counters.
    ///
    /// # Errors
    /// [`ServiceError`]. Nothing is left running.
    pub async fn start(self, pool: &Pool, reporters: Reporters) -> Result<Services, ServiceError> {
        let Self { settings, credentials, admin, tier } = self;
        let tiered = settings.tier.as_ref().zip(tier).map(|(settings, tier)| tiered(pool, settings, tier));
        let tiered = tiered.transpose().map_err(of("tier"))?;
        if let Some(tiered) = &tiered {
            reporters.add(TierReporter::new(tiered.tier().name(), tiered));
        }
        let publisher = match &settings.kv_events {
            Some(settings) => {
                let started = KvEventPublisher::start(pool.clone(), published(settings)).await;
                Some(started.map_err(of("kv-events"))?)
            }
            None => None,
        };
        if let Some(publisher) = &publisher {
            reporters.add(KvEventReporter::new("publisher", publisher));
        }
        Ok(Services { pool: pool.clone(), settings, credentials, admin, reporters, tiered, publisher })
    }
}

fn store(settings: &SharedTierSettings) -> Result<Arc<SharedTier>, ServiceError> {
    let mut of_store = TierSettings::default();
    (of_store.calls, of_store.patience) = (settings.threads, settings.patience);
    of_store.authorities = settings.ca.as_deref().map(pem).transpose().map_err(of("tier-ca"))?;
    tier::connect(settings.address.expose(), of_store).map_err(|error| match error {
        TierError::NotBuilt { feature, .. } => ServiceError::NotBuilt { key: "tier", feature },
        error => of("tier")(error),
    })
}

fn tiered(
    pool: &Pool,
    settings: &SharedTierSettings,
    tier: Arc<SharedTier>,
) -> Result<Arc<Tiered>, TierError> {
    let policy = match settings.policy {
        TierUse::OnEviction => TierPolicy::OnEviction,
        // Nothing requests an offload.
        TierUse::ReadOnly => TierPolicy::Manual,
        TierUse::WriteThrough => TierPolicy::WriteThrough,
    };
    let of_pool = TieredSettings::new(&settings.namespace).policy(policy);
    Ok(Arc::new(Tiered::new(pool.clone(), tier, of_pool)?))
}

fn published(settings: &EventSettings) -> KvEventSettings {
    let mut of_publisher = KvEventSettings::new(settings.listen);
    of_publisher.replay = settings.replay;
    of_publisher.topic.clone_from(&settings.topic);
    of_publisher.hashes = if settings.full_hashes { HashForm::Bytes } else { HashForm::Integer };
    of_publisher
}

/// The services of a pool whose node has not started.
pub struct Services {
    pool: Pool,
    settings: Settings,
    credentials: Credentials,
    admin: Option<AdminServer>,
    reporters: Reporters,
    tiered: Option<Arc<Tiered>>,
    publisher: Option<KvEventPublisher>,
}

impl Services {
    /// Returns the pool with its tier, if there is one.
    pub fn tiered(&self) -> Option<&Arc<Tiered>> {
        self.tiered.as_ref()
    }

    /// Starts the node on the current tokio runtime, with what the engine adds to its builder, and
    /// joins the directory.
    ///
    /// # Errors
    /// [`ServiceError`]. Nothing is left running.
    pub async fn serve(
        self,
        engine: impl FnOnce(NodeBuilder) -> NodeBuilder,
    ) -> Result<(Served, Arrivals), ServiceError> {
        let Self { pool, settings, credentials, admin, reporters, tiered, publisher } = self;
        let mut builder = configure(&settings, &credentials, Node::builder(pool))?;
        builder = engine(builder.reporters(reporters.clone()));
        if let Some(admin) = admin {
            builder = builder.admin(admin);
        }
        let (node, arrivals) = builder.start().await.map_err(|error| match error {
            NodeError::Link(error @ (LinkError::AddressInUse { .. } | LinkError::Io { .. })) => {
                of("listen")(error)
            }
            error => error.into(),
        })?;
        let node = Arc::new(node);
        let join = |member| Membership::start(&node, member, peers(&settings.peers), &reporters);
        let membership = settings.membership.as_ref().map(join).transpose()?;
        let served = Served {
            membership: Mutex::new(membership),
            node,
            publisher: Mutex::new(publisher),
            tiered: Mutex::new(tiered),
            applied: Mutex::new(Applied::new(settings, credentials)),
        };
        Ok((served, arrivals))
    }
}

/// Applies settings to a node.
fn configure(
    settings: &Settings,
    credentials: &Credentials,
    builder: NodeBuilder,
) -> Result<NodeBuilder, ServiceError> {
    let mut builder = builder.name(&settings.name).peers(peers(&settings.peers));
    if let Some(address) = &settings.listen {
        let (socket, mut is_usable) = (default_socket(&settings.name), true);
        if let Some(folder) = socket.parent()
            && *address == Address::Unix(socket.clone())
            && let Err(error) = make_socket_folder(folder)
        {
            let folder = folder.display();
            tracing::warn!(
                %folder, %error,
                "peers cannot link to this node: its folder of sockets cannot be used; set listen"
            );
            is_usable = false;
        }
        if is_usable {
            builder = builder.listen(address.clone().into());
        }
    }
    if let Some(tls) = &credentials.tls {
        builder = builder.tls(tls.clone());
    }
    if let Some(token) = &credentials.token {
        builder = builder.token(token.clone());
    }
    if let Some(migrate) = &settings.migrate {
        builder = builder.offload(OffloadBelow { below: migrate.blocks, to: migrate.to.clone() });
    }
    builder = builder.restarts(settings.restarts);
    if let Some(limit) = settings.doubt_limit {
        builder = builder.doubt_limit(limit);
    }
    if let Some(location) = &settings.nixl {
        builder = nixl(builder, location)?;
    }
    let limits =
        wire::Limits { granted_bytes_per_peer: settings.peer_quota_bytes, ..wire::Limits::default() };
    Ok(builder.limits(limits))
}

#[cfg(feature = "nixl")]
fn nixl(builder: NodeBuilder, location: &NixlLocation) -> Result<NodeBuilder, ServiceError> {
    use crate::transport::nixl::{NixlSettings, NixlTransport};
    let mut settings = NixlSettings::default();
    if let NixlLocation::At(path) = location {
        settings.location = Some(path.clone());
    }
    Ok(builder.nixl(NixlTransport::new(&settings).map_err(of("nixl"))?))
}

#[cfg(not(feature = "nixl"))]
fn nixl(_: NodeBuilder, _: &NixlLocation) -> Result<NodeBuilder, ServiceError> {
    Err(ServiceError::NotBuilt { key: "nixl", feature: "nixl" })
}

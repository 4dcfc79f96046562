use std::collections::{BTreeSet, HashMap};
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kvpool::transfer::{HeadRange, PackedForm, Remotes};
use kvpool::transport::Transport;
use kvpool::{AnySequence, Pool, TransferError};
use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use super::admin::NodeAdmin;
use super::arrival::Arrivals;
use super::dialers::{Dialers, accept};
use super::driver::{Driver, INPUTS, Setup};
use super::error::NodeError;
use super::message::{VERSIONS, Way};
use super::name_lock::NameLock;
use super::node::Node;
use super::offload::{self, AnyOffers, Offers, OffersOf, OffloadBelow};
use super::operator::Operator;
use super::parts::PartCopies;
use super::remote::NodeRemotes;
use super::staging::Stagings;
use super::status::Counters;
use super::work::Carrier;
use crate::admin::{AdminServer, PoolAdmin, Quiet, Reporters, Serving};
use crate::protocol::{self, Incarnation, Migrations, Timing};
use crate::settings::Restarts;
use crate::transport::tcp::{
    Address, Endpoint, Identity, ListenSettings, PeerSettings, Resolve, TcpTransport, Tls, Token,
};
use crate::wire::Limits;

/// Default memory for blocks of parts.
const STAGING_BYTES: u64 = 256 << 20;
/// Default number of arrived sequences that were not taken.
const ARRIVALS: usize = 1024;
const FETCH_BLOCKS_MIN: usize = 64;

/// Settings of a [`Node`].
pub struct NodeBuilder {
    pool: Pool,
    name: String,
    listen: Vec<Address>,
    peers: Vec<PeerSettings>,
    tls: Option<Tls>,
    token: Option<Token>,
    limits: Limits,
    timing: Timing,
    offload: Option<OffloadBelow>,
    offers: Option<Arc<AnyOffers>>,
    heads: Option<HeadRange>,
    staging_bytes: u64,
    nixl: Option<Arc<dyn Transport>>,
    admin: Option<AdminServer>,
    traffic: Option<Arc<dyn Quiet>>,
    reporters: Reporters,
    restarts: Restarts,
    doubt_limit: Option<Duration>,
    resolver: Option<Arc<dyn Resolve>>,
    arrivals: usize,
    fetch_blocks: Option<usize>,
}

impl Node {
    /// Begins the settings of a node over a pool, which must have storage.
    pub fn builder(pool: Pool) -> NodeBuilder {
        NodeBuilder::new(pool)
    }
}

impl NodeBuilder {
    fn new(pool: Pool) -> Self {
        Self {
            pool,
            name: format!("node-{}", std::process::id()),
            listen: Vec::new(),
            peers: Vec::new(),
            tls: None,
            token: None,
            limits: Limits::default(),
            timing: Timing::default(),
            offload: None,
            offers: None,
            heads: None,
            staging_bytes: STAGING_BYTES,
            nixl: None,
            admin: None,
            traffic: None,
            reporters: Reporters::default(),
            restarts: Restarts::default(),
            doubt_limit: None,
            resolver: None,
            arrivals: ARRIVALS,
            fetch_blocks: None,
        }
    }

    /// Sets the name by which peers know the node; by default derived from the process id.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Listens at an address; may be called again. Without addresses the node only connects.
    #[must_use]
    pub fn listen(mut self, address: Address) -> Self {
        self.listen.push(address);
        self
    }

    /// Connects to these peers, and reconnects when a link is lost.
    #[must_use]
    pub fn peers(mut self, peers: Vec<PeerSettings>) -> Self {
        self.peers = peers;
        self
    }

    /// Serves the admin interface on an address that is already [bound](AdminServer::bind).
    ///
    /// Binding comes first, because it refuses an unprotected address or a used port before this
    /// node takes memory. The interface ends with the node.
    #[must_use]
    pub fn admin(mut self, server: AdminServer) -> Self {
        self.admin = Some(server);
        self
    }

    /// Sets the engine's traffic, which audits halt and statistics count.
    #[must_use]
    pub fn traffic(mut self, traffic: Arc<dyn Quiet>) -> Self {
        self.traffic = Some(traffic);
        self
    }

    /// Sets the services beside the pool, such as a tier, whose counters the admin interface
    /// reports. More can be added later to a clone of the list.
    #[must_use]
    pub fn reporters(mut self, reporters: Reporters) -> Self {
        self.reporters = reporters;
        self
    }

    /// Sets the certificates. Needed for addresses that other hosts can reach.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Sets the token of the cluster.
    #[must_use]
    pub fn token(mut self, token: Token) -> Self {
        self.token = Some(token);
        self
    }

    /// Sets the limits for peers.
    #[must_use]
    pub fn limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets the durations of the protocol.
    #[must_use]
    pub fn timing(mut self, timing: Timing) -> Self {
        self.timing = timing;
        self
    }

    /// Moves blocks to a peer while few are free.
    #[must_use]
    pub fn offload(mut self, offload: OffloadBelow) -> Self {
        self.offload = Some(offload);
        self
    }

    /// Sets the engine's interface for sequences that may leave.
    #[must_use]
    pub fn offers<S: AnySequence>(mut self, offers: Arc<impl Offers<S> + ?Sized>) -> Self {
        self.offers = Some(Arc::new(OffersOf(offers, PhantomData)));
        self
    }

    /// Sets which heads of the model the pool holds, so that the node can exchange
    /// [parts](Node::send_part) of copies with ranks of different tensor-parallel splits.
    #[must_use]
    pub fn heads(mut self, heads: HeadRange) -> Self {
        self.heads = Some(heads);
        self
    }

    /// Sets the memory for blocks of parts until they are verified: by default 256 MiB.
    ///
    /// A part that needs more for its blocks that this node lacks, in the size of the source's
    /// blocks, is refused. Memory is allocated when bytes arrive.
    #[must_use]
    pub fn staging_bytes(mut self, bytes: u64) -> Self {
        self.staging_bytes = bytes;
        self
    }

    /// Sets when a peer's process counts as ended because another one of its name is linked.
    #[must_use]
    pub fn restarts(mut self, restarts: Restarts) -> Self {
        self.restarts = restarts;
        self
    }

    /// Sets the resolver of peers' names; by default the system's.
    #[must_use]
    pub fn resolver(mut self, resolver: Arc<dyn Resolve>) -> Self {
        self.resolver = Some(resolver);
        self
    }

    /// Sets the time without a link to the target after which a doubt ends; by default never.
    ///
    /// The sequence is then this node's own. If the target lives and has it, both run it.
    #[must_use]
    pub fn doubt_limit(mut self, limit: Duration) -> Self {
        self.doubt_limit = Some(limit);
        self
    }

    /// Sets the number of sequences that may be in transit to this node, or have arrived without
    /// being taken; by default 1024, at least 1. Further ones are refused.
    #[must_use]
    pub fn arrivals(mut self, arrivals: usize) -> Self {
        self.arrivals = arrivals;
        self
    }

    /// Sets the fetch quota: cached blocks in transfer to one peer that asked for them. By default
    /// half of the pool, but at least 64; at least 1.
    ///
    /// They cannot be evicted meanwhile. A request beyond it is refused
    /// ([`AbortReason::Quota`](crate::protocol::AbortReason::Quota)); a single larger one is
    /// truncated.
    #[must_use]
    pub fn fetch_blocks(mut self, blocks: usize) -> Self {
        self.fetch_blocks = Some(blocks);
        self
    }

    /// Uses NIXL with peers that have it too.
    #[cfg(feature = "nixl")]
    #[must_use]
    pub fn nixl(mut self, nixl: crate::transport::nixl::NixlTransport) -> Self {
        self.nixl = Some(Arc::new(nixl));
        self
    }

    /// Starts the node on the current tokio runtime. Sequences of several groups of layers are
    /// refused until the engine takes [grouped](Arrivals::grouped) ones.
    ///
    /// # Errors
    /// [`NodeError::Pool`] for a pool without storage, [`NodeError::Heads`], [`NodeError::Link`]
    /// for an address that cannot be used, [`NodeError::Transport`], [`NodeError::PoolInUse`] for a
    /// pool with another node. Nothing is left running.
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub async fn start(self) -> Result<(Node, Arrivals), NodeError> {
        let storage = self.pool.storage().cloned();
        let storage = storage.ok_or(TransferError::NoStorage { pool: self.pool.tag() })?;
        if let Some(heads) = self.heads.filter(|heads| heads.heads().len() != storage.layout().kv_heads()) {
            return Err(NodeError::Heads { heads, layout: storage.layout().kv_heads() });
        }
        let fingerprint = PackedForm::of(storage.layout()).fingerprint();
        let (inputs, receiver) = mpsc::channel(INPUTS);
        let remotes: Arc<dyn Remotes> = Arc::new(NodeRemotes { inputs: inputs.clone() });
        self.pool.set_remotes(&remotes).map_err(|_| NodeError::PoolInUse)?;
        let lock = NameLock::take(&self.name, &self.listen);
        let identity = Identity::new(&self.name, VERSIONS)?.fingerprint(fingerprint);
        let mut identity = identity.lock(lock.as_ref().map(NameLock::number));
        if let Some(tls) = self.tls {
            identity = identity.tls(tls);
        }
        if let Some(token) = self.token {
            identity = identity.token(token);
        }
        let incarnation = Incarnation(identity.incarnation_number());
        let listen = ListenSettings { addresses: self.listen };
        let mut endpoint = Endpoint::bind(listen, identity, self.limits).await?;
        if let Some(resolver) = self.resolver {
            endpoint = endpoint.resolver(resolver);
        }
        let endpoint = Arc::new(endpoint);
        endpoint.warn_if_open();
        let tcp = Arc::new(TcpTransport::new(&endpoint));
        let ways = [(Way::Tcp, Some(tcp.clone() as Arc<dyn Transport>)), (Way::Nixl, self.nixl)];
        let mut carriers = HashMap::new();
        for (way, transport) in ways {
            let Some(transport) = transport else { continue };
            let region = transport.register(&storage)?;
            carriers.insert(way, Carrier { transport, region });
        }
        let (arrived, arrivals) = mpsc::channel(self.arrivals.max(1));
        let takes_grouped = Arc::new(AtomicBool::new(false));
        let (end, ended) = watch::channel(None);
        let (alive, is_alive) = watch::channel(());
        let configured = Arc::new(Mutex::new(BTreeSet::new()));
        let counters = Arc::new(Counters::default());
        let machines = Migrations::new(incarnation, self.timing, protocol::Limits::default());
        let stagings = |heads| {
            let (layout, tcp) = (storage.layout().clone(), tcp.clone());
            let register = Box::new(move |storage: &_| tcp.register(storage));
            PartCopies::new(heads, Stagings::new(register, layout, self.staging_bytes))
        };
        let parts = self.heads.map(stagings).unwrap_or_default();
        let fetch_blocks = || (self.pool.total_blocks() / 2).max(FETCH_BLOCKS_MIN);
        let fetch_blocks_max = self.fetch_blocks.unwrap_or_else(fetch_blocks).max(1);
        let driver = Driver::new(Setup {
            pool: self.pool.clone(),
            machines,
            tcp,
            carriers,
            counters: counters.clone(),
            sender: inputs.downgrade(),
            arrivals: arrived,
            takes_grouped: takes_grouped.clone(),
            parts,
            fingerprint,
            restarts: self.restarts,
            doubt_limit: self.doubt_limit,
            lock,
            fetch_blocks_max,
            configured: configured.clone(),
            ended: end,
            alive: is_alive,
        });
        tokio::spawn(driver.run(receiver));
        let accepting = tokio::spawn(accept(endpoint.clone(), inputs.clone()));
        let (pool, offers) = (self.pool.clone(), self.offers.clone());
        let offloading = self.offload.map(|offload| tokio::spawn(offload::keep_free(pool, offload, offers)));
        let addresses = endpoint.addresses().to_vec();
        let mut dialers = Dialers::new(endpoint, inputs.clone(), configured);
        dialers.replace(self.peers);
        let dialers = Arc::new(Mutex::new(dialers));
        let operator = Operator {
            pool: self.pool,
            inputs: inputs.downgrade(),
            counters,
            dialers: Arc::downgrade(&dialers),
            offers: self.offers,
        };
        let mut admin = PoolAdmin::new(&self.name, operator.pool.clone()).reporters(self.reporters);
        if let Some(traffic) = self.traffic {
            admin = admin.traffic(traffic);
        }
        let admin = Arc::new(NodeAdmin::new(operator.clone(), admin));
        let serving = self.admin.map(|server| Serving::start(server, admin.clone()));
        let node = Node {
            name: self.name,
            operator,
            inputs,
            addresses,
            dialers,
            accepting,
            offloading,
            admin,
            serving,
            heads: self.heads,
            ended,
            _alive: alive,
            _remotes: remotes,
        };
        Ok((node, Arrivals::new(arrivals, takes_grouped)))
    }
}

//! `Node`: a pool whose sequences can move to pools of other processes and hosts.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Deref;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use kvpool::{GroupedSequence, Pool};
use kvpool_node::admin::Reporters;
use kvpool_node::services::{Prepared, Reread, Served};
use kvpool_node::settings::Sources;
use kvpool_node::tier::Tiered;
use kvpool_node::transport::tcp::{PeerSettings, Tls, Token};
use kvpool_node::{Arrival, Arrivals, Node, NodeBuilder, NodeCounters};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use tokio::sync::Mutex;

use crate::args::{Extra, Keys, Seconds};
use crate::buffers::Numbers;
use crate::call::Call;
use crate::error::{Failure, Outcome, fields, invalid, raise};
use crate::exclusive::Open;
use crate::log;
use crate::pool::PyPool;
use crate::process::Own;
use crate::record::record;
use crate::returned::{Received, Returned};
use crate::settings::{address, apart, sources};
use crate::tier::until;
use crate::waiting::Leaves;

/// Time to end, for a node without settings.
const PATIENCE: Duration = Duration::from_secs(10);

/// A pool with links to the pools of other processes. `await Node.start(pool, ...)` makes one, and
/// `await Node.from_settings(pool, settings)` one with the services of `kvpool serve`.
///
/// While it is open, its peers are targets of `Pool.migrate` by their names. Sequences of peers
/// arrive from `async for sequence, peer in node`: a GroupedSequence if it has several groups of
/// layers or a state, else a Sequence.
#[pyclass(frozen, name = "Node", module = "kvpool._kvpool")]
pub struct PyNode {
    node: Open<Running>,
    arrivals: Own<Arc<Mutex<Arrivals<GroupedSequence>>>>,
    returned: Arc<Returned<Arrived>>,
}

/// A sequence from a peer.
struct Arrived(Arrival<GroupedSequence>);

impl<'py> IntoPyObject<'py> for Arrived {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    /// A Sequence if it has one list.
    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        let Arrival { sequence, from, .. } = self.0;
        let sequence = match sequence.into_one() {
            Ok(sequence) => sequence.object(py),
            Err(sequence) => sequence.object(py),
        };
        (sequence?, from).into_bound_py_any(py)
    }
}

/// A node, with its services if it was started from settings.
pub(crate) struct Running {
    // Dropped first, in its own order.
    served: Option<(Served, std::sync::Mutex<Sources>)>,
    node: Arc<Node>,
}

impl Deref for Running {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl Running {
    fn served(&self) -> Option<&Served> {
        self.served.as_ref().map(|(served, _)| served)
    }

    fn set_peers(&self, peers: Vec<PeerSettings>) {
        match self.served() {
            Some(served) => served.set_peers(peers),
            None => self.node.set_peers(peers),
        }
    }

    fn tiered(&self) -> Outcome<(Arc<Tiered>, Duration)> {
        let of = |served: &Served| Some((served.tiered()?, served.tier_wait()?));
        let none = || raise("NodeError", "the settings of this node have no tier", fields![kind: "NoTier"]);
        self.served().and_then(of).ok_or_else(none)
    }

    async fn reload(&self, given: Option<Sources>) -> Outcome<String> {
        let (served, kept) = self.served.as_ref().ok_or_else(|| {
            raise("NodeError", "this node was not started from settings", fields![kind: "NoSettings"])
        })?;
        let keep = || kept.lock().unwrap_or_else(PoisonError::into_inner);
        let sources = given.unwrap_or_else(|| keep().clone());
        let (read, pool) = (sources.clone(), self.pool().clone());
        let blocks = served.blocks();
        let reread = apart(move || Ok(Reread::new(read.load_for(&pool, blocks)?)?)).await?;
        let changes = served.apply(reread)?;
        *keep() = sources;
        Ok(changes)
    }
}

/// A value of JSON, as Python has it.
pub struct Json(pub serde_json::Value);

impl<'py> IntoPyObject<'py> for Json {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (self.0.to_string(),))
    }
}

record! {
    /// A migration, as one of its nodes sees it.
    MigrationState {
        /// Id, the same on both nodes.
        id: String,
        /// Name of the other node.
        peer: String,
        /// Id of the sequence; None for cached blocks.
        sequence: Option<u64>,
        /// State.
        state: String,
        /// Blocks of the migration.
        blocks: usize,
        /// Bytes that were transferred so far.
        bytes: u64,
        /// Milliseconds since the beginning, or from the beginning to the end.
        time_ms: u64,
        /// Why it failed, if it did.
        reason: Option<String>,
    }
}

record! {
    /// Counts since a node began.
    NodeStats {
        /// Migrations, offloads and fetches that it sent, and that arrived.
        sent: u64,
        /// Those that it received.
        received: u64,
        /// Those that a target refused.
        refused: u64,
        /// Those that failed otherwise.
        failed: u64,
        /// Blocks that arrived with wrong checksums.
        bad_blocks: u64,
        /// Cached blocks that were dropped when a peer asked for them, because the memory had
        /// damaged them.
        damaged_blocks: u64,
        /// Times that the owner of a sequence was in doubt.
        in_doubt: u64,
        /// Bytes that it wrote to peers.
        sent_bytes: u64,
    }
}

async fn start(
    mut builder: NodeBuilder,
    listen: Vec<String>,
    peers: HashMap<String, String>,
    token: Option<Vec<u8>>,
    tls: Option<[Vec<u8>; 3]>,
) -> Outcome<PyNode> {
    for text in &listen {
        builder = builder.listen(address(text)?);
    }
    let peers: Outcome<Vec<_>> =
        peers.iter().map(|(name, text)| Ok(PeerSettings::new(name, address(text)?))).collect();
    builder = builder.peers(peers?);
    if let Some(token) = token {
        builder = builder.token(Token::new(&token)?);
    }
    if let Some([certificates, key, authorities]) = tls {
        builder = builder.tls(Tls::mutual(&certificates, &key, &authorities)?);
    }
    log::start()?;
    let (node, arrivals) = builder.start().await?;
    Ok(PyNode::over(Running { served: None, node: Arc::new(node) }, arrivals))
}

async fn serve(pool: Pool, sources: Sources) -> Outcome<PyNode> {
    log::start()?;
    let (read, of) = (sources.clone(), pool.clone());
    let prepared = apart(move || Ok(Prepared::new(read.load_for(&of, of.total_blocks())?)?)).await?;
    let services = prepared.start(&pool, Reporters::new()).await?;
    let (served, arrivals) = services.serve(|builder| builder).await?;
    let node = served.node().clone();
    Ok(PyNode::over(Running { served: Some((served, sources.into())), node }, arrivals))
}

impl PyNode {
    fn over(running: Running, arrivals: Arrivals) -> Self {
        let arrivals = Own::new(Arc::new(Mutex::new(arrivals.grouped())));
        Self { node: Open::new("node", running), arrivals, returned: Arc::default() }
    }

    /// Makes a call of an open node. Before it is awaited, it does not keep a closed node from
    /// ending.
    pub(crate) fn call<T, F>(
        slf: &Bound<'_, Self>,
        of: impl FnOnce(Arc<Running>) -> F + Send + 'static,
    ) -> Outcome<Call>
    where
        T: for<'py> IntoPyObject<'py> + Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        slf.get().node.get()?;
        let this = slf.clone().unbind();
        Ok(Call::new(move |caller| caller.waits(of(this.get().node.share()?))))
    }
}

#[pymethods]
impl PyNode {
    /// Starts a node of a pool with storage.
    ///
    /// Addresses are "host:port" or "unix:/path"; port 0 selects a free one. `peers` has the
    /// addresses of other nodes by name. Beyond the loopback, links need `tls`: certificates, key and
    /// authorities in PEM. `token` is a secret that both ends have.
    ///
    /// `restarts` tells when another process of a peer's name shows that the former one has ended:
    /// "proven", or "by-name" where at most one process of a name lives. After `doubt_limit`
    /// seconds without a link to its target, a sequence in doubt is this node's own again; if the
    /// target lives, both may run it.
    #[staticmethod]
    #[pyo3(signature = (pool, name, *, listen=Vec::new(), peers=HashMap::new(), token=None, tls=None, restarts="proven", doubt_limit=None), text_signature = r#"(pool, name, *, listen=(), peers={}, token=None, tls=None, restarts="proven", doubt_limit=None)"#)]
    #[allow(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn start(
        pool: &Bound<'_, PyPool>,
        name: String,
        listen: Vec<String>,
        peers: HashMap<String, String>,
        token: Option<&Bound<'_, PyBytes>>,
        tls: Option<(Bound<'_, PyBytes>, Bound<'_, PyBytes>, Bound<'_, PyBytes>)>,
        restarts: &str,
        doubt_limit: Option<Seconds>,
    ) -> Outcome<Call> {
        let mut builder = Node::builder(pool.get().share()?).name(name);
        let known = restarts.parse().map_err(|reason| invalid(format!("restarts={restarts:?}: {reason}")));
        builder = builder.restarts(known?);
        if let Some(Seconds(limit)) = doubt_limit {
            builder = builder.doubt_limit(limit);
        }
        let token = token.map(|token| token.as_bytes().to_vec());
        let pem = |bytes: Bound<'_, PyBytes>| bytes.as_bytes().to_vec();
        let tls = tls.map(|(certificates, key, authorities)| [pem(certificates), pem(key), pem(authorities)]);
        Ok(Call::new(move |caller| caller.waits(start(builder, listen, peers, token, tls))))
    }

    /// Starts the node of a pool with the services of `kvpool serve`: peers, admin interface with
    /// page and metrics, shared tier, membership, events of the cache, each as `settings` say. They
    /// are the path of its TOML file, or a mapping with the same keys; variables of the environment
    /// do not count.
    ///
    /// Settings of the pool, of traffic and of messages are refused: they are the engine's.
    /// Messages go to the logger `kvpool`.
    #[staticmethod]
    fn from_settings(pool: &Bound<'_, PyPool>, settings: &Bound<'_, PyAny>) -> Outcome<Call> {
        let (pool, sources) = (pool.get().share()?, sources(settings)?);
        Ok(Call::new(move |caller| caller.waits(serve(pool, sources))))
    }

    /// Returns the key of the hashes that these settings give, for `Pool(hash_key=...)`: nodes with
    /// the same secret exchange cached blocks. None without `hash_key_file` and `token_file`.
    #[staticmethod]
    fn hash_key(settings: &Bound<'_, PyAny>) -> Outcome<Option<Cow<'static, [u8]>>> {
        Ok(sources(settings)?.load_hash_key()?.map(|key| Cow::Owned(key.to_vec())))
    }

    /// Reads the settings again, or other ones, and applies peers, certificates and tokens,
    /// completely or not at all. Returns the changes, and names those that need another start.
    #[pyo3(signature = (settings=None))]
    fn reload(slf: &Bound<'_, Self>, settings: Option<&Bound<'_, PyAny>>) -> Outcome<Call> {
        let given = settings.map(sources).transpose()?;
        Self::call(slf, async move |node| node.reload(given).await)
    }

    /// Fetches the longest prefix of these tokens that the tier has, within `timeout` seconds, by
    /// default those of `tier_wait`. Returns the number of its blocks that are cached now. A
    /// failure is a miss.
    #[pyo3(signature = (tokens, *, salt=None, adapter=None, extra_keys=None, timeout=None))]
    fn bring_back(
        slf: &Bound<'_, Self>,
        tokens: Numbers,
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra_keys: Option<Vec<Extra<'_>>>,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let keys = Keys::new(salt, adapter, extra_keys);
        slf.get().node.get()?.tiered()?;
        Self::call(slf, async move |node| {
            let (tiered, wait) = node.tiered()?;
            drop(node);
            let timeout = timeout.map_or(wait, |timeout| timeout.0);
            Ok(tiered.bring_back(&keys.get(), &tokens.0, until(timeout)).await?.cached_blocks)
        })
    }

    /// Returns what `/readyz` and `/healthz` of the admin interface answer: `ready`, whether it
    /// should get requests, the `reasons` if not, and the `state`: "ok", "draining" or
    /// "device_lost".
    fn health(&self) -> Outcome<Json> {
        let admin = self.node.get()?.admin();
        let mut health = serde_json::json!(admin.ready());
        health["state"] = serde_json::json!(admin.health().state);
        Ok(Json(health))
    }

    /// Returns the counters of the services by group and name, with `failures` and `last_error`,
    /// and those of the node and its peers, as `/stats` of the admin interface does.
    fn services(slf: &Bound<'_, Self>) -> Outcome<Call> {
        Self::call(slf, async |node| {
            let stats = node.admin().stats().await;
            Ok(Json(stats.map_err(|error| raise("NodeError", error, Vec::new()))?.extra.into()))
        })
    }

    /// Address of the admin interface, if there is one.
    #[getter]
    fn admin_address(&self) -> Outcome<Option<String>> {
        Ok(self.node.get()?.admin_address().map(ToString::to_string))
    }

    /// Addresses of the events and of their replays, as far as they are published.
    #[getter]
    fn event_addresses(&self) -> Outcome<Vec<String>> {
        let node = self.node.get()?;
        let (events, replay) = node.served().map(Served::event_addresses).unwrap_or_default();
        Ok([events, replay].into_iter().flatten().map(|address| format!("tcp://{address}")).collect())
    }

    /// Its name.
    #[getter]
    fn name(&self) -> Outcome<String> {
        Ok(self.node.get()?.name().to_owned())
    }

    /// Addresses at which peers reach it, with the ports that the system selected.
    #[getter]
    fn addresses(&self) -> Outcome<Vec<String>> {
        Ok(self.node.get()?.addresses().iter().map(ToString::to_string).collect())
    }

    /// Replaces the configured peers: addresses by name.
    fn set_peers(&self, peers: HashMap<String, String>) -> Outcome<()> {
        let peers: Outcome<Vec<_>> =
            peers.iter().map(|(name, text)| Ok(PeerSettings::new(name, address(text)?))).collect();
        self.node.get()?.set_peers(peers?);
        Ok(())
    }

    /// Returns counts since it began.
    fn stats(&self) -> Outcome<NodeStats> {
        let counters = self.node.get()?.counters();
        let NodeCounters { sent, received, refused, failed, bad_blocks, .. } = counters;
        let NodeCounters { damaged_blocks, in_doubt, sent_bytes, .. } = counters;
        Ok(NodeStats { sent, received, refused, failed, bad_blocks, damaged_blocks, in_doubt, sent_bytes })
    }

    /// Returns the peers, and whether a link to each is up.
    fn peers(slf: &Bound<'_, Self>) -> Outcome<Call> {
        Self::call(slf, async |node| Ok(node.peers().await?.into_iter().collect::<HashMap<_, _>>()))
    }

    /// Returns the migrations under way and the latest that ended, the newest first.
    fn migrations(slf: &Bound<'_, Self>) -> Outcome<Call> {
        Self::call(slf, async |node| {
            let records = node.migrations().await?.into_iter().map(|record| MigrationState {
                id: record.id,
                peer: record.peer,
                sequence: record.sequence,
                state: format!("{:?}", record.state).to_lowercase(),
                blocks: record.blocks,
                bytes: record.bytes,
                time_ms: record.time_ms,
                reason: record.reason,
            });
            Ok(records.collect::<Vec<_>>())
        })
    }

    /// Declares that the process of a peer has ended and will not come back, and returns the ids of
    /// the sequences that were in doubt and are this node's own again. If it lives, both may run
    /// them, and what it still writes by RDMA damages blocks of others. A peer with a link is
    /// refused.
    fn declare_ended(slf: &Bound<'_, Self>, peer: String) -> Outcome<Call> {
        Self::call(slf, async move |node| Ok(node.declare_ended(&peer).await?))
    }

    fn __aiter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __anext__(&self) -> Outcome<Call> {
        // Also of a closed node: what has arrived is there, before the end.
        self.node.check()?;
        let arrivals = Arc::clone(self.arrivals.get());
        let returned = Arc::clone(&self.returned);
        Ok(Call::new(move |caller| {
            let ended = || Failure::from(PyStopAsyncIteration::new_err("the node has ended"));
            caller.start(async move {
                let next = || async { arrivals.lock().await.recv().await.map(Arrived) };
                let arrived = returned.or_next(next).await.ok_or_else(ended)?;
                Ok(Received::new(arrived, &returned))
            })
        }))
    }

    /// Ends the node in an orderly way: no migration begins, those under way finish, the tier and
    /// subscribers get the last blocks and events. All has `patience` seconds, by default those of
    /// `drain`, or 10. Returns whether no migration was left. Closes the node.
    #[pyo3(signature = (patience=None))]
    fn shutdown(slf: &Bound<'_, Self>, patience: Option<Seconds>) -> Outcome<Call> {
        let this = slf.clone().unbind();
        Self::call(slf, async move |node| {
            let patience = patience.map(|patience| patience.0).or(node.served().map(Served::drain));
            let patience = patience.unwrap_or(PATIENCE);
            let is_over = match node.served() {
                Some(served) => {
                    let deadline = until(patience);
                    let is_over = served.leave(deadline).await;
                    served.end(deadline).await;
                    is_over
                }
                None => node.shutdown(patience).await,
            };
            this.get().node.close()?;
            Ok(is_over)
        })
    }

    /// Ends the node at once: migrations under way fail, and their sequences stay. Its ports are
    /// free shortly afterwards; `shutdown`, also with `patience=0`, waits until they are.
    fn close(&self) -> Outcome<()> {
        self.node.close()
    }

    fn __repr__(&self) -> Outcome<String> {
        match self.node.is_closed() {
            true => Ok("<kvpool.Node, closed>".to_owned()),
            false => Ok(format!("<kvpool.Node {}>", self.node.get()?.name())),
        }
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<MigrationState>()?;
    module.add_class::<NodeStats>()?;
    module.add_class::<PyNode>()
}

//! `Tier`: values of one size by key, in a store that processes share.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::{BuildError, Dtype, KvLayout, Pool};
use kvpool_node::Node;
use kvpool_node::admin::Reporters;
use kvpool_node::services::{Prepared, Served};
use kvpool_node::tier::{
    BreakerState, Fingerprint, InProcess, Outcome as Answer, Peer, SharedTier, TierCounters, TierError,
    TierFailure, TierKey, TierReporter, TierSettings,
};
use kvpool_node::transport::tcp::{PeerSettings, Tls, Token};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::{Count, Seconds};
use crate::call::Call;
use crate::error::{Failure, Outcome, fields, invalid, kind, raise};
use crate::exclusive::Open;
use crate::log;
use crate::pool::PyPool;
use crate::record::record;
use crate::runtime::wait;
use crate::settings::{address as address_of, apart, sources};
use crate::values::{Sources, Targets, block_bytes};

/// The longest time that a call may wait: 30 years.
const FAR: Duration = Duration::from_secs(30 * 365 * 86_400);

/// Key of the hashing of pools of values. They hash no tokens, but nodes that exchange blocks have the same
/// key.
const HASH_KEY: [u8; 32] = *b"kvpool values by key, version 1.";

record! {
    /// Counts since a tier began, and its state.
    TierStats {
        /// Values that the store confirmed.
        stored: u64,
        /// Values that were read and verified.
        hits: u64,
        /// Keys to be read that the store did not have, or found damaged.
        misses: u64,
        /// Keys whose operation failed, for any reason.
        failed: u64,
        /// Values that were not what their keys say: found here, and failed, or found damaged by
        /// the node, which dropped them, and missed.
        bad_values: u64,
        /// Keys that had no answer by the deadline of their call.
        overdue: u64,
        /// Values that the store declined by its settings.
        declined: u64,
        /// Values that were dropped because too many waited.
        dropped_puts: u64,
        /// Keys that were looked up without being read.
        lookups: u64,
        /// Bytes that were read, with headers.
        read_bytes: u64,
        /// Bytes that were stored, with headers.
        written_bytes: u64,
        /// Times that the circuit breaker opened.
        breaker_opened: u64,
        /// Whether the store failed several times in a row, and is not asked for a while.
        is_open: bool,
        /// The latest failure, as text.
        last_failure: Option<String>,
    }
}

impl TierStats {
    fn new(counters: TierCounters, last_failure: Option<String>) -> Self {
        let TierCounters { stored, hits, misses, failed, bad_values, overdue, dropped_puts, .. } = counters;
        let TierCounters { declined, lookups, read_bytes, written_bytes, breaker_opened, breaker, .. } =
            counters;
        let is_open = breaker != BreakerState::Closed;
        Self {
            stored,
            hits,
            misses,
            failed,
            bad_values,
            overdue,
            declined,
            dropped_puts,
            lookups,
            read_bytes,
            written_bytes,
            breaker_opened,
            is_open,
            last_failure,
        }
    }
}

/// Values of one size by key, in a store that several processes share, a kvpool node, or in one of
/// this process: its memory, or a directory on a local drive, which survives a restart
/// (`Tier.from_settings({"tier": "file:///var/cache/kvpool?size=200GiB", ...})`).
///
/// Keys are bytes. Values are contiguous buffers of `value_bytes` bytes. `namespace` names what the
/// keys do not: the model, and the revision of its weights. Tiers with the same size and namespace
/// share values.
///
/// Calls return one word per key, in order, by their deadline:
///
/// - "stored": the store has confirmed the value;
/// - "hit": the value was verified, and is in its buffer (of `exists`: a get is worth a try);
/// - "miss": the store does not have it;
/// - "late": the deadline passed;
/// - "busy": too many values wait to be stored, or too many keys to be looked up, and this one was dropped;
/// - "declined": the store did not take the value, by its settings: a local drive that is full
///   takes a new key when it is put for the second time;
/// - "failed": the store failed, or what it has is not the value. `stats().last_failure` has the reason.
///
/// The store is not trusted, and no failure of it raises. When a call has returned, or was cancelled,
/// no byte of its buffers is written any more. The buffer of a key without a hit is as before, but for
/// "late": its value may have come just then.
/// All methods are safe to call from any thread, and release the GIL.
#[pyclass(frozen, name = "Tier", module = "kvpool._kvpool")]
pub struct PyTier {
    tier: Open<Shared>,
    value_bytes: usize,
}

/// The tier, with what calls need of it.
struct Shared {
    tier: Arc<SharedTier>,
    fingerprint: Fingerprint,
    /// What its settings started beside it, dropped with it.
    _served: Option<Served>,
}

impl From<TierError> for Failure {
    fn from(error: TierError) -> Self {
        let class = match error {
            TierError::Namespace | TierError::OutOfRange { .. } => "InvalidArgument",
            _ => "NodeError",
        };
        raise(class, &error, fields![kind: kind(&error)])
    }
}

/// Returns the words for the outcomes of a call.
fn words(outcomes: &[Answer]) -> Vec<&'static str> {
    let word = |outcome: &Answer| match outcome {
        Answer::Stored => "stored",
        Answer::Hit => "hit",
        Answer::Miss => "miss",
        Answer::InFlight | Answer::Failed(TierFailure::Late) => "late",
        Answer::Failed(TierFailure::Busy) => "busy",
        Answer::Declined => "declined",
        _ => "failed",
    };
    outcomes.iter().map(word).collect()
}

impl Shared {
    async fn exists(self: Arc<Self>, keys: Vec<TierKey>, until: Instant) -> Outcome<Vec<&'static str>> {
        Ok(words(&self.tier.exists(keys, until).await))
    }

    async fn put(
        self: Arc<Self>,
        keys: Vec<TierKey>,
        sources: Sources,
        until: Instant,
    ) -> Outcome<Vec<&'static str>> {
        // Not on a thread of the runtime: there may be many bytes.
        let count = keys.len();
        let copied = tokio::task::spawn_blocking(move || sources.read(&keys, until)).await;
        let values = copied.map_err(|error| raise("Closed", error, Vec::new()))?;
        let mut outcomes = if values.is_empty() { Vec::new() } else { self.tier.put(values, until).await };
        // Their turn to be copied came too late.
        outcomes.resize(count, Answer::Failed(TierFailure::Late));
        Ok(words(&outcomes))
    }

    async fn get(
        self: Arc<Self>,
        keys: Vec<TierKey>,
        targets: Targets,
        until: Instant,
    ) -> Outcome<Vec<&'static str>> {
        let outcomes = self.tier.get(targets.reads(&keys), until).await;
        // Of a key in flight, before the caller knows.
        drop(targets);
        Ok(words(&outcomes))
    }
}

/// Returns the end of a wait.
pub fn until(timeout: Duration) -> Instant {
    Instant::now() + timeout.min(FAR)
}

/// Largest value, in bytes.
const VALUE_MAX: usize = 1 << 40;

/// Returns the namespace of values of this size. Pools round sizes up: without it, values of two sizes
/// could be under one key. An empty namespace stays empty, and is refused.
fn sized(namespace: &str, value_bytes: usize) -> String {
    if namespace.is_empty() { String::new() } else { format!("{value_bytes} {namespace}") }
}

/// Builds a pool of values.
fn pool_of(value_bytes: usize, values: usize, has_storage: bool) -> Outcome<Pool> {
    let config = PrefixConfig::new().key(HashKey::from_bytes(HASH_KEY));
    let builder =
        Pool::builder(layout(value_bytes)?).blocks(values).without_null_block().prefix_cache(config);
    Ok(if has_storage { builder } else { builder.without_storage() }.build()?)
}

/// Returns the layout of blocks that hold a value: bytes without a meaning for the pool.
fn layout(value_bytes: usize) -> Outcome<KvLayout> {
    if value_bytes > VALUE_MAX {
        return Err(invalid(format!("a value cannot have {value_bytes} bytes; it has at most {VALUE_MAX}")));
    }
    let builder = KvLayout::builder().layers(1).latent(block_bytes(value_bytes)).block_tokens(1);
    Ok(builder.dtype(Dtype::Int8).build().map_err(BuildError::from)?)
}

/// Returns the pool through which values of a namespace pass, and the namespace with their size.
fn passing(py: Python<'_>, value_bytes: Count, window: Count, namespace: &str) -> Outcome<(Pool, String)> {
    let pool = py.detach(|| pool_of(value_bytes.0, window.0, true))?;
    Ok((pool, sized(namespace, value_bytes.0)))
}

fn limits(threads: Count, puts: Count, patience: Seconds, rest: Seconds) -> TierSettings {
    let mut settings = TierSettings::default();
    (settings.calls, settings.puts_max) = (threads.0, puts.0);
    (settings.patience, settings.rest, settings.failed_for) = (patience.0, rest.0, rest.0);
    settings
}

/// Returns the tier whose store is a peer of a node.
fn over_node(node: Arc<Node>, peer: &str, namespace: &str, limits: TierSettings) -> Outcome<Arc<SharedTier>> {
    let peer = Peer::new(node, peer, namespace, limits.patience)?;
    Ok(Arc::new(SharedTier::new(peer, limits)?))
}

/// A name that no other process has.
fn some_name() -> String {
    // Randomly seeded, for each of them.
    let number = RandomState::new().build_hasher().finish();
    format!("tier-{}-{number:016x}", std::process::id())
}

impl PyTier {
    fn over(
        tier: Arc<SharedTier>,
        fingerprint: Fingerprint,
        value_bytes: usize,
        served: Option<Served>,
    ) -> Self {
        let shared = Shared { tier, fingerprint, _served: served };
        Self { tier: Open::new("tier", shared), value_bytes }
    }

    /// Reads the keys of a call.
    fn keys(&self, keys: &Bound<'_, PyAny>) -> Outcome<(Arc<Shared>, Vec<TierKey>)> {
        let shared = self.tier.share()?;
        let mut named = Vec::new();
        for (index, key) in keys.try_iter()?.enumerate() {
            let key = key?;
            let key = key.cast::<PyBytes>().map_err(|_| {
                invalid(format!(
                    "entry {index}: a key is an object of type bytes, and not {}",
                    key.get_type()
                ))
            })?;
            named.push(TierKey::named(shared.fingerprint, key.as_bytes()));
        }
        Ok((shared, named))
    }
}

#[pymethods]
impl PyTier {
    /// Shares values through a kvpool node, which has the name `peer` at this address.
    ///
    /// The node's pool is `Tier.pool(value_bytes=..., values=...)`. It need not be there yet, and
    /// may restart: the first calls wait for the link, the later ones fail while there is none.
    /// Addresses are "host:port" or "unix:/path"; `token` and `tls` are as those of `Node`. `name`
    /// is the name of this end, by default a random one.
    ///
    /// Values pass through memory for `window` values here, in `threads` calls at a time. At most
    /// `puts` values wait to be stored. A call of the node that takes longer than `patience`
    /// seconds fails; after a few failures in a row the node is not asked for `rest` seconds, and a
    /// key that failed is not asked for that long either.
    #[staticmethod]
    #[pyo3(signature = (peer, address, *, value_bytes, namespace, name=None, token=None, tls=None, window=Count(64), threads=Count(2), puts=Count(64), patience=Seconds(Duration::from_secs(1)), rest=Seconds(Duration::from_secs(5))), text_signature = "(peer, address, *, value_bytes, namespace, name=None, token=None, tls=None, window=64, threads=2, puts=64, patience=1.0, rest=5.0)")]
    #[allow(clippy::too_many_arguments)]
    fn peer(
        py: Python<'_>,
        peer: &str,
        address: &str,
        value_bytes: Count,
        namespace: &str,
        name: Option<String>,
        token: Option<&Bound<'_, PyBytes>>,
        tls: Option<(Vec<u8>, Vec<u8>, Vec<u8>)>,
        window: Count,
        threads: Count,
        puts: Count,
        patience: Seconds,
        rest: Seconds,
    ) -> Outcome<Self> {
        let limits = limits(threads, puts, patience, rest);
        let token = token.map(|token| Token::new(token.as_bytes())).transpose()?;
        let at = PeerSettings::new(peer, address_of(address)?);
        let (pool, namespace) = passing(py, value_bytes, window, namespace)?;
        let fingerprint = Fingerprint::of(&pool, &namespace)?;
        let mut builder = Node::builder(pool).name(name.unwrap_or_else(some_name)).peers(vec![at]);
        if let Some(token) = token {
            builder = builder.token(token);
        }
        if let Some((certificates, key, authorities)) = tls {
            builder = builder.tls(Tls::mutual(&certificates, &key, &authorities)?);
        }
        let started = wait(py, async move {
            log::start()?;
            let (node, _) = builder.start().await?;
            over_node(Arc::new(node), peer, &namespace, limits)
        })?;
        Ok(Self::over(started?, fingerprint, value_bytes.0, None))
    }

    /// Shares values through the store that `settings` of `kvpool serve` name, a file or a mapping:
    /// that of `tier`, or else the one node of `peers`. An admin interface in them reports this
    /// tier.
    ///
    /// The other arguments are those of `peer`; of a store, `tier_threads` and `tier_patience` are
    /// the settings', and `tier_namespace` is added to `namespace`. By default, the name of this
    /// end is a random one, and it has no admin interface.
    #[staticmethod]
    #[pyo3(signature = (settings, *, value_bytes, namespace, window=Count(64), threads=Count(2), puts=Count(64), patience=Seconds(Duration::from_secs(1)), rest=Seconds(Duration::from_secs(5))), text_signature = "(settings, *, value_bytes, namespace, window=64, threads=2, puts=64, patience=1.0, rest=5.0)")]
    #[allow(clippy::too_many_arguments)]
    fn from_settings(
        py: Python<'_>,
        settings: &Bound<'_, PyAny>,
        value_bytes: Count,
        namespace: &str,
        window: Count,
        threads: Count,
        puts: Count,
        patience: Seconds,
        rest: Seconds,
    ) -> Outcome<Self> {
        let limits = limits(threads, puts, patience, rest);
        let sources = sources(settings)?;
        let (pool, named) = passing(py, value_bytes, window, namespace)?;
        wait(py, async move {
            log::start()?;
            let of = pool.clone();
            let mut prepared =
                apart(move || Ok(Prepared::new(sources.load_for_client(&of, &some_name())?)?)).await?;
            let (store, settings) = (prepared.take_store(), prepared.settings());
            let shared = settings.tier.as_ref().filter(|_| !named.is_empty());
            let shared = shared.map(|tier| format!("{} {named}", tier.namespace));
            let (namespace, peers) = (shared.unwrap_or(named), settings.peers.clone());
            let fingerprint = Fingerprint::of(&pool, &namespace)?;
            let reporters = Reporters::new();
            let (served, _) = prepared.start(&pool, reporters.clone()).await?.serve(|node| node).await?;
            let tier = match (store, &*peers) {
                (Some(store), _) => store,
                (None, [peer]) => over_node(served.node().clone(), &peer.name, &namespace, limits)?,
                (None, peers) => {
                    let message = format!(
                        "settings: name a store as `tier`, or one node in `peers` and not {}",
                        peers.len()
                    );
                    return Err(raise("InvalidArgument", message, fields![setting: "peers"]));
                }
            };
            reporters.add(TierReporter::without_pool(tier.name(), &tier));
            Outcome::Ok(Self::over(tier, fingerprint, value_bytes.0, Some(served)))
        })?
    }

    /// Keeps values in the memory of this process, of at most `bytes_max` bytes; the oldest are
    /// forgotten. Each tier that this makes has values of its own.
    #[staticmethod]
    #[pyo3(signature = (bytes_max, *, value_bytes, namespace))]
    fn in_process(bytes_max: Count, value_bytes: Count, namespace: &str) -> Outcome<Self> {
        let namespace = sized(namespace, value_bytes.0);
        let fingerprint = Fingerprint::of(&pool_of(value_bytes.0, 1, false)?, &namespace)?;
        let tier = SharedTier::new(InProcess::new(bytes_max.0), TierSettings::default())?;
        Ok(Self::over(Arc::new(tier), fingerprint, value_bytes.0, None))
    }

    /// Builds the pool of a node that holds values: `values` of them, of `value_bytes` bytes each. The
    /// least recently used are evicted.
    #[staticmethod]
    #[pyo3(signature = (*, value_bytes, values))]
    fn pool(py: Python<'_>, value_bytes: Count, values: Count) -> Outcome<PyPool> {
        Ok(PyPool::over(py.detach(|| pool_of(value_bytes.0, values.0, true))?, -1))
    }

    /// Size of each value.
    #[getter]
    fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    /// Asks for each key whether a get is worth a try: "hit" or "miss". No value is read.
    #[pyo3(signature = (keys, *, timeout=Seconds(Duration::from_secs(1))), text_signature = "($self, keys, *, timeout=1.0)")]
    fn exists(slf: Bound<'_, Self>, keys: &Bound<'_, PyAny>, timeout: Seconds) -> Outcome<Call> {
        let (shared, keys) = slf.get().keys(keys)?;
        Ok(Call::new(move |caller| caller.waits(shared.exists(keys, until(timeout.0)))))
    }

    /// Stores the values in these buffers: "stored", or why not. The bytes are copied first, as many as
    /// can be by the deadline; they must not change before the call returns.
    #[pyo3(signature = (keys, buffers, *, timeout=Seconds(Duration::from_secs(1))), text_signature = "($self, keys, buffers, *, timeout=1.0)")]
    fn put(&self, keys: &Bound<'_, PyAny>, buffers: &Bound<'_, PyAny>, timeout: Seconds) -> Outcome<Call> {
        let (shared, keys) = self.keys(keys)?;
        let sources = Sources::new(buffers, keys.len(), self.value_bytes)?;
        Ok(Call::new(move |caller| caller.waits(shared.put(keys, sources, until(timeout.0)))))
    }

    /// Reads values into these writable buffers, which do not overlap: "hit", or why not. Buffers of
    /// keys without a hit are as before, but those of "late" keys may have got their values.
    #[pyo3(signature = (keys, buffers, *, timeout=Seconds(Duration::from_secs(1))), text_signature = "($self, keys, buffers, *, timeout=1.0)")]
    fn get(&self, keys: &Bound<'_, PyAny>, buffers: &Bound<'_, PyAny>, timeout: Seconds) -> Outcome<Call> {
        let (shared, keys) = self.keys(keys)?;
        let targets = Targets::new(buffers, keys.len(), self.value_bytes)?;
        Ok(Call::new(move |caller| caller.waits(shared.get(keys, targets, until(timeout.0)))))
    }

    /// Returns counts since it began, and its state.
    fn stats(&self) -> Outcome<TierStats> {
        let shared = self.tier.get()?;
        let last = shared.tier.failures().last_error();
        Ok(TierStats::new(shared.tier.counters(), last.map(|(reason, _)| reason)))
    }

    /// Ends it: calls under way fail for the keys that were not asked for yet, and its link ends.
    fn close(&self) -> Outcome<()> {
        if !self.tier.is_closed() {
            self.tier.get()?.tier.close();
        }
        self.tier.close()
    }

    fn __repr__(&self) -> Outcome<String> {
        match self.tier.is_closed() {
            true => Ok("<kvpool.Tier, closed>".to_owned()),
            false => Ok(format!(
                "<kvpool.Tier {}, values of {} bytes>",
                self.tier.get()?.tier.name(),
                self.value_bytes
            )),
        }
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TierStats>()?;
    module.add_class::<PyTier>()
}

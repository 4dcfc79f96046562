//! `Pool`: construction, and the calls that do not wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::compact::CompactionState;
use kvpool::prefix::policy::PolicyKind;
use kvpool::prefix::{HashKey, Hashing, PrefixConfig};
use kvpool::storage::groups::LayerGroups;
use kvpool::{
    AdmitRequest, KvLayout, LowestPriorityFirst, Pool, PoolBuilder, SequenceBuilder, SequenceId, SessionId,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::{
    Blocks, Count, Extra, Id, Key, Keys, Place, Rank, Session, Stream, Tenant, Tokens, range, request,
};
use crate::batch::{PyBatch, check_batches};
use crate::buffers::Numbers;
use crate::error::{Outcome, fields, invalid, raise};
use crate::exclusive::{InUse, Open};
use crate::handle::{BlockState, PyHandle};
use crate::hints::limits;
use crate::layout::PyLayout;
use crate::lease::PyLease;
use crate::sequence::PySequence;
use crate::stats::{Audit, Candidate, FragmentationState, RunsPerSequence, Stats};
use crate::tenants::tenant_limits;
use crate::tensor::{Owner, PyTensor, tile, whole};
use crate::views::PoolViews;

/// Time that threads which have ended for Python get to end for the system.
const AUDIT_PATIENCE: Duration = Duration::from_millis(100);

/// A pool of KV-cache blocks.
///
/// `Pool(layout, blocks)` reserves host memory for `blocks` blocks, and one more for the null
/// block.
///
/// - `blocks_max`: size up to which `resize` can grow it.
/// - `reserve`: blocks that only urgent requests get.
/// - `prefix_cache`: True or the name of an eviction policy: "lru", "priority" or "sessions".
/// - `events`: number of the cache's events that subscribers can receive late.
/// - `hashing`: "fast" (default), or "keyed" for hostile tenants; `hash_key`: 32 bytes, the same in
///   all processes whose caches exchange blocks; random by default. They and `events` are refused
///   without a prefix cache.
/// - `hints`: True to take hints about sessions and cached blocks (`hint`), or a mapping with
///   limits: `pinned_bytes` at a time (default: a quarter of the pool), `session_bytes` of one
///   session (the whole pool), `tenant_bytes` of the blocks of each tenant (no limit), and
///   `longest`, the seconds of one hint (3,600). Needs a prefix cache.
/// - `tenants`: a mapping from the number of each tenant to its limits, a mapping with `quota`, the
///   bytes that it may hold, and `floor`, those below which no eviction for others takes it; each
///   may be left out. `set_tenant` adds further ones. Needs a prefix cache.
/// - `storage`: False for a pool that only manages frame numbers.
/// - `device`: "host" (default), or "cuda:N" in a build with the feature `cuda`.
/// - `null_block`: whether block 0 in frame 0 is set aside, to pad tables.
/// - `threads`: number of threads expected to use it; sizes caches.
/// - `zero_on_free`: wipe the bytes of freed blocks.
///
/// `Pool.layered` builds one for a model whose layers differ.
///
/// All methods are safe to call from any thread; short ones keep the GIL.
#[pyclass(frozen, name = "Pool", module = "kvpool._kvpool")]
pub struct PyPool {
    pool: Open<Pool>,
    /// Entry of a block table behind the end of a row.
    padding: i32,
    views: Arc<PoolViews>,
    /// Of a pool for a model whose layers differ.
    groups: Option<Arc<LayerGroups>>,
}

impl PyPool {
    /// Wraps a pool. `padding` is the entry of a block table behind the end of a row.
    pub fn over(pool: Pool, padding: i32) -> Self {
        Self { pool: Open::new("pool", pool), padding, views: Arc::default(), groups: None }
    }

    /// Wraps a pool, with a null block, for a model whose layers differ.
    pub fn of_groups(pool: Pool, groups: Arc<LayerGroups>) -> Self {
        Self { groups: Some(groups), ..Self::over(pool, 0) }
    }

    /// Returns the groups of layers, if they differ.
    pub fn layer_groups(&self) -> Option<&Arc<LayerGroups>> {
        self.groups.as_ref()
    }

    /// Returns the pool for the length of a call.
    pub fn get(&self) -> Outcome<InUse<Pool>> {
        self.pool.get()
    }

    /// Returns the pool, for a call that is awaited.
    pub fn share(&self) -> Outcome<Pool> {
        Ok(self.pool.get()?.clone())
    }
}

/// Largest capacity of the ring of events: its memory is taken at the first subscription.
const EVENTS_MAX: usize = 1 << 24;

/// Configures the prefix cache from the arguments of the constructor; `None`: there is none.
pub fn cache_config(
    choice: Option<&Bound<'_, PyAny>>,
    events: Option<Count>,
    hashing: Option<&str>,
    key: Option<Key>,
) -> Outcome<Option<PrefixConfig>> {
    let mut config = PrefixConfig::new();
    let has_cache = match choice.map(|choice| (choice, choice.extract::<bool>())) {
        None => false,
        Some((_, Ok(choice))) => choice,
        Some((choice, Err(_))) => {
            let name = choice.extract::<String>()?;
            let policy = name.parse::<PolicyKind>();
            config = config.policy(policy.map_err(|unknown| {
                raise("BuildError", unknown.to_string(), fields![kind: "UnknownPolicy"])
            })?);
            true
        }
    };
    if !has_cache {
        let given =
            [("events", events.is_some()), ("hashing", hashing.is_some()), ("hash_key", key.is_some())];
        return given.into_iter().find(|&(_, is_given)| is_given).map_or(Ok(None), |(name, _)| {
            let message = format!("`{name}` needs a prefix cache: pass `prefix_cache` too");
            Err(raise("BuildError", message, fields![kind: "NoCache", argument: name]))
        });
    }
    config = config.hashing(match hashing {
        None | Some("fast") => Hashing::Fast,
        Some("keyed") => Hashing::Keyed,
        Some(other) => return Err(invalid(format!("unknown hashing {other:?}; it is fast or keyed"))),
    });
    if let Some(key) = key {
        config = config.key(HashKey::from_bytes(key.0));
    }
    if let Some(events) = events {
        if events.0 > EVENTS_MAX {
            return Err(invalid(format!("{} events; at most {EVENTS_MAX} are possible", events.0)));
        }
        config = config.events(events.0);
    }
    Ok(Some(config))
}

#[cfg(feature = "cuda")]
fn on_device(
    builder: PoolBuilder,
    layout: &KvLayout,
    device: &str,
    frames: (usize, usize),
) -> Outcome<PoolBuilder> {
    use kvpool_cuda::{CudaStorage, Device};
    let ordinal = device.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok());
    let ordinal: usize = ordinal.ok_or_else(|| unknown_device(device))?;
    let failed = |error: kvpool_cuda::CudaError| raise("StorageError", error, fields![device: device]);
    let device = Device::open(ordinal).map_err(failed)?;
    let storage = CudaStorage::new(&device, layout.clone(), frames.0, frames.1)?;
    Ok(builder.storage(Arc::new(storage)))
}

#[cfg(not(feature = "cuda"))]
fn on_device(_: PoolBuilder, _: &KvLayout, device: &str, _: (usize, usize)) -> Outcome<PoolBuilder> {
    if device.strip_prefix("cuda:").is_some_and(|ordinal| ordinal.parse::<u16>().is_ok()) {
        let message = "this build of kvpool has no CUDA; build it with `maturin build --features cuda`";
        return Err(raise("StorageError", message, fields![kind: "NoCuda", device: device]));
    }
    Err(unknown_device(device))
}

fn unknown_device(device: &str) -> crate::error::Failure {
    raise("BuildError", format!("unknown device {device:?}; it is host or cuda:N"), fields![device: device])
}

/// What admissions and openings of sequences have in common.
macro_rules! with_options {
    ($builder:expr, $keys:expr, $priority:expr, $reuse_tail:expr, $session:expr, $tenant:expr) => {{
        let mut builder = $builder.keys($keys.get()).priority($priority.0);
        if let Some(session) = $session {
            builder = builder.session(SessionId(session.0));
        }
        if let Some(tenant) = $tenant {
            builder = builder.tenant(kvpool::TenantId(tenant.0));
        }
        if $reuse_tail { builder.reuse_tail() } else { builder }
    }};
}
pub(crate) use with_options;

#[pymethods]
impl PyPool {
    #[new]
    #[pyo3(signature = (layout, blocks, *, blocks_max=None, reserve=Blocks(0), prefix_cache=None, events=None, hashing=None, hash_key=None, hints=None, tenants=None, storage=true, device=None, null_block=true, threads=None, zero_on_free=false), text_signature = "(layout, blocks, *, blocks_max=None, reserve=0, prefix_cache=None, events=None, hashing=None, hash_key=None, hints=None, tenants=None, storage=True, device=None, null_block=True, threads=None, zero_on_free=False)")]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        layout: PyLayout,
        blocks: Blocks,
        blocks_max: Option<Blocks>,
        reserve: Blocks,
        prefix_cache: Option<Bound<'_, PyAny>>,
        events: Option<Count>,
        hashing: Option<&str>,
        hash_key: Option<Key>,
        hints: Option<Bound<'_, PyAny>>,
        tenants: Option<Bound<'_, PyAny>>,
        storage: bool,
        device: Option<&str>,
        null_block: bool,
        threads: Option<Count>,
        zero_on_free: bool,
    ) -> Outcome<Self> {
        let layout = layout.0;
        let max = blocks_max.map_or(blocks.0, |max| max.0);
        let mut builder = Pool::builder(layout.clone()).blocks(blocks.0).reserve(reserve.0);
        if blocks_max.is_some() {
            builder = builder.blocks_max(max);
        }
        if let Some(threads) = threads {
            builder = builder.threads(threads.0);
        }
        if !null_block {
            builder = builder.without_null_block();
        }
        if zero_on_free {
            builder = builder.zero_on_free();
        }
        if let Some(config) = cache_config(prefix_cache.as_ref(), events, hashing, hash_key)? {
            builder = builder.prefix_cache(config);
        }
        if let Some(limits) = limits(hints.as_ref())? {
            builder = builder.hints(limits);
        }
        if let Some(tenants) = tenant_limits(tenants.as_ref())? {
            builder = builder.tenants(tenants);
        }
        if !storage {
            if let Some(device) = device {
                let message = format!("a pool without storage is on no device, but `device` is {device:?}");
                return Err(raise("BuildError", message, fields![kind: "NoStorage", argument: "device"]));
            }
            builder = builder.without_storage();
        } else if let Some(device) = device.filter(|&device| device != "host") {
            let null = usize::from(null_block);
            builder = on_device(
                builder,
                &layout,
                device,
                (blocks.0.saturating_add(null), max.saturating_add(null)),
            )?;
        }
        // Reserves and maps memory.
        let pool = py.detach(|| builder.build())?;
        Ok(Self::over(pool, if null_block { 0 } else { -1 }))
    }

    /// Shape of the blocks; of a layered pool, the bytes of a frame as elements.
    #[getter]
    fn layout(&self) -> Outcome<PyLayout> {
        Ok(PyLayout(self.get()?.layout().clone()))
    }

    /// Number of blocks, without the null block.
    #[getter]
    fn total_blocks(&self) -> Outcome<usize> {
        Ok(self.get()?.total_blocks())
    }

    /// Number of blocks that an allocation can get without evicting.
    #[getter]
    fn free_blocks(&self) -> Outcome<usize> {
        Ok(self.get()?.free_blocks())
    }

    /// Number of blocks that an allocation can get, if necessary by evicting. Compare it with
    /// `blocks_needed`, which counts the evictable blocks of a cached prefix.
    #[getter]
    fn available_blocks(&self) -> Outcome<usize> {
        Ok(self.get()?.available_blocks())
    }

    /// Number of open sequences.
    #[getter]
    fn sequence_count(&self) -> Outcome<usize> {
        Ok(self.get()?.sequence_count())
    }

    /// Whether the pool's device failed.
    #[getter]
    fn lost(&self) -> Outcome<bool> {
        Ok(self.get()?.is_lost())
    }

    /// Allocates blocks that are free now, or raises OutOfBlocks. Never waits.
    ///
    /// `contiguous` asks for one run of consecutive frames; `pinned` blocks are not moved.
    #[pyo3(signature = (blocks, *, sequence=None, priority=Rank::default(), pinned=false, contiguous=false), text_signature = r#"($self, blocks, *, sequence=None, priority="normal", pinned=False, contiguous=False)"#)]
    fn try_allocate(
        &self,
        blocks: Blocks,
        sequence: Option<Id>,
        priority: Rank,
        pinned: bool,
        contiguous: bool,
    ) -> Outcome<PyLease> {
        let pool = self.get()?;
        Ok(PyLease::new(pool.allocate_owned(request(blocks, sequence, priority, pinned, contiguous))?))
    }

    /// Opens a sequence, with the cached prefix of `tokens` if they are given: its length is then
    /// the number of cached tokens, and the others must be appended.
    ///
    /// Only sequences with equal `salt` and `adapter` share blocks. `extra_keys` are
    /// start, end and key of ranges of tokens, such as images: from these on, keys must be equal
    /// too. `reuse_tail` also allows hits that fill a block in part. `session` is the number of the
    /// conversation that the request continues, `tenant` that of the tenant whose quota its new
    /// blocks count for.
    #[pyo3(signature = (id, tokens=None, *, priority=Rank::default(), salt=None, adapter=None, extra_keys=None, reuse_tail=false, session=None, tenant=None), text_signature = r#"($self, id, tokens=None, *, priority="normal", salt=None, adapter=None, extra_keys=None, reuse_tail=False, session=None, tenant=None)"#)]
    #[allow(clippy::too_many_arguments)]
    fn sequence(
        &self,
        id: Id,
        tokens: Option<Numbers>,
        priority: Rank,
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra_keys: Option<Vec<Extra<'_>>>,
        reuse_tail: bool,
        session: Option<Session>,
        tenant: Option<Tenant>,
    ) -> Outcome<PySequence> {
        let (pool, keys) = (self.get()?, Keys::new(salt, adapter, extra_keys));
        let builder: SequenceBuilder<'_> =
            with_options!(pool.sequence(SequenceId(id.0)), keys, priority, reuse_tail, session, tenant);
        Ok(PySequence::new(match tokens {
            Some(tokens) => builder.tokens(&tokens.0)?,
            None => builder.open()?,
        }))
    }

    /// Opens a sequence with the cached prefix of its prompt, and reserves the blocks for the rest
    /// of it and for `headroom` tokens, or raises OutOfBlocks. Never waits. Admits only if `leave`
    /// blocks stay available besides, for running sequences.
    #[pyo3(signature = (id, prompt, *, headroom=Tokens(0), priority=Rank::default(), salt=None, adapter=None, extra_keys=None, reuse_tail=false, contiguous=false, leave=Count(0), session=None, tenant=None), text_signature = r#"($self, id, prompt, *, headroom=0, priority="normal", salt=None, adapter=None, extra_keys=None, reuse_tail=False, contiguous=False, leave=0, session=None, tenant=None)"#)]
    #[allow(clippy::too_many_arguments)]
    fn try_admit(
        &self,
        id: Id,
        prompt: Numbers,
        headroom: Tokens,
        priority: Rank,
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra_keys: Option<Vec<Extra<'_>>>,
        reuse_tail: bool,
        contiguous: bool,
        leave: Count,
        session: Option<Session>,
        tenant: Option<Tenant>,
    ) -> Outcome<PySequence> {
        let keys = Keys::new(salt, adapter, extra_keys);
        let new = AdmitRequest::new(SequenceId(id.0), &prompt.0).headroom(headroom.0).leave(leave.0);
        let request = with_options!(new, keys, priority, reuse_tail, session, tenant);
        let request = if contiguous { request.contiguous() } else { request };
        Ok(PySequence::new(self.get()?.admit(&request)?))
    }

    /// Returns the number of available blocks that an admission of this request would take now: the
    /// evictable ones of its cached prefix, and those for the rest of it and for `headroom` tokens.
    ///
    /// While no other call uses the pool, no batch is in flight and no request waits, it is
    /// admitted if and only if this is at most `available_blocks`; see the core's documentation for
    /// the exceptions.
    #[pyo3(signature = (prompt, *, headroom=Tokens(0), salt=None, adapter=None, extra_keys=None), text_signature = "($self, prompt, *, headroom=0, salt=None, adapter=None, extra_keys=None)")]
    fn blocks_needed(
        &self,
        prompt: Numbers,
        headroom: Tokens,
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra_keys: Option<Vec<Extra<'_>>>,
    ) -> Outcome<usize> {
        let keys = Keys::new(salt, adapter, extra_keys);
        let request = AdmitRequest::new(SequenceId(0), &prompt.0).headroom(headroom.0).keys(keys.get());
        Ok(self.get()?.blocks_needed(&request)?)
    }

    /// Begins a batch; with `stream`, the address of a CUDA stream, one whose copies and end are in
    /// order with the work on it.
    ///
    /// Raises KvPoolError, of the kind TooManyBatches, if 4,096 batches are in flight.
    #[pyo3(signature = (*, stream=None))]
    fn begin_batch(&self, stream: Option<Stream>) -> Outcome<PyBatch> {
        let pool = self.get()?;
        check_batches(pool.batches_in_flight())?;
        let batch = match stream {
            None => pool.begin_batch(),
            Some(stream) => on_stream(&pool, stream.0)?,
        };
        let on_stream = stream.map(|_| pool.clone());
        Ok(PyBatch::new(batch, self.padding, pool.layout().dtype(), Arc::clone(&self.views), on_stream))
    }

    /// Returns the bytes of one block in one layer, where they are stored: `[block_tokens,
    /// kv_heads, head_dim]`. `place` is the block's index in the lease or sequence; `part` is "k"
    /// or "v", or "k_scales" or "v_scales" of a layout with dynamic scales.
    ///
    /// Writable unless the block is sealed or shared. While the view, or an array made of it,
    /// exists, its block stays allocated and pinned: it is neither moved nor evicted, and its lease
    /// or sequence cannot be closed, truncated, split, forked or moved to another pool. While a
    /// writable one exists, its block does not become final: the batch that filled it does not end
    /// without an exception, and `commit` and `seal` are refused.
    #[pyo3(signature = (owner, place, layer, part="k"))]
    fn view(&self, owner: &Bound<'_, PyAny>, place: Place, layer: Place, part: &str) -> Outcome<PyTensor> {
        let pool = self.get()?;
        let one = |len| range(place, Some(Place(place.0.saturating_add(1))), len, "blocks");
        let _object = owner.clone().unbind();
        if let Ok(lease) = owner.cast::<PyLease>() {
            let entered = lease.get().lease.enter()?;
            let index = one(entered.blocks().len())?.start;
            let handle = entered.handles().nth(index).expect("the index was checked");
            // Pinned first: it stays in its frame, sealed or not.
            let _pin = pool.pin_scoped(handle)?;
            let may_write = || pool.info(handle).map(|info| !info.sealed && info.refs == 1);
            let guard = lease.get().views.begin(&self.views, handle, may_write)?;
            let frame = pool.info(handle)?.frame;
            return tile(&pool, frame, layer, part, Owner { _pin, guard, _object });
        }
        let sequence = owner.cast::<PySequence>().map_err(PyErr::from)?;
        let mut entered = sequence.get().sequence.enter()?;
        let index = one(entered.block_count())?.start;
        // Seals what is due, so that the next append need not.
        if sequence.get().views.are_none() {
            let committed = entered.committed();
            entered.commit(committed)?;
        }
        let handle = entered.handles().nth(index).expect("the index was checked");
        let _pin = pool.pin_scoped(handle)?;
        let is_full = (index + 1) * pool.layout().block_tokens() <= entered.committed();
        // A batch in flight that filled it, before tokens were removed, seals it when it ends.
        let is_promised = !is_full && index < entered.settled_blocks();
        let may_write = || pool.info(handle).map(|info| !info.sealed && info.refs == 1 && !is_promised);
        let guard = sequence.get().views.begin(&self.views, handle, may_write)?;
        if !guard.is_writable() && !is_full {
            // The next append may copy it, and free this one.
            drop(guard);
            let message = format!(
                "block {index} of sequence {} is not full, and shared or final: the next append may replace it",
                entered.id()
            );
            return Err(raise(
                "SequenceError",
                message,
                fields![kind: "NotReadable", sequence: entered.id().0],
            ));
        }
        let frame = pool.info(handle)?.frame;
        tile(&pool, frame, layer, part, Owner { _pin, guard, _object })
    }

    /// Returns the memory of all frames of one layer: `[frames, block_tokens, kv_heads, head_dim]`,
    /// as attention kernels take it. Index it by the frames of a block table.
    ///
    /// Only frames that a batch in flight lists may be accessed, and only blocks written that their
    /// sequence or lease alone owns: the pool does not check it. Memory of frames that a shrink
    /// removes has unspecified bytes on the host, and is gone on a device.
    #[pyo3(signature = (layer, part="k"))]
    fn plane(&self, layer: Place, part: &str) -> Outcome<PyTensor> {
        whole(&*self.get()?, layer, part)
    }

    /// Returns the pool's occupancy.
    fn stats(&self) -> Outcome<Stats> {
        Ok(self.get()?.stats().into())
    }

    /// Returns the fragmentation of the free frames. Scans the bitmaps.
    fn fragmentation(&self) -> Outcome<FragmentationState> {
        Ok(self.get()?.fragmentation().into())
    }

    /// Returns the runs of adjacent frames in the block tables of the open sequences. Reads the
    /// word of each of their blocks.
    fn sequence_runs(&self, py: Python<'_>) -> Outcome<RunsPerSequence> {
        let pool = self.get()?;
        Ok(py.detach(|| pool.sequence_runs()).into())
    }

    /// What the background defragmenter does, or why it rests: "moving", "contiguous", "batches",
    /// "no_gain" or "share". None without one.
    #[getter]
    fn compaction_state(&self) -> Outcome<Option<&'static str>> {
        Ok(self.get()?.compaction_state().map(CompactionState::name))
    }

    /// Returns the open sequences in the order in which to preempt them: lowest priority first.
    fn victims(&self) -> Outcome<Vec<Candidate>> {
        let victims = self.get()?.victims(&LowestPriorityFirst);
        Ok(victims.into_iter().map(Candidate::from).collect())
    }

    /// Returns the state of a block.
    fn info(&self, handle: PyHandle) -> Outcome<BlockState> {
        Ok(self.get()?.info(handle.0)?.into())
    }

    /// Recounts every frame, and the references by their owners, while no thread uses the pool.
    /// Raises AuditError if anything is wrong.
    ///
    /// It tries again for a tenth of a second: `Thread.join` may return before the thread has given
    /// back what it cached of the pool.
    fn audit(&self, py: Python<'_>) -> Outcome<Audit> {
        let pool = self.share()?;
        let until = Instant::now() + AUDIT_PATIENCE;
        let audited = py.detach(|| {
            loop {
                match pool.audit() {
                    Err(_) if Instant::now() < until => std::thread::sleep(AUDIT_PATIENCE / 20),
                    outcome => return outcome,
                }
            }
        });
        Ok(audited?.into())
    }

    /// Gives the free blocks in threads' caches back to all.
    fn trim(&self) -> Outcome<()> {
        self.get()?.trim();
        Ok(())
    }

    /// Closes the pool: later calls on this object raise Closed, and streams of events end. Memory
    /// is returned when its leases, sequences, batches and views are gone too.
    fn close(&self) -> Outcome<()> {
        self.pool.close()
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.pool.is_closed()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) -> Outcome<()> {
        self.close()
    }

    fn __repr__(&self) -> Outcome<String> {
        if self.closed() {
            return Ok("<kvpool.Pool, closed>".to_owned());
        }
        let stats = self.get()?.stats();
        Ok(format!("<kvpool.Pool of {} blocks, {} used, {} free>", stats.total, stats.used, stats.free))
    }

    fn _repr_html_(&self) -> Outcome<String> {
        Ok(Stats::from(self.get()?.stats())._repr_html_())
    }
}

#[cfg(feature = "cuda")]
fn on_stream(pool: &Pool, stream: usize) -> Outcome<kvpool::Batch> {
    use kvpool::storage::DeviceStream;
    let device = pool.storage().map_or(kvpool::DeviceId::Host, |storage| storage.device());
    // SAFETY: the caller passes a live stream of the device, as the documentation asks; it outlives
    // the batch.
    let stream = unsafe { DeviceStream::from_raw(device, stream as *mut std::ffi::c_void, ()) };
    Ok(pool.begin_batch_on(&stream)?)
}

#[cfg(not(feature = "cuda"))]
fn on_stream(_: &Pool, _: usize) -> Outcome<kvpool::Batch> {
    Err(raise("StorageError", "this build of kvpool has no CUDA streams", fields![kind: "NoCuda"]))
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPool>()
}

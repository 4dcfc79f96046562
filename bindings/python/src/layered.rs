//! Pools of models whose layers differ: construction, and admission of grouped sequences.

use std::sync::Arc;

use kvpool::compact::FrameCopier;
use kvpool::storage::{CopyDone, FrameMove};
use kvpool::{
    AdmitRequest, BuildError, DeviceId, Invalid, Pool, SequenceId, SessionId, StorageError, TenantId,
};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::{Blocks, Count, Extra, Id, Key, Keys, Rank, Seconds, Session, Tenant, Tokens, deadline};
use crate::buffers::Numbers;
use crate::call::Call;
use crate::error::{Outcome, fields, raise};
use crate::grouped::PyGroupedSequence;
use crate::hints::limits;
use crate::layers::PyLayerGroups;
use crate::pool::{PyPool, cache_config};
use crate::runtime::{call_python, runtime};
use crate::tenants::tenant_limits;

/// Returns a copier that calls a function of Python, on a thread of its own: a thread that moves
/// blocks may have the GIL, or wait for one that has.
fn copier(function: Py<PyAny>) -> FrameCopier {
    let function = Arc::new(function);
    Arc::new(move |moves: &[FrameMove], done: CopyDone| {
        let pairs: Vec<_> = moves.iter().map(|frames| (frames.src.0, frames.dst.0)).collect();
        let function = Arc::clone(&function);
        let copy = move || {
            let called = call_python(|py| {
                let called = function.call1(py, (pairs,)).map_err(|error| {
                    let reason = error.to_string();
                    // A move that no caller awaits has none to raise it in.
                    error.write_unraisable(py, Some(function.bind(py)));
                    reason
                });
                // Here, with the GIL.
                drop(function);
                called.map(drop)
            });
            done(called.unwrap_or_else(|| Err("the interpreter is ending".to_owned())).map_err(failed));
        };
        match runtime() {
            Ok(runtime) => drop(runtime.spawn_blocking(copy)),
            Err(_) => copy(),
        }
    })
}

fn failed(reason: String) -> StorageError {
    let (device, doing) = (DeviceId::Host, "a copy by the engine");
    StorageError::Device { device, doing, reason: reason.into() }
}

/// An admission, with what it refers to.
struct Admission {
    id: SequenceId,
    prompt: Vec<u32>,
    headroom: usize,
    priority: Rank,
    keys: Keys,
    leave: usize,
    chunk: Option<Tokens>,
    session: Option<Session>,
    tenant: Option<Tenant>,
}

impl Admission {
    fn request(&self) -> AdmitRequest<'_> {
        let request = AdmitRequest::new(self.id, &self.prompt).headroom(self.headroom).leave(self.leave);
        let mut request = request.keys(self.keys.get()).priority(self.priority.0);
        if let Some(chunk) = self.chunk {
            request = request.chunk(chunk.0);
        }
        if let Some(session) = self.session {
            request = request.session(SessionId(session.0));
        }
        match self.tenant {
            Some(tenant) => request.tenant(TenantId(tenant.0)),
            None => request,
        }
    }
}

#[pymethods]
impl PyPool {
    /// Builds a pool for a model whose layers differ: `memory` bytes, the null block among them, or
    /// `blocks` frames beside that one. The other arguments are those of `Pool`.
    ///
    /// The engine holds the bytes: the pool deals out frames of `groups.frame_bytes` bytes. With
    /// `storage`, the pool holds them in host memory (`plane(0)`) and makes all copies; then its
    /// sequences can be swapped (`preempt`, `resume`) and moved to other such pools (`migrate`).
    /// Its sequences are those of `admit_grouped`, with a list of blocks for each frame of a block
    /// of a group, and a run of frames for each state. Calls for other sequences are refused.
    ///
    /// Blocks can be moved if there is a `copier`: a function that takes pairs of frames, from and
    /// to, and returns when the engine has copied the bytes. It is called on another thread, while
    /// nothing writes the first and nothing else uses the second ones, and must not wait for other
    /// calls of this package, nor for the main thread, which may wait for it at the end of the
    /// interpreter for up to two seconds. An exception cancels the moves. An admission that finds
    /// no run for a state then waits while blocks are moved for it. The pool keeps the copier until
    /// it is closed: close it if the copier is a method of an object that has the pool.
    ///
    /// Raises BuildError, also for memory of less than two frames.
    #[staticmethod]
    #[pyo3(signature = (groups, *, memory=None, blocks=None, blocks_max=None, reserve=Blocks(0), prefix_cache=None, events=None, hashing=None, hash_key=None, hints=None, tenants=None, threads=None, copier=None, storage=false), text_signature = "(groups, *, memory=None, blocks=None, blocks_max=None, reserve=0, prefix_cache=None, events=None, hashing=None, hash_key=None, hints=None, tenants=None, threads=None, copier=None, storage=False)")]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn layered(
        py: Python<'_>,
        groups: &Bound<'_, PyLayerGroups>,
        memory: Option<Count>,
        blocks: Option<Blocks>,
        blocks_max: Option<Blocks>,
        reserve: Blocks,
        prefix_cache: Option<Bound<'_, PyAny>>,
        events: Option<Count>,
        hashing: Option<&str>,
        hash_key: Option<Key>,
        hints: Option<Bound<'_, PyAny>>,
        tenants: Option<Bound<'_, PyAny>>,
        threads: Option<Count>,
        copier: Option<Bound<'_, PyAny>>,
        storage: bool,
    ) -> Outcome<Self> {
        let groups = Arc::clone(&groups.get().0);
        let mut builder = Pool::layered(&groups).map_err(BuildError::from)?.reserve(reserve.0);
        builder = match (memory, blocks) {
            (Some(memory), None) => {
                let (bytes, frame_bytes) = (memory.0 as u64, groups.frame_bytes());
                match (bytes / frame_bytes).checked_sub(1) {
                    Some(blocks @ 1..) => builder.blocks(usize::try_from(blocks).unwrap_or(usize::MAX)),
                    _ => {
                        let limit = format!("two frames of {frame_bytes} bytes or more");
                        let invalid = Invalid::new("memory", format_args!("{bytes} bytes"), limit);
                        return Err(BuildError::from(invalid).into());
                    }
                }
            }
            (None, Some(blocks)) => builder.blocks(blocks.0),
            _ => {
                let message = "the size of a pool is either `memory`, in bytes, or `blocks`";
                return Err(raise("BuildError", message, fields![kind: "NoSize"]));
            }
        };
        if let Some(max) = blocks_max {
            builder = builder.blocks_max(max.0);
        }
        if let Some(threads) = threads {
            builder = builder.threads(threads.0);
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
        if let Some(copier) = copier {
            if !copier.is_callable() {
                let message = format!("copier is of {}: it is a function", copier.get_type());
                return Err(PyTypeError::new_err(message).into());
            }
            if storage {
                let message = "a pool with storage copies by itself: pass `copier` or `storage`";
                return Err(raise("BuildError", message, fields![kind: "HasStorage", argument: "copier"]));
            }
            builder = builder.engine_copies(self::copier(copier.unbind()));
        }
        if storage {
            builder = builder.host_storage();
        }
        let pool = py.detach(|| builder.build())?;
        Ok(Self::of_groups(pool, groups))
    }

    /// The groups of layers, of a pool for a model whose layers differ; otherwise None.
    #[getter]
    fn groups(&self) -> Option<PyLayerGroups> {
        self.layer_groups().map(|groups| PyLayerGroups(Arc::clone(groups)))
    }

    /// Opens a sequence in every group of layers, with the longest prefix that is cached in all,
    /// and reserves the blocks for the rest of its prompt and for `headroom` tokens in all groups,
    /// or raises OutOfBlocks. Never waits.
    ///
    /// - `leave`: blocks that stay available besides, for running sequences.
    /// - `chunk`: largest number of tokens of an append. Of layers with a window, blocks for the
    ///   window and one chunk are reserved, not those of the whole prompt; later appends allocate.
    /// - `session`: number of the conversation that the request continues. All but its last two
    ///   checkpoints are then evicted before other cached blocks.
    /// - `tenant`: number of the tenant whose quota its new blocks count for, of all groups.
    #[pyo3(signature = (id, prompt, *, headroom=Tokens(0), priority=Rank::default(), salt=None, adapter=None, extra_keys=None, leave=Count(0), chunk=None, session=None, tenant=None), text_signature = r#"($self, id, prompt, *, headroom=0, priority="normal", salt=None, adapter=None, extra_keys=None, leave=0, chunk=None, session=None, tenant=None)"#)]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn try_admit_grouped(
        &self,
        id: Id,
        prompt: Numbers,
        headroom: Tokens,
        priority: Rank,
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra_keys: Option<Vec<Extra<'_>>>,
        leave: Count,
        chunk: Option<Tokens>,
        session: Option<Session>,
        tenant: Option<Tenant>,
    ) -> Outcome<PyGroupedSequence> {
        let keys = Keys::new(salt, adapter, extra_keys);
        let (id, prompt, headroom, leave) = (SequenceId(id.0), prompt.0, headroom.0, leave.0);
        let admission = Admission { id, prompt, headroom, priority, keys, leave, chunk, session, tenant };
        Ok(PyGroupedSequence::new(self.get()?.admit_grouped(&admission.request())?))
    }

    /// As `try_admit_grouped`, but waits in the queue if necessary: in one place of it for the
    /// blocks of all groups. Raises Timeout after `timeout` seconds. Cancelling passes the turn on.
    #[pyo3(signature = (id, prompt, *, headroom=Tokens(0), priority=Rank::default(), salt=None, adapter=None, extra_keys=None, leave=Count(0), chunk=None, session=None, tenant=None, timeout=None), text_signature = r#"($self, id, prompt, *, headroom=0, priority="normal", salt=None, adapter=None, extra_keys=None, leave=0, chunk=None, session=None, tenant=None, timeout=None)"#)]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn admit_grouped(
        &self,
        id: Id,
        prompt: Numbers,
        headroom: Tokens,
        priority: Rank,
        salt: Option<&Bound<'_, PyBytes>>,
        adapter: Option<&Bound<'_, PyBytes>>,
        extra_keys: Option<Vec<Extra<'_>>>,
        leave: Count,
        chunk: Option<Tokens>,
        session: Option<Session>,
        tenant: Option<Tenant>,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let keys = Keys::new(salt, adapter, extra_keys);
        let pool = self.share()?;
        let (id, prompt, headroom, leave) = (SequenceId(id.0), prompt.0, headroom.0, leave.0);
        let admission = Admission { id, prompt, headroom, priority, keys, leave, chunk, session, tenant };
        Ok(Call::new(move |caller| {
            let until = deadline(timeout);
            caller.start(async move {
                let admitted = pool.admit_grouped_async(&admission.request()).until(until).await?;
                Ok(PyGroupedSequence::new(admitted))
            })
        }))
    }
}

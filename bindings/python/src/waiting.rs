//! The calls of a pool that wait: awaited on asyncio, or blocking without the GIL.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use kvpool::compact::{DefragOptions, ResizeOptions};
use kvpool::{
    AdmitRequest, AllocRequest, AnySequence, GroupedSequence, MigrationReport, Order, Pool, Preempt,
    ResumeOptions, Sequence, SequenceId, SessionId, TransferError,
};
use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::args::{
    BatchNumber, Blocks, Count, Extra, Id, Keys, Rank, RunOrder, Seconds, Session, Tenant, Tokens, deadline,
    request,
};
use crate::buffers::Numbers;
use crate::call::Call;
use crate::error::{Failure, Outcome, fields, raise};
use crate::exclusive::Lent;
use crate::grouped::PyGroupedSequence;
use crate::lease::PyLease;
use crate::pool::{PyPool, with_options};
use crate::runtime::runtime;
use crate::sequence::PySequence;
use crate::stats::{DefragmentReport, Migrated, PreemptReport, Resized};

async fn allocate(pool: Pool, request: AllocRequest, until: Option<Instant>) -> Outcome<PyLease> {
    Ok(PyLease::new(pool.allocate_async(request).until(until).await?))
}

/// An admission, with what it refers to.
struct Admission {
    pool: Pool,
    id: SequenceId,
    prompt: Vec<u32>,
    headroom: usize,
    priority: Rank,
    keys: Keys,
    reuse_tail: bool,
    contiguous: bool,
    leave: usize,
    session: Option<Session>,
    tenant: Option<Tenant>,
}

impl Admission {
    async fn admit(self, until: Option<Instant>) -> Outcome<PySequence> {
        let new = AdmitRequest::new(self.id, &self.prompt).headroom(self.headroom).leave(self.leave);
        let request =
            with_options!(new, self.keys, self.priority, self.reuse_tail, self.session, self.tenant);
        let request = if self.contiguous { request.contiguous() } else { request };
        Ok(PySequence::new(self.pool.admit_async(&request).until(until).await?))
    }
}

async fn reserve(pool: Pool, mut lent: Lent<Sequence>, tokens: usize, until: Option<Instant>) -> Outcome<()> {
    Ok(pool.reserve_async(lent.value(), tokens).until(until).await?)
}

async fn reserve_grouped(
    pool: Pool,
    mut lent: Lent<GroupedSequence>,
    tokens: usize,
    until: Option<Instant>,
) -> Outcome<()> {
    Ok(pool.reserve_grouped_async(lent.value(), tokens).until(until).await?)
}

async fn defragment(pool: Pool, options: DefragOptions) -> Outcome<DefragmentReport> {
    Ok(pool.defragment_with(options).await?.into())
}

async fn resize(pool: Pool, blocks: usize, options: ResizeOptions) -> Outcome<Resized> {
    Ok(pool.resize_with(blocks, options).await?.into())
}

fn defragment_options(order: Option<RunOrder>, budget_bytes: Option<Count>) -> DefragOptions {
    let mut options = DefragOptions::new();
    if let Some(RunOrder(order)) = order {
        options = options.order(Order(order));
    }
    if let Some(Count(bytes)) = budget_bytes {
        options = options.budget_bytes(bytes as u64);
    }
    options
}

fn resize_options(patience: Option<Seconds>) -> ResizeOptions {
    patience.map_or_else(ResizeOptions::new, |Seconds(patience)| ResizeOptions::new().patience(patience))
}

/// Longer than any batch runs.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 86_400);

/// Where a sequence goes.
enum To {
    Pool(Pool),
    Node(String),
}

impl To {
    fn of(target: &Bound<'_, PyAny>) -> Outcome<Self> {
        if let Ok(pool) = target.cast::<PyPool>() {
            return Ok(Self::Pool(pool.get().share()?));
        }
        let name = target.extract::<String>();
        name.map(Self::Node)
            .map_err(|_| PyTypeError::new_err("the target is a Pool, or the name of a node").into())
    }
}

/// A sequence that can go to another pool.
pub(crate) trait Leaves: AnySequence {
    /// Makes its object.
    fn object(self, py: Python<'_>) -> PyResult<Py<PyAny>>;

    /// Returns its first list, to which each batch appends.
    fn first_list(&self) -> &Sequence;
}

impl Leaves for Sequence {
    fn object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        PySequence::new(self).into_py_any(py)
    }

    fn first_list(&self) -> &Sequence {
        self
    }
}

impl Leaves for GroupedSequence {
    fn object(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        PyGroupedSequence::new(self).into_py_any(py)
    }

    fn first_list(&self) -> &Sequence {
        self.group(0)
    }
}

/// The object of a sequence that leaves.
enum Leaving {
    One(Py<PySequence>),
    Grouped(Py<PyGroupedSequence>),
}

impl Leaving {
    fn of(sequence: &Bound<'_, PyAny>) -> Outcome<Self> {
        if let Ok(sequence) = sequence.cast::<PySequence>() {
            return Ok(Self::One(sequence.clone().unbind()));
        }
        let grouped = sequence.cast::<PyGroupedSequence>().map(|sequence| sequence.clone().unbind());
        grouped
            .map(Self::Grouped)
            .map_err(|_| PyTypeError::new_err("the sequence is a Sequence or a GroupedSequence").into())
    }
}

/// What a migration came to: the sequence in another pool, or none here if it went to a node, and
/// the report. Dropped before it is delivered, the copy is closed, and the sequence stays where it
/// was.
struct Moved<S: Leaves> {
    copy: Option<S>,
    report: MigrationReport,
    /// Of a migration to a pool of this process.
    source: Option<Lent<S>>,
}

impl<'py, S: Leaves> IntoPyObject<'py> for Moved<S> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    /// Closes the sequence at its source.
    fn into_pyobject(mut self, py: Python<'py>) -> PyResult<Self::Output> {
        let copy = self.copy.take().map(|copy| copy.object(py)).transpose()?;
        drop(self.source.as_mut().map(Lent::take));
        (copy, Migrated::from(self.report)).into_bound_py_any(py)
    }
}

/// The sequence is copied: dropping the future leaves it as it was.
async fn move_to<S: Leaves>(
    pool: Pool,
    mut lent: Lent<S>,
    to: Pool,
    until: Option<Instant>,
) -> Outcome<Moved<S>> {
    let (copy, report) = replicate(&pool, lent.value(), &to, until).await?;
    Ok(Moved { copy: Some(copy), report, source: Some(lent) })
}

/// To a node, the migration goes on in a task when the future is dropped, because the node may have
/// the sequence already.
async fn migrate<S: Leaves>(
    pool: Pool,
    mut lent: Lent<S>,
    to: To,
    until: Option<Instant>,
) -> Outcome<Moved<S>> {
    match to {
        To::Pool(to) => move_to(pool, lent, to, until).await,
        To::Node(name) => {
            // Before the wait for the sequence.
            if let Err(error) = pool.remote(&name) {
                let message = error.to_string();
                return Err(refused(error, message));
            }
            detached(async move {
                let sequence = lent.take();
                if let Some(until) = until {
                    // At the deadline the migration refuses the sequence.
                    let _ = pool.settled(sequence.first_list()).until(until).await;
                }
                match pool.migrate_to_node(sequence, &name).await {
                    Ok(report) => Ok(Moved { copy: None, report, source: None }),
                    Err(error) => Err(put_back(lent, error)),
                }
            })
            .await
        }
    }
}

/// Puts the sequence of a failed migration back. One that another node may have stays closed here.
fn put_back<S: Leaves>(mut lent: Lent<S>, error: kvpool::MigrateError<S>) -> Failure {
    let is_in_doubt = matches!(error.error, TransferError::InDoubt { .. });
    let message = error.to_string();
    let kvpool::MigrateError { error: reason, sequence } = error;
    if is_in_doubt {
        drop(sequence);
    } else {
        lent.put(*sequence);
    }
    drop(lent);
    refused(reason, message)
}

/// Returns the exception for a migration that failed for this reason.
fn refused(reason: TransferError, message: String) -> Failure {
    match reason {
        TransferError::Node { .. }
        | TransferError::OtherLayout { .. }
        | TransferError::UnknownNode { .. }
        | TransferError::InDoubt { .. } => {
            raise("MigrateError", message, fields![kind: crate::error::kind(&reason)])
        }
        reason => reason.into(),
    }
}

/// What a preemption came to. Dropped before it is delivered, it has no effect: the copy in the
/// other pool is closed, and the sequence stays where it was.
struct Preempting<S: Leaves> {
    copy: Option<S>,
    source: Lent<S>,
    pool: Pool,
}

impl<S: Leaves> Preempting<S> {
    /// Closes the sequence.
    fn complete(mut self, py: Python<'_>) -> Outcome<(PreemptReport, Option<Py<PyAny>>)> {
        let copy = self.copy.take().map(|copy| copy.object(py)).transpose()?;
        let closing = self.pool.preempt(self.source.take(), Preempt::Recompute).into_future();
        let closed = closing.now_or_never().expect("only a swap waits");
        let preempted = closed.map_err(|error| put_back(self.source, error))?;
        let mut report = PreemptReport::from(&preempted);
        if copy.is_some() {
            report.tokens_kept += std::mem::take(&mut report.tokens_lost);
        }
        Ok((report, copy))
    }
}

impl<'py, S: Leaves> IntoPyObject<'py> for Preempting<S> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> PyResult<Self::Output> {
        self.complete(py)?.into_bound_py_any(py)
    }
}

/// Copies the sequence first, if it is swapped: dropping the future leaves it as it was.
async fn preempt<S: Leaves>(
    pool: Pool,
    mut lent: Lent<S>,
    to: Option<Pool>,
    until: Option<Instant>,
) -> Outcome<Preempting<S>> {
    let copy = match to {
        Some(to) => Some(replicate(&pool, lent.value(), &to, until).await?.0),
        None => None,
    };
    Ok(Preempting { copy, source: lent, pool })
}

/// Copies a sequence to another pool of this process, when the batches that write it have ended.
async fn replicate<S: Leaves>(
    pool: &Pool,
    sequence: &S,
    to: &Pool,
    until: Option<Instant>,
) -> Outcome<(S, MigrationReport)> {
    // Without a deadline, it waits for the batches that write it for as long as they run.
    let until = until.unwrap_or_else(|| Instant::now() + FOREVER);
    Ok(pool.replicate(sequence, to).until(until).await?)
}

/// Moves a swapped sequence back.
async fn resume<S: Leaves>(
    pool: Pool,
    mut lent: Lent<S>,
    options: ResumeOptions,
    until: Option<Instant>,
) -> Outcome<Moved<S>> {
    let (copy, report) = pool.resume(lent.value(), options).until(until).await?;
    Ok(Moved { copy: Some(copy), report, source: Some(lent) })
}

/// Runs a future to its end, also if the result is dropped.
async fn detached<T: Send + 'static>(
    future: impl Future<Output = Outcome<T>> + Send + 'static,
) -> Outcome<T> {
    match runtime()?.spawn(future).await {
        Ok(outcome) => outcome,
        Err(error) => {
            Err(raise("KvPoolError", format!("the call was aborted: {error}"), fields![kind: "Aborted"]))
        }
    }
}

/// Takes a sequence for a call, unless views are open on its memory.
fn lend(sequence: &Bound<'_, PySequence>, what: &str) -> Outcome<Lent<Sequence>> {
    let this = sequence.get();
    // Lent first: no view begins meanwhile. An error puts it back.
    let lent = Arc::clone(&this.sequence).lend()?;
    this.views.check(what)?;
    Ok(lent)
}

#[pymethods]
impl PyPool {
    /// Allocates blocks, and waits in the queue for them if necessary: `await pool.allocate(10)`.
    ///
    /// Urgent requests come first, then high, then normal ones, in order of arrival. For a
    /// `contiguous` request, blocks are moved out of the way. Raises Timeout after `timeout`
    /// seconds, with what was free. Cancelling passes the turn on.
    #[pyo3(signature = (blocks, *, sequence=None, priority=Rank::default(), pinned=false, contiguous=false, timeout=None), text_signature = r#"($self, blocks, *, sequence=None, priority="normal", pinned=False, contiguous=False, timeout=None)"#)]
    fn allocate(
        &self,
        blocks: Blocks,
        sequence: Option<Id>,
        priority: Rank,
        pinned: bool,
        contiguous: bool,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let (pool, request) = (self.share()?, request(blocks, sequence, priority, pinned, contiguous));
        Ok(Call::new(move |caller| {
            let future = allocate(pool, request, deadline(timeout));
            // A contiguous request may move blocks: not while the GIL is held.
            if contiguous { caller.waits(future) } else { caller.start(future) }
        }))
    }

    /// Opens a sequence with the cached prefix of its prompt, and reserves the blocks for the rest
    /// of it and for `headroom` tokens; waits in the queue if necessary. Appends within them cannot
    /// fail. Admits only if `leave` blocks stay available besides, for running sequences.
    #[pyo3(signature = (id, prompt, *, headroom=Tokens(0), priority=Rank::default(), salt=None, adapter=None, extra_keys=None, reuse_tail=false, contiguous=false, leave=Count(0), session=None, tenant=None, timeout=None), text_signature = r#"($self, id, prompt, *, headroom=0, priority="normal", salt=None, adapter=None, extra_keys=None, reuse_tail=False, contiguous=False, leave=0, session=None, tenant=None, timeout=None)"#)]
    #[allow(clippy::too_many_arguments)]
    fn admit(
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
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let keys = Keys::new(salt, adapter, extra_keys);
        let admission = Admission {
            pool: self.share()?,
            id: SequenceId(id.0),
            prompt: prompt.0,
            headroom: headroom.0,
            priority,
            keys,
            reuse_tail,
            contiguous,
            leave: leave.0,
            session,
            tenant,
        };
        Ok(Call::new(move |caller| {
            let admitted = admission.admit(deadline(timeout));
            if contiguous { caller.waits(admitted) } else { caller.start(admitted) }
        }))
    }

    /// Reserves the blocks that the next `tokens` tokens of a sequence need, and waits for them if
    /// necessary, before admissions of its priority.
    #[pyo3(signature = (sequence, tokens, *, timeout=None))]
    fn reserve(
        &self,
        sequence: &Bound<'_, PySequence>,
        tokens: Tokens,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let (pool, sequence) = (self.share()?, sequence.clone().unbind());
        Ok(Call::new(move |caller| {
            let lent = Arc::clone(&sequence.get().sequence).lend()?;
            caller.start(reserve(pool, lent, tokens.0, deadline(timeout)))
        }))
    }

    /// As `reserve`, for a sequence in a pool of a model whose layers differ: the blocks of all its
    /// lists, or none.
    #[pyo3(signature = (sequence, tokens, *, timeout=None))]
    fn reserve_grouped(
        &self,
        sequence: &Bound<'_, PyGroupedSequence>,
        tokens: Tokens,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let (pool, sequence) = (self.share()?, sequence.clone().unbind());
        Ok(Call::new(move |caller| {
            let lent = Arc::clone(&sequence.get().sequence).lend()?;
            caller.start(reserve_grouped(pool, lent, tokens.0, deadline(timeout)))
        }))
    }

    /// Compacts the pool: moves sealed blocks together, while others are allocated and freed.
    /// Evictable blocks in their way are dropped.
    ///
    /// `order` is log2 of the length of the runs of free and evictable frames to gain,
    /// `budget_bytes` a bound on what is moved. Cancelling ends it after the moves under way.
    #[pyo3(signature = (*, order=None, budget_bytes=None))]
    fn defragment(&self, order: Option<RunOrder>, budget_bytes: Option<Count>) -> Outcome<Call> {
        let (pool, options) = (self.share()?, defragment_options(order, budget_bytes));
        Ok(Call::new(move |caller| caller.waits(defragment(pool, options))))
    }

    /// Changes the number of blocks while the pool serves. A shrink moves blocks in use below the
    /// new end, and returns memory to the system.
    ///
    /// It gives up after `patience` seconds without progress (0.2 by default): ResizeError then
    /// names the blocks that cannot move, and the pool keeps its size, as it does when cancelled.
    #[pyo3(signature = (blocks, *, patience=None))]
    fn resize(&self, blocks: Blocks, patience: Option<Seconds>) -> Outcome<Call> {
        let (pool, options) = (self.share()?, resize_options(patience));
        Ok(Call::new(move |caller| caller.waits(resize(pool, blocks.0, options))))
    }

    /// Moves a sequence to another pool, or to the node of this name, when the batches that write
    /// it have ended. It is closed here, and continues there with the same id, tokens and bytes.
    /// Does not wait for room there.
    ///
    /// Returns the sequence in the other pool (None for a node) and a report. If it fails, the
    /// sequence is as before. Cancelling a move to a pool leaves the sequence here, and frees the
    /// blocks there after the piece that is being copied (64 MiB at most); a move to a node goes
    /// on, and the sequence is Busy until its outcome is known.
    ///
    /// A GroupedSequence goes with all its lists and states to a layered pool of the same groups
    /// with storage, here or of a node.
    #[pyo3(signature = (sequence, target, *, timeout=None))]
    fn migrate(
        &self,
        sequence: &Bound<'_, PyAny>,
        target: &Bound<'_, PyAny>,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let (pool, to, sequence) = (self.share()?, To::of(target)?, Leaving::of(sequence)?);
        Ok(Call::new(move |caller| match sequence {
            Leaving::One(sequence) => {
                let lent = lend(sequence.bind(caller.py), "move the sequence")?;
                caller.waits(migrate(pool, lent, to, deadline(timeout)))
            }
            Leaving::Grouped(sequence) => {
                let lent = Arc::clone(&sequence.get().sequence).lend()?;
                caller.waits(migrate(pool, lent, to, deadline(timeout)))
            }
        }))
    }

    /// Takes the blocks of a running sequence: closes it, or with `swap` moves it to another pool,
    /// when the batches that write it have ended. Returns a report, and the sequence there.
    ///
    /// If it fails or is cancelled, the sequence is as before. A cancelled swap frees the blocks
    /// there after the piece that is being copied (64 MiB at most). A GroupedSequence is swapped
    /// with all its lists and states, as by `migrate`.
    #[pyo3(signature = (sequence, *, swap=None, timeout=None))]
    fn preempt(
        &self,
        sequence: &Bound<'_, PyAny>,
        swap: Option<&Bound<'_, Self>>,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let (pool, sequence) = (self.share()?, Leaving::of(sequence)?);
        let swap = swap.map(|pool| pool.get().share()).transpose()?;
        Ok(Call::new(move |caller| match sequence {
            Leaving::One(sequence) => {
                let lent = lend(sequence.bind(caller.py), "preempt the sequence")?;
                caller.waits(preempt(pool, lent, swap, deadline(timeout)))
            }
            Leaving::Grouped(sequence) => {
                let lent = Arc::clone(&sequence.get().sequence).lend()?;
                caller.waits(preempt(pool, lent, swap, deadline(timeout)))
            }
        }))
    }

    /// Moves a swapped sequence back to this pool, with blocks for `headroom` tokens, if `leave`
    /// blocks stay available besides; waits for them in its turn among the admissions. Returns the
    /// sequence here and a report.
    ///
    /// If it fails or is cancelled, the sequence is as before. A cancelled one frees the blocks
    /// here after the piece that is being copied (64 MiB at most).
    #[pyo3(signature = (sequence, *, headroom=Tokens(0), leave=Count(0), timeout=None), text_signature = "($self, sequence, *, headroom=0, leave=0, timeout=None)")]
    fn resume(
        &self,
        sequence: &Bound<'_, PyAny>,
        headroom: Tokens,
        leave: Count,
        timeout: Option<Seconds>,
    ) -> Outcome<Call> {
        let (pool, sequence) = (self.share()?, Leaving::of(sequence)?);
        let options = ResumeOptions::new().headroom(headroom.0).leave(leave.0);
        Ok(Call::new(move |caller| match sequence {
            Leaving::One(sequence) => {
                let lent = lend(sequence.bind(caller.py), "resume the sequence")?;
                caller.waits(resume(pool, lent, options, deadline(timeout)))
            }
            Leaving::Grouped(sequence) => {
                let lent = Arc::clone(&sequence.get().sequence).lend()?;
                caller.waits(resume(pool, lent, options, deadline(timeout)))
            }
        }))
    }

    /// Waits until every batch up to the one of this number has ended.
    #[pyo3(signature = (ticket, *, timeout=None))]
    fn settled(&self, ticket: BatchNumber, timeout: Option<Seconds>) -> Outcome<Call> {
        let pool = self.share()?;
        Ok(Call::new(move |caller| {
            let settled = pool.settled_up_to(kvpool::Ticket(ticket.0));
            caller.start(async move {
                match deadline(timeout) {
                    None => settled.await?,
                    Some(until) => settled.until(until).await?,
                }
                Ok(())
            })
        }))
    }
}

//! `Batch`: one step of an engine.

use std::sync::Arc;

use kvpool::storage::{Elements, ElementsMut};
use kvpool::{Appended, Batch, Copied, Dtype, Pool, Sequence};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::args::{Place, Tokens};
use crate::buffers::{Numbers, Target};
use crate::error::{Failure, Outcome, fields, raise};
use crate::exclusive::{Entered, Exclusive};
use crate::record::record;
use crate::sequence::PySequence;
use crate::table::{PyBlockTable, Row, csr_into, slots_into, write_table};
use crate::views::PoolViews;

record! {
    /// Result of an append.
    Append {
        /// Position of the first new token.
        start: usize,
        /// Position behind the last new token.
        stop: usize,
        /// Number of blocks taken, including a copy.
        new_blocks: usize,
        /// The copy on write, as frames (from, to). A pool with storage has copied the bytes;
        /// without storage the engine must, before its own writes.
        copied: Option<(u32, u32)>,
    }
}

impl From<Appended> for Append {
    fn from(appended: Appended) -> Self {
        Self {
            start: appended.tokens.start,
            stop: appended.tokens.end,
            new_blocks: appended.new_blocks,
            copied: appended.copied.as_ref().map(frames_of),
        }
    }
}

fn frames_of(copied: &Copied) -> (u32, u32) {
    (copied.frames.src.0, copied.frames.dst.0)
}

record! {
    /// Result of a decode step.
    DecodeStep {
        /// Number of blocks taken, from reservations or allocated, including copies.
        new_blocks: usize,
        /// The copies on write: the index of the sequence in the step, and frames from and to.
        copied: Vec<(usize, u32, u32)>,
    }
}

/// One step of an engine, under which tables are read and memory is used. A context manager.
///
/// While it is in flight, no frame that it may have seen gets a new owner. When it ends, the full
/// blocks that it filled are final: they can be shared, moved, and found in the prefix cache. If the
/// `with` block raises, or the batch is dropped unfinished, the batch ends too, and what was
/// written under it counts as not computed: each sequence is cut to where the batch's first write
/// to it began. Its blocks stay reserved, so that the step can be tried again.
///
/// A batch does not end normally while a writable view (`Pool.view`) exists of a block that becomes
/// final: `finish`, and the end of the `with` block, raise Busy.
#[pyclass(frozen, name = "Batch", module = "kvpool._kvpool")]
pub struct PyBatch {
    batch: Exclusive<Batch>,
    ticket: u64,
    /// Entry behind the end of a row.
    padding: i32,
    dtype: Dtype,
    views: Arc<PoolViews>,
    /// The pool, of a batch that ends when a device's stream gets there.
    on_stream: Option<Pool>,
}

impl PyBatch {
    /// Wraps a batch of a pool, which is given for one that ends on a stream.
    pub fn new(
        batch: Batch,
        padding: i32,
        dtype: Dtype,
        views: Arc<PoolViews>,
        on_stream: Option<Pool>,
    ) -> Self {
        let ticket = batch.ticket().0;
        Self { batch: Exclusive::new("batch", batch), ticket, padding, dtype, views, on_stream }
    }

    /// Returns the batch for the length of a call.
    pub fn enter(&self) -> Outcome<Entered<'_, Batch>> {
        self.batch.enter()
    }

    /// Returns the entry behind the end of a row.
    pub fn padding(&self) -> i32 {
        self.padding
    }

    /// Ends a batch, which stays as it is if a block that it makes final can be written by a view.
    fn end(&self, batch: Entered<'_, Batch>) -> Outcome<()> {
        let blocks = batch.blocks_to_seal();
        let held = match &self.on_stream {
            None => self.views.hold(blocks.map(|handle| handle.id)).map(Some),
            Some(pool) => self.views.hold_until_final(blocks, pool).map(|()| None),
        };
        match held {
            Ok(held) => {
                batch.take().finish();
                drop(held);
                Ok(())
            }
            Err(viewed) => {
                // Unlocked before the exception is made.
                drop(batch);
                Err(viewed.refuse("end the batch"))
            }
        }
    }
}

/// Number of batches in flight from which on none is begun. The library panics at 65,536, and takes
/// time in proportion to begin one.
const BATCHES_MAX: u64 = 4_096;

/// Refuses to begin one more batch than a pool can have in flight.
pub fn check_batches(in_flight: u64) -> Outcome<()> {
    if in_flight < BATCHES_MAX {
        return Ok(());
    }
    let message = format!("{in_flight} batches are in flight; end some before the next one begins");
    Err(raise("KvPoolError", message, fields![kind: "TooManyBatches", batches: in_flight]))
}

/// Bytes that become `bytes`.
type Bytes = std::borrow::Cow<'static, [u8]>;

#[pymethods]
impl PyBatch {
    /// Its place in the order of batches.
    #[getter]
    fn ticket(&self) -> u64 {
        self.ticket
    }

    /// Appends final tokens: a prompt, a chunk of one, or decoded tokens. Their ids, if they were
    /// not announced, stay unknown.
    ///
    /// Raises OutOfBlocks; the sequence is then unchanged.
    fn append(&self, sequence: &Bound<'_, PySequence>, tokens: Tokens) -> Outcome<Append> {
        let mut batch = self.batch.enter()?;
        Ok(batch.append(&mut *sequence.get().enter_to_append()?, tokens.0)?.into())
    }

    /// Appends final tokens with their ids, so that the prefix cache finds them.
    fn append_tokens(&self, sequence: &Bound<'_, PySequence>, tokens: Numbers) -> Outcome<Append> {
        let mut batch = self.batch.enter()?;
        Ok(batch.append(&mut *sequence.get().enter_to_append()?, &tokens.0)?.into())
    }

    /// Appends the announced tokens that were not appended yet, at most `max` of them: a prompt
    /// behind its cached prefix, or a chunk of it. Only in a pool with a prefix cache.
    #[pyo3(signature = (sequence, max=None))]
    fn advance(&self, sequence: &Bound<'_, PySequence>, max: Option<Tokens>) -> Outcome<Append> {
        let mut batch = self.batch.enter()?;
        let tokens = kvpool::Tokens::Announced(max.map_or(usize::MAX, |max| max.0));
        Ok(batch.append(&mut *sequence.get().enter_to_append()?, tokens)?.into())
    }

    /// Appends speculative tokens: `Sequence.commit` makes some final, `Sequence.truncate` removes
    /// the rest.
    fn draft(&self, sequence: &Bound<'_, PySequence>, tokens: Tokens) -> Outcome<Append> {
        let mut batch = self.batch.enter()?;
        let tokens = kvpool::Tokens::Draft(tokens.0);
        Ok(batch.append(&mut *sequence.get().enter_to_append()?, tokens)?.into())
    }

    /// Appends one token to each sequence, or to none: OutOfBlocks then names in `sequences` the
    /// sequences that lack blocks. `tokens` are their ids, if known.
    #[pyo3(signature = (sequences, tokens=None))]
    fn decode(&self, sequences: Vec<Bound<'_, PySequence>>, tokens: Option<Numbers>) -> Outcome<DecodeStep> {
        let mut batch = self.batch.enter()?;
        let mut row = Row::enter(&sequences)?;
        for (sequence, entered) in sequences.iter().zip(row.get()) {
            sequence.get().check_final(entered, 0, "decode")?;
        }
        let stepped = batch.step(&mut row.appends(tokens.as_ref().map(|tokens| &*tokens.0))?)?;
        let copied = stepped.copied.iter().map(|(place, copied)| {
            let (from, to) = frames_of(copied);
            (*place, from, to)
        });
        Ok(DecodeStep { new_blocks: stepped.new_blocks, copied: copied.collect() })
    }

    /// Fills a `BlockTable`, or writes into a `[rows, width]` int32 or int64 buffer. Returns the
    /// number of rows, and the number of columns that hold frames.
    ///
    /// Each row lists the frames of one sequence and is padded up to the width with the null block's
    /// frame, or -1 in a pool without one. Rows of the buffer behind the last sequence are left as
    /// they are.
    fn block_table(
        &self,
        sequences: Vec<Bound<'_, PySequence>>,
        out: &Bound<'_, PyAny>,
    ) -> Outcome<(usize, usize)> {
        let batch = self.batch.enter()?;
        let row = Row::enter(&sequences)?;
        let Ok(table) = out.cast::<PyBlockTable>() else {
            return write_table(&batch, row.get(), &Target::new(out, "out", 2)?, self.padding);
        };
        let mut table = table.get().fill(sequences.len())?;
        batch.block_table(row.get(), &mut table)?;
        Ok((table.rows(), table.width()))
    }

    /// Writes the table in compressed sparse rows, as FlashInfer expects it, into int32 or int64
    /// buffers: `indptr` of `[sequences + 1]`, `indices` of at least as many entries as there are
    /// blocks, `last_page_len` of `[sequences]`. Returns the number of blocks.
    fn csr_table(
        &self,
        sequences: Vec<Bound<'_, PySequence>>,
        indptr: &Bound<'_, PyAny>,
        indices: &Bound<'_, PyAny>,
        last_page_len: &Bound<'_, PyAny>,
    ) -> Outcome<usize> {
        let batch = self.batch.enter()?;
        csr_into(&batch, Row::enter(&sequences)?.get(), [indptr, indices, last_page_len])
    }

    /// Returns the slots of tokens, where a kernel writes their K and V: `frame * block_tokens +
    /// offset`.
    fn slots<'py>(
        &self,
        py: Python<'py>,
        sequence: &Bound<'_, PySequence>,
        start: Tokens,
        stop: Tokens,
    ) -> Outcome<Bound<'py, PyList>> {
        let batch = self.batch.enter()?;
        let mut slots = Vec::new();
        batch.slot_mapping(&*sequence.get().sequence.enter()?, start.0..stop.0, &mut slots)?;
        Ok(PyList::new(py, slots)?)
    }

    /// Writes the slots of tokens into a one-dimensional int32 or int64 buffer, from element `at`
    /// on. Returns their number.
    #[pyo3(signature = (sequence, start, stop, out, at=Place(0)), text_signature = "($self, sequence, start, stop, out, at=0)")]
    fn slot_mapping(
        &self,
        sequence: &Bound<'_, PySequence>,
        start: Tokens,
        stop: Tokens,
        out: &Bound<'_, PyAny>,
        at: Place,
    ) -> Outcome<usize> {
        let batch = self.batch.enter()?;
        let sequence = sequence.get().sequence.enter()?;
        slots_into(|slots| batch.slot_mapping(&*sequence, start.0..stop.0, slots), out, at.0)
    }

    /// Returns the number of tokens of each sequence, including drafted ones.
    fn lengths(&self, sequences: Vec<Bound<'_, PySequence>>) -> Outcome<Vec<i32>> {
        let batch = self.batch.enter()?;
        let mut lengths = Vec::new();
        batch.lengths(Row::enter(&sequences)?.get(), &mut lengths)?;
        Ok(lengths)
    }

    /// Stores K and V of tokens in one layer: contiguous buffers `[tokens, kv_heads, head_dim]`, by
    /// default of the layout's dtype. `v` is None in a latent layout.
    ///
    /// numpy has no bf16: pass its bits as uint16. A quantised layout also takes "f32", "f16" and
    /// "bf16".
    #[pyo3(signature = (sequence, layer, start, stop, k, v=None, dtype=None))]
    #[allow(clippy::too_many_arguments)]
    fn store(
        &self,
        py: Python<'_>,
        sequence: &Bound<'_, PySequence>,
        layer: Place,
        start: Tokens,
        stop: Tokens,
        k: &Bound<'_, PyAny>,
        v: Option<&Bound<'_, PyAny>>,
        dtype: Option<&str>,
    ) -> Outcome<()> {
        let dtype = self.dtype(dtype)?;
        // Copies: another thread may write to the caller's memory while the GIL is released.
        let (k, v) = (bytes_of(k, "k")?, v.map(|v| bytes_of(v, "v")).transpose()?);
        let (mut batch, mut sequence) = (self.batch.enter()?, sequence.get().sequence.enter()?);
        let (batch, sequence): (&mut Batch, &mut Sequence) = (&mut batch, &mut sequence);
        py.detach(|| {
            let v = v.as_ref().map_or(Ok(Elements::none()), |v| Elements::new(dtype, v))?;
            batch.store(sequence, layer.0, start.0..stop.0, Elements::new(dtype, &k)?, v)
        })?;
        Ok(())
    }

    /// Loads K and V of tokens in one layer, as `(k, v)` in bytes; the inverse of `store`.
    #[pyo3(signature = (sequence, layer, start, stop, dtype=None))]
    fn load(
        &self,
        py: Python<'_>,
        sequence: &Bound<'_, PySequence>,
        layer: Place,
        start: Tokens,
        stop: Tokens,
        dtype: Option<&str>,
    ) -> Outcome<(Bytes, Bytes)> {
        let dtype = self.dtype(dtype)?;
        let (mut batch, sequence) = (self.batch.enter()?, sequence.get().sequence.enter()?);
        let Some(pool) = sequence.pool() else {
            return Err(raise("Closed", "the pool of the sequence is closed", Vec::new()));
        };
        let layout = pool.layout();
        let tokens = stop.0.saturating_sub(start.0).min(sequence.len());
        let bytes = tokens * layout.row_elements() * dtype.bytes();
        let latent = layout.parts() == kvpool::storage::KvPlanes::Latent;
        let (mut k, mut v) = (vec![0; bytes], vec![0; if latent { 0 } else { bytes }]);
        let (batch, sequence): (&mut Batch, &Sequence) = (&mut batch, &sequence);
        py.detach(|| {
            let v = if latent { ElementsMut::none() } else { ElementsMut::new(dtype, &mut v)? };
            batch.load(sequence, layer.0, start.0..stop.0, ElementsMut::new(dtype, &mut k)?, v)
        })?;
        Ok((k.into(), v.into()))
    }

    /// Ends the batch. The work that uses its tables must have ended.
    ///
    /// A batch that was begun on a CUDA stream ends when the stream gets there.
    ///
    /// Raises Busy, with the block in `block`, if a writable view of a block exists that becomes
    /// final: full, of final tokens. The batch is then as before; delete the view, and call again.
    fn finish(&self) -> Outcome<()> {
        self.end(self.batch.enter()?)
    }

    /// Whether the batch has ended.
    #[getter]
    fn finished(&self) -> Outcome<bool> {
        self.batch.is_gone()
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Ends the batch as `finish` does, unless it has ended. If the `with` block raised, the batch
    /// is abandoned: what was appended under it is taken back, and the step can be tried again.
    #[pyo3(signature = (kind=None, _value=None, _traceback=None))]
    fn __exit__(
        &self,
        kind: Option<&Bound<'_, PyAny>>,
        _value: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<()> {
        let Some(batch) = self.batch.enter_if_any()? else { return Ok(()) };
        match kind {
            None => self.end(batch),
            Some(_) => {
                drop(batch.take());
                Ok(())
            }
        }
    }

    fn __repr__(&self) -> Outcome<String> {
        let state = if self.batch.is_gone()? { ", ended" } else { "" };
        Ok(format!("<kvpool.Batch {}{state}>", self.ticket))
    }
}

impl PyBatch {
    fn dtype(&self, name: Option<&str>) -> Outcome<Dtype> {
        name.map_or(Ok(self.dtype), crate::layout::dtype)
    }
}

/// Copies a contiguous buffer.
fn bytes_of(obj: &Bound<'_, PyAny>, what: &'static str) -> Outcome<Vec<u8>> {
    let buffer = PyUntypedBuffer::get(obj)
        .map_err(|_| Failure::from(PyTypeError::new_err(format!("{what} is not a buffer"))))?;
    if !buffer.is_c_contiguous() {
        return Err(raise("BufferRefused", format!("{what} is not C-contiguous"), fields![argument: what]));
    }
    let (data, len) = (buffer.buf_ptr().cast::<u8>(), buffer.len_bytes());
    let mut bytes = vec![0u8; len];
    if len > 0 {
        // SAFETY: the buffer has `len` contiguous bytes while it lives. Another thread that writes
        // them meanwhile, as the buffer protocol permits, changes what is copied and nothing else.
        unsafe { std::ptr::copy_nonoverlapping(data, bytes.as_mut_ptr(), len) };
    }
    Ok(bytes)
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Append>()?;
    module.add_class::<DecodeStep>()?;
    module.add_class::<PyBatch>()
}

//! `Sequence`: the tokens of one request, and their blocks.

use std::sync::Arc;

use kvpool::{Sequence, SequenceId};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::args::{Id, Place, Tokens};
use crate::buffers::Numbers;
use crate::error::Outcome;
use crate::exclusive::{Entered, Exclusive};
use crate::handle::PyHandle;
use crate::prefix::VersionRange;
use crate::views::Views;

/// The blocks of one request's tokens. Closed when it is collected; also a context manager.
///
/// One thread at a time may use a sequence: another call meanwhile raises Busy.
#[pyclass(frozen, name = "Sequence", module = "kvpool._kvpool")]
pub struct PySequence {
    pub sequence: Arc<Exclusive<Sequence>>,
    pub views: Arc<Views>,
    id: SequenceId,
}

impl PySequence {
    /// Wraps a sequence.
    pub fn new(sequence: Sequence) -> Self {
        let id = sequence.id();
        Self { sequence: Arc::new(Exclusive::new("sequence", sequence)), views: Arc::default(), id }
    }

    /// Refuses an operation that may make blocks final which a view can write: full blocks up to
    /// `length` tokens that no batch has promised to seal.
    pub fn check_final(&self, sequence: &Sequence, length: usize, what: &str) -> Outcome<()> {
        if self.views.are_none() {
            return Ok(());
        }
        let Some(pool) = sequence.pool() else { return Ok(()) };
        let full = length.max(sequence.committed()) / pool.layout().block_tokens();
        self.views.check_writable(sequence.blocks().take(full).skip(sequence.settled_blocks()), what)
    }

    /// Enters the sequence for an append, which first seals blocks that are due.
    pub fn enter_to_append(&self) -> Outcome<Entered<'_, Sequence>> {
        let sequence = self.sequence.enter()?;
        self.check_final(&sequence, 0, "append to the sequence")?;
        Ok(sequence)
    }
}

#[pymethods]
impl PySequence {
    /// Its id, unique among the open sequences of its pool.
    #[getter]
    fn id(&self) -> u64 {
        self.id.0
    }

    /// Priority of its allocations.
    #[getter]
    fn priority(&self) -> Outcome<String> {
        Ok(self.sequence.enter()?.priority().to_string())
    }

    /// Number of final tokens: the length without drafted tokens.
    #[getter]
    fn committed(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.committed())
    }

    /// Number of tokens whose ids are known; 0 in a pool without a prefix cache.
    #[getter]
    fn announced(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.announced())
    }

    /// Hashes of the full blocks of its known tokens, in order; empty without a prefix cache.
    #[getter]
    fn block_hashes(&self) -> Outcome<Vec<String>> {
        Ok(self.sequence.enter()?.block_hashes().iter().map(|hash| hash.to_string()).collect())
    }

    /// The versions of the weights with which its tokens were computed, in the order of their
    /// positions; empty without a prefix cache. Blocks that it fills after a batch of other
    /// versions than those of its hashes are not found.
    #[getter]
    fn versions(&self) -> Outcome<Vec<VersionRange>> {
        Ok(VersionRange::all(self.sequence.enter()?.versions()))
    }

    /// Ids of its blocks, in order.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyList>> {
        let sequence = self.sequence.enter()?;
        Ok(PyList::new(py, sequence.blocks().map(|id| id.0))?)
    }

    /// A handle for each block, for inspection and pins; valid while the block is in the sequence.
    #[getter]
    fn handles(&self) -> Outcome<Vec<PyHandle>> {
        Ok(self.sequence.enter()?.handles().map(PyHandle).collect())
    }

    /// Number of blocks reserved beyond its tokens. Appends within them cannot fail.
    #[getter]
    fn reserved_blocks(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.reserved_blocks())
    }

    /// Tells the ids of tokens that will be appended, so that the prefix cache can find them.
    fn announce(&self, tokens: Numbers) -> Outcome<()> {
        Ok(self.sequence.enter()?.announce(&tokens.0)?)
    }

    /// Gives the tokens from `start` up to `end`, before the first of them is announced, a key that
    /// separates them from equal tokens: that of an image, for example.
    fn extra_key(&self, start: Place, end: Place, key: &Bound<'_, PyBytes>) -> Outcome<()> {
        Ok(self.sequence.enter()?.extra_key(start.0..end.0, key.as_bytes())?)
    }

    /// Opens another sequence that shares every block until one of the two writes.
    fn fork(&self, id: Id) -> Outcome<Self> {
        let sequence = self.sequence.enter()?;
        self.views.check("fork the sequence")?;
        Ok(Self::new(sequence.fork(SequenceId(id.0))?))
    }

    /// Makes drafted tokens final, up to this length.
    ///
    /// Raises Busy if a writable view of a block exists that becomes final.
    fn commit(&self, length: Tokens) -> Outcome<()> {
        let mut sequence = self.sequence.enter()?;
        self.check_final(&sequence, length.0, "commit tokens")?;
        Ok(sequence.commit(length.0)?)
    }

    /// Removes tokens from the end, down to this length.
    fn truncate(&self, length: Tokens) -> Outcome<()> {
        let mut sequence = self.sequence.enter()?;
        self.views.check("truncate the sequence")?;
        Ok(sequence.truncate(length.0)?)
    }

    /// Reserves the blocks that the next `tokens` tokens need, without waiting. See also
    /// `Pool.reserve`.
    fn reserve(&self, tokens: Tokens) -> Outcome<()> {
        Ok(self.sequence.enter()?.reserve(tokens.0)?)
    }

    /// Releases the reserved blocks, and returns their number.
    fn release_reservation(&self) -> Outcome<usize> {
        let mut sequence = self.sequence.enter()?;
        // Blocks of an abandoned batch, which views may show, are among those that are released.
        self.views.check("release the reservation")?;
        Ok(sequence.release_reservation())
    }

    /// Closes the sequence: its blocks are freed, or stay in the prefix cache. Does nothing if it
    /// is closed already.
    fn close(&self) -> Outcome<()> {
        // Entered first: no view begins meanwhile.
        let Some(sequence) = self.sequence.enter_if_any()? else { return Ok(()) };
        self.views.check("close the sequence")?;
        drop(sequence.take());
        Ok(())
    }

    /// Whether the sequence was closed, or moved to another pool.
    #[getter]
    fn closed(&self) -> Outcome<bool> {
        self.sequence.is_gone()
    }

    /// Number of tokens, including drafted ones.
    fn __len__(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.len())
    }

    fn __bool__(&self) -> bool {
        true
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Closes it. If the block raised while views of its blocks exist, the exception propagates, and
    /// it is closed when they are collected.
    #[pyo3(signature = (kind=None, _value=None, _traceback=None))]
    fn __exit__(
        &self,
        kind: Option<&Bound<'_, PyAny>>,
        _value: Option<&Bound<'_, PyAny>>,
        _traceback: Option<&Bound<'_, PyAny>>,
    ) -> Outcome<()> {
        // The exception's traceback may be what keeps them.
        if kind.is_some() && !self.views.are_none() {
            return Ok(());
        }
        self.close()
    }

    fn __repr__(&self) -> Outcome<String> {
        Ok(match self.sequence.enter_if_any()? {
            None => format!("<kvpool.Sequence {}, closed>", self.id),
            Some(sequence) => format!(
                "<kvpool.Sequence {}: {} tokens in {} blocks>",
                self.id,
                sequence.len(),
                sequence.block_count()
            ),
        })
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PySequence>()
}

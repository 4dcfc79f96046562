//! `Lease`: blocks that are freed together.

use std::sync::Arc;

use kvpool::Lease;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::args::{Place, range};
use crate::buffers::Target;
use crate::error::Outcome;
use crate::exclusive::Exclusive;
use crate::handle::PyHandle;
use crate::views::Views;

/// Owns blocks: frees them when it is closed, or collected. Also a context manager.
///
/// The bytes of its blocks can be written through `Pool.view` until they are sealed. Compaction moves
/// sealed blocks only.
#[pyclass(frozen, name = "Lease", module = "kvpool._kvpool")]
pub struct PyLease {
    pub lease: Exclusive<Lease<'static>>,
    pub views: Arc<Views>,
}

impl PyLease {
    /// Wraps a lease.
    pub fn new(lease: Lease<'static>) -> Self {
        Self { lease: Exclusive::new("lease", lease), views: Arc::default() }
    }
}

#[pymethods]
impl PyLease {
    /// Ids of the blocks, in the order of their allocation.
    #[getter]
    fn blocks<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyList>> {
        let lease = self.lease.enter()?;
        Ok(PyList::new(py, lease.blocks().iter().map(|id| id.0))?)
    }

    /// Current frame of each block. Compaction may change those of sealed blocks between batches.
    #[getter]
    fn frames<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyList>> {
        let lease = self.lease.enter()?;
        Ok(PyList::new(py, lease.frames().map(|frame| frame.0))?)
    }

    /// The frames as runs: pairs of first frame and length. A transfer needs one descriptor each.
    #[getter]
    fn runs(&self) -> Outcome<Vec<(u32, u32)>> {
        Ok(self.lease.enter()?.runs().map(|run| (run.start.0, run.len)).collect())
    }

    /// A handle for each block, for inspection; valid while the lease lives.
    #[getter]
    fn handles(&self) -> Outcome<Vec<PyHandle>> {
        Ok(self.lease.enter()?.handles().map(PyHandle).collect())
    }

    /// Writes the block ids into a one-dimensional int32 or int64 buffer, from its start on. Returns
    /// their number.
    fn blocks_into(&self, out: &Bound<'_, PyAny>) -> Outcome<usize> {
        let lease = self.lease.enter()?;
        let target = Target::new(out, "out", 1)?;
        target.check_room(0, lease.blocks().len())?;
        target.write(0, lease.blocks().iter().map(|id| i64::from(id.0)));
        Ok(lease.blocks().len())
    }

    /// Writes the frames into a one-dimensional int32 or int64 buffer, from its start on. Returns
    /// their number.
    fn frames_into(&self, out: &Bound<'_, PyAny>) -> Outcome<usize> {
        let lease = self.lease.enter()?;
        let target = Target::new(out, "out", 1)?;
        target.check_room(0, lease.blocks().len())?;
        target.write(0, lease.frames().map(|frame| i64::from(frame.0)));
        Ok(lease.blocks().len())
    }

    /// Frees the blocks from index `keep` on.
    fn truncate(&self, keep: Place) -> Outcome<()> {
        let mut lease = self.lease.enter()?;
        self.views.check("truncate the lease")?;
        lease.truncate(keep.0);
        Ok(())
    }

    /// Splits the blocks from index `at` on into another lease.
    fn split_off(&self, at: Place) -> Outcome<Self> {
        let mut lease = self.lease.enter()?;
        self.views.check("split the lease")?;
        let len = lease.blocks().len();
        let range = range(at, None, len, "blocks")?;
        Ok(Self::new(lease.split_off(range.start)))
    }

    /// Marks the bytes of the blocks in a range of indices as final: compaction may move them.
    #[pyo3(signature = (start=Place(0), stop=None), text_signature = "($self, start=0, stop=None)")]
    fn seal(&self, start: Place, stop: Option<Place>) -> Outcome<()> {
        let mut lease = self.lease.enter()?;
        let range = range(start, stop, lease.blocks().len(), "blocks")?;
        self.views.check_writable(lease.blocks()[range.clone()].iter().copied(), "seal blocks")?;
        lease.seal(range);
        Ok(())
    }

    /// Makes a sealed block writable again. Returns False if another lease shares it, or if a move
    /// is reading its bytes.
    fn reopen(&self, place: Place) -> Outcome<bool> {
        let mut lease = self.lease.enter()?;
        self.views.check("reopen a block")?;
        let range = range(place, Some(Place(place.0.saturating_add(1))), lease.blocks().len(), "blocks")?;
        Ok(lease.reopen(range.start))
    }

    /// Returns a second lease of the same blocks, which stay allocated until both are closed. Views
    /// of the blocks count for both.
    fn share(&self) -> Outcome<Self> {
        let lease = self.lease.enter()?;
        let shared = lease.share()?;
        Ok(Self { lease: Exclusive::new("lease", shared), views: Arc::clone(&self.views) })
    }

    /// Frees the blocks. Does nothing if the lease is closed already.
    fn close(&self) -> Outcome<()> {
        // Entered first: no view begins meanwhile.
        let Some(lease) = self.lease.enter_if_any()? else { return Ok(()) };
        self.views.check("close the lease")?;
        drop(lease.take());
        Ok(())
    }

    /// Whether the lease was closed.
    #[getter]
    fn closed(&self) -> Outcome<bool> {
        self.lease.is_gone()
    }

    fn __len__(&self) -> Outcome<usize> {
        Ok(self.lease.enter()?.blocks().len())
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
        Ok(match self.lease.enter_if_any()? {
            None => "<kvpool.Lease, closed>".to_owned(),
            Some(lease) => format!("<kvpool.Lease of {} blocks>", lease.blocks().len()),
        })
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyLease>()
}

//! Blocks by handle, for an engine that counts references itself.

use kvpool::BlockHandle;
use pyo3::prelude::*;

use super::PyPool;
use crate::args::{Blocks, Id, Rank, request};
use crate::error::Outcome;
use crate::handle::{BlockState, PyHandle};

#[pymethods]
impl PyPool {
    /// Allocates blocks that are free now as handles: one counted reference each. Never waits.
    #[pyo3(signature = (blocks, *, sequence=None, priority=Rank::default(), pinned=false, contiguous=false))]
    fn allocate_handles(
        &self,
        blocks: Blocks,
        sequence: Option<Id>,
        priority: Rank,
        pinned: bool,
        contiguous: bool,
    ) -> Outcome<Vec<PyHandle>> {
        let mut handles = Vec::new();
        let request = request(blocks, sequence, priority, pinned, contiguous);
        self.get()?.allocate_raw(request, &mut handles)?;
        Ok(handles.into_iter().map(PyHandle).collect())
    }

    /// Releases one reference of each handle. The last one frees the block. All or none.
    fn free(&self, handles: Vec<PyHandle>) -> Outcome<()> {
        Ok(self.get()?.free(&raw(&handles))?)
    }

    /// Adds one reference to each handle. All or none.
    fn share_handles(&self, handles: Vec<PyHandle>) -> Outcome<()> {
        Ok(self.get()?.share(&raw(&handles))?)
    }

    /// Pins a block of a handle: it is neither moved nor evicted until `unpin`.
    fn pin(&self, handle: PyHandle) -> Outcome<()> {
        Ok(self.get()?.pin(handle.0)?)
    }

    /// Removes one pin.
    fn unpin(&self, handle: PyHandle) -> Outcome<()> {
        Ok(self.get()?.unpin(handle.0)?)
    }

    /// Marks the bytes of a block of a handle as final: compaction may move it.
    fn seal(&self, handle: PyHandle) -> Outcome<()> {
        Ok(self.get()?.seal(handle.0)?)
    }

    /// Returns the state of a block.
    fn info(&self, handle: PyHandle) -> Outcome<BlockState> {
        Ok(self.get()?.info(handle.0)?.into())
    }
}

fn raw(handles: &[PyHandle]) -> Vec<BlockHandle> {
    handles.iter().map(|handle| handle.0).collect()
}

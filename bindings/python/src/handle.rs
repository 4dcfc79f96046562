//! `Handle`: a block in one generation, by number.

use std::hash::{DefaultHasher, Hash, Hasher};

use kvpool::{BlockHandle, BlockInfo};
use pyo3::prelude::*;

use crate::record::record;

/// Names a block of a lease, for inspection.
///
/// It holds no reference. Each use is checked: a handle of a block that was freed raises
/// StaleHandle, one of another pool ForeignHandle. Handles are equal if they name the same block in
/// the same generation.
#[pyclass(frozen, eq, from_py_object, name = "Handle", module = "kvpool._kvpool")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PyHandle(pub BlockHandle);

#[pymethods]
impl PyHandle {
    /// Id of the block. It stays while the block lives, also if its bytes move.
    #[getter]
    fn block(&self) -> u32 {
        self.0.id.0
    }

    /// Number of times that the block had been freed when the handle was made.
    #[getter]
    fn generation(&self) -> u64 {
        self.0.generation.0
    }

    /// Number of the pool within the process.
    #[getter]
    fn pool(&self) -> u32 {
        self.0.pool.0
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.0.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("<kvpool.Handle: {}>", self.0)
    }
}

record! {
    /// A snapshot of a block.
    BlockState {
        /// Id of the block.
        block: u32,
        /// Frame with its bytes.
        frame: u32,
        /// Number of references.
        references: u32,
        /// Number of pins: while above 0, it is neither evicted nor moved.
        pins: u32,
        /// Whether its bytes are final.
        sealed: bool,
        /// Sequence that it was allocated for.
        sequence: Option<u64>,
        /// Priority of the request that it was allocated for.
        priority: String,
        /// Number of times that it has been freed.
        generation: u64,
    }
}

impl From<BlockInfo> for BlockState {
    fn from(info: BlockInfo) -> Self {
        Self {
            block: info.id.0,
            frame: info.frame.0,
            references: info.refs,
            pins: info.pins,
            sealed: info.sealed,
            sequence: info.sequence.map(|id| id.0),
            priority: info.priority.to_string(),
            generation: info.generation.0,
        }
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyHandle>()?;
    module.add_class::<BlockState>()
}

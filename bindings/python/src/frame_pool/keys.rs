//! Keys: foreign hashes as a pool knows them, derived once for several calls.

use kvpool::FrameKey;
use pyo3::prelude::*;

/// Keys of a pool, made by `FramePool.keys`. They are accepted wherever hashes are.
#[pyclass(frozen, module = "kvpool")]
pub struct FrameKeys(Vec<FrameKey>);

impl FrameKeys {
    pub fn new(keys: Vec<FrameKey>) -> Self {
        Self(keys)
    }

    pub fn keys(&self) -> &[FrameKey] {
        &self.0
    }
}

#[pymethods]
impl FrameKeys {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    fn __repr__(&self) -> String {
        format!("FrameKeys({} keys)", self.0.len())
    }
}

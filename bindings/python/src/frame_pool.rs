//! `FramePool`, for engines with their own ids and hashes.

use pyo3::prelude::*;

/// Adds the classes of this file to the module.
pub fn register(_module: &Bound<'_, PyModule>) -> PyResult<()> {
    Ok(())
}

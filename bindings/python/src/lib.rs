//! The Python package of kvpool: the module `kvpool._kvpool`.
//!
//! Each file has the classes of one part of the library and a function `register`, which adds them
//! to the module. Classes are frozen, and calls are safe from several threads, with the GIL and
//! without. Calls of about a microsecond keep the GIL; calls that wait or copy release it.

use pyo3::prelude::*;

#[allow(dead_code)]
mod error;
mod frame_pool;
#[allow(dead_code)]
mod process;

/// The compiled part of kvpool.
#[pymodule(gil_used = false)]
fn _kvpool(module: &Bound<'_, PyModule>) -> PyResult<()> {
    process::follow_forks();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    frame_pool::register(module)
}

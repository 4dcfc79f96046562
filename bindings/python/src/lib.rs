//! The Python package of kvpool: the module `kvpool._kvpool`.
//!
//! Each file has the classes of one part of the library and a function `register`, which adds them
//! to the module. Classes are frozen, and calls are safe from several threads, with the GIL and
//! without. Calls of about a microsecond keep the GIL; calls that wait or copy release it.

use pyo3::prelude::*;

mod admin;
mod args;
mod batch;
mod buffers;
mod call;
mod defragmenter;
mod dlpack;
mod error;
mod events;
mod eviction;
mod exclusive;
mod frame_pool;
mod grouped;
mod grouped_batch;
mod handle;
mod hints;
mod layered;
mod layers;
mod layout;
mod lease;
mod log;
mod map;
mod node;
mod pool;
mod prefix;
mod process;
mod record;
mod returned;
mod runtime;
mod sequence;
mod settings;
mod stats;
mod table;
mod tenants;
mod tensor;
mod tier;
mod values;
mod views;
mod waiter;
mod waiting;

/// The compiled part of kvpool.
#[pymodule(gil_used = false)]
fn _kvpool(module: &Bound<'_, PyModule>) -> PyResult<()> {
    process::follow_forks();
    runtime::end_with(module.py())?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<call::Call>()?;
    layout::register(module)?;
    pool::register(module)?;
    map::register(module)?;
    handle::register(module)?;
    lease::register(module)?;
    sequence::register(module)?;
    layers::register(module)?;
    grouped::register(module)?;
    grouped_batch::register(module)?;
    batch::register(module)?;
    table::register(module)?;
    tensor::register(module)?;
    prefix::register(module)?;
    hints::register(module)?;
    tenants::register(module)?;
    events::register(module)?;
    stats::register(module)?;
    defragmenter::register(module)?;
    node::register(module)?;
    admin::register(module)?;
    tier::register(module)?;
    eviction::register(module)?;
    frame_pool::register(module)
}

//! `Defragmenter`: a background task that compacts a pool.

use std::sync::Arc;
use std::time::Duration;

use kvpool::{DefragConfig, Defragmenter};
use pyo3::prelude::*;

use crate::args::{Seconds, Share};
use crate::call::Call;
use crate::error::Outcome;
use crate::exclusive::Exclusive;
use crate::pool::PyPool;
use crate::runtime::{runtime, wait};
use crate::stats::DefragmenterTotals;

/// A background task that compacts a pool whenever it is fragmented. It ends when this is stopped
/// or collected, and with the pool. Also a context manager.
#[pyclass(frozen, name = "Defragmenter", module = "kvpool._kvpool")]
pub struct PyDefragmenter(Arc<Exclusive<Defragmenter>>);

#[pymethods]
impl PyPool {
    /// Starts a task, on a thread of the package, that compacts the pool while its fragmentation
    /// rate is above `threshold` (0 to 1), and looks every `interval` seconds. In a pool full of
    /// evictable blocks: above 0.25, and at most a `share` (0 to 1) of the allocated blocks.
    #[pyo3(signature = (*, threshold=Share(0.02), interval=Seconds(Duration::from_millis(2)), share=Share(0.02)), text_signature = "($self, *, threshold=0.02, interval=0.002, share=0.02)")]
    fn start_defragmenter(
        &self,
        threshold: Share,
        interval: Seconds,
        share: Share,
    ) -> Outcome<PyDefragmenter> {
        let config = DefragConfig::new().threshold(threshold.0).interval(interval.0).share(share.0);
        let _runtime = runtime()?.enter();
        let task = self.get()?.start_defragmenter(config)?;
        Ok(PyDefragmenter(Arc::new(Exclusive::new("defragmenter", task))))
    }
}

#[pymethods]
impl PyDefragmenter {
    /// Returns the totals so far.
    fn totals(&self) -> Outcome<DefragmenterTotals> {
        Ok(self.0.enter()?.totals().into())
    }

    /// Stops the task, waits for its end, and returns the totals.
    fn stop(&self) -> Outcome<Call> {
        let task = Arc::clone(&self.0);
        Ok(Call::new(move |caller| {
            let task = task.take()?;
            caller.waits(async move { Ok(DefragmenterTotals::from(task.stop().await)) })
        }))
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyAny>) -> Outcome<()> {
        if let Some(task) = self.0.take_if_any()? {
            wait(py, async move { task.stop().await })?;
        }
        Ok(())
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyDefragmenter>()
}

//! Size, counts and audit of a pool of frames.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::args::Frames;
use crate::error::Outcome;

use super::FramePool;
use super::work::detached;

#[pymethods]
impl FramePool {
    /// Adds `frames` frames while the pool serves, up to `frames_max`.
    fn grow(&self, py: Python<'_>, frames: Frames) -> Outcome<()> {
        let pool = self.here()?;
        Ok(py.detach(|| pool.grow(frames.0))?)
    }

    /// Shrinks the pool to `frames` frames. Raises `ResizeError`, with the frames in use.
    fn shrink(&self, py: Python<'_>, frames: Frames) -> Outcome<()> {
        let pool = self.here()?;
        Ok(py.detach(|| pool.shrink(frames.0))?)
    }

    /// Returns free frames cached by threads to the bitmaps, where they join into runs.
    fn trim(&self) -> Outcome<()> {
        self.here()?.trim();
        Ok(())
    }

    /// The number of frames, with the null block's: all frame numbers are below it.
    #[getter]
    fn frames(&self) -> Outcome<usize> {
        Ok(self.here()?.frames())
    }

    /// The number of frames that an allocation can get: free, or cached without references.
    #[getter]
    fn available(&self) -> Outcome<usize> {
        Ok(self.here()?.available())
    }

    /// The number of frames with references. O(threads).
    #[getter]
    fn used(&self) -> Outcome<usize> {
        Ok(self.here()?.counts().used())
    }

    /// The share of possible free runs of `2**fragmentation_order` frames that does not exist.
    fn fragmentation(&self, py: Python<'_>) -> Outcome<f64> {
        let pool = self.here()?;
        Ok(detached(py, pool.frames(), || pool.fragmentation().rate))
    }

    /// The number of frames in each state, and counts of the cache since the pool was built.
    fn stats<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyDict>> {
        let pool = self.here()?;
        let (counts, cache) = (pool.counts(), pool.cache_stats());
        let stats = PyDict::new(py);
        for (name, value) in [
            ("total", counts.total as u64),
            ("used", counts.used() as u64),
            ("free", counts.free() as u64),
            ("evictable", counts.evictable as u64),
            ("retired", counts.retired as u64),
            ("held", counts.held as u64),
            ("reserved", counts.reserved as u64),
            ("lookups", cache.lookups),
            ("lookup_blocks", cache.lookup_blocks),
            ("hit_blocks", cache.hit_blocks),
            ("registered_blocks", cache.registered_blocks),
            ("forgotten_blocks", cache.forgotten_blocks),
            ("evicted_blocks", cache.evicted_blocks),
        ] {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }

    /// Recounts every frame, and returns the counts. Raises `AuditError` at the first
    /// contradiction. To be called while no other thread uses the pool.
    fn audit<'py>(&self, py: Python<'py>) -> Outcome<Bound<'py, PyDict>> {
        let pool = self.here()?;
        let report = py.detach(|| pool.audit())?;
        let counts = PyDict::new(py);
        for (name, value) in [
            ("total", report.total as u64),
            ("in_bitmap", report.in_bitmap as u64),
            ("in_magazines", report.in_magazines as u64),
            ("retired", report.retired as u64),
            ("held", report.held as u64),
            ("reserved", report.reserved as u64),
            ("evictable", report.evictable as u64),
            ("owned", report.owned as u64),
            ("references", report.references),
        ] {
            counts.set_item(name, value)?;
        }
        Ok(counts)
    }
}

//! Moves of cached frames that a pool proposes, and a batch in flight.

use kvpool::{FrameBatch as Batch, FrameMoves as Moves};
use pyo3::prelude::*;

use crate::error::Outcome;
use crate::exclusive::Exclusive;

/// Moves that `FramePool.propose_moves` proposes: the engine copies each pair, and commits.
///
/// Until then the destinations are held, and the sources are not evicted. An object that is dropped
/// cancels its moves.
#[pyclass(frozen, module = "kvpool")]
pub struct FrameMoves(Exclusive<Moves>);

impl FrameMoves {
    pub fn new(moves: Moves) -> Self {
        Self(Exclusive::new("set of moves", moves))
    }
}

#[pymethods]
impl FrameMoves {
    /// The copies to make: pairs of source and destination frame. No frame occurs twice.
    fn pairs(&self) -> Outcome<Vec<(u32, u32)>> {
        Ok(self.0.enter()?.pairs().collect())
    }

    /// Makes the copied moves take effect. Returns the pairs that moved, and the frames that stayed
    /// with the reason: they got references, or lost their keys.
    #[expect(clippy::type_complexity, reason = "two lists of pairs")]
    fn commit(&self) -> Outcome<(Vec<(u32, u32)>, Vec<(u32, String)>)> {
        let outcome = self.0.take()?.commit();
        let stayed = outcome.stayed.into_iter().map(|(frame, why)| (frame, format!("{why:?}")));
        Ok((outcome.moved, stayed.collect()))
    }

    /// Cancels all moves. Does nothing if they were committed or cancelled.
    fn cancel(&self) -> Outcome<()> {
        self.0.take_if_any().map(drop)
    }

    fn __len__(&self) -> Outcome<usize> {
        Ok(self.0.enter_if_any()?.map_or(0, |moves| moves.len()))
    }
}

/// A batch in flight: frames that are freed meanwhile are not reused before it ends.
#[pyclass(frozen, module = "kvpool")]
pub struct FrameBatch(Exclusive<Batch>);

impl FrameBatch {
    pub fn new(batch: Batch) -> Self {
        Self(Exclusive::new("batch", batch))
    }
}

#[pymethods]
impl FrameBatch {
    /// Ends the batch. Does nothing if it has ended.
    fn end(&self) -> Outcome<()> {
        self.0.take_if_any().map(drop)
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __exit__(
        &self,
        _kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> Outcome<()> {
        self.end()
    }
}

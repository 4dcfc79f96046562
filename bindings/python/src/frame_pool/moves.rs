//! Moves of cached frames that a pool proposes, and a batch in flight.

use std::sync::{Mutex, PoisonError};

use kvpool::{FrameBatch as Batch, FrameMoves as Moves};
use pyo3::prelude::*;

use crate::error::{Failure, Outcome, fields, raise};
use crate::process::Process;

/// Moves that :meth:`FramePool.propose_moves` proposes: the engine copies each pair, and commits.
///
/// Until then the destinations are held, and the sources are not evicted. An object that is dropped
/// cancels its moves.
#[pyclass(frozen, module = "kvpool")]
pub struct FrameMoves {
    moves: Mutex<Option<Moves>>,
    process: Process,
}

impl FrameMoves {
    pub fn new(moves: Moves) -> Self {
        Self { moves: Mutex::new(Some(moves)), process: Process::current() }
    }

    fn take(&self) -> Outcome<Option<Moves>> {
        self.process.check()?;
        Ok(self.moves.lock().unwrap_or_else(PoisonError::into_inner).take())
    }

    fn ended() -> Failure {
        raise("Closed", "these moves were committed or cancelled already", fields![])
    }
}

#[pymethods]
impl FrameMoves {
    /// The copies to make: pairs of source and destination frame. No frame occurs twice.
    fn pairs(&self) -> Outcome<Vec<(u32, u32)>> {
        self.process.check()?;
        // Unlocked before the exception is made: that runs Python code, and another thread may get the
        // GIL and wait for the lock.
        let pairs = {
            let moves = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
            moves.as_ref().map(|moves| moves.pairs().collect())
        };
        pairs.ok_or_else(Self::ended)
    }

    /// Makes the copied moves take effect. Returns the pairs that moved, and the frames that stayed
    /// with the reason: they got references, or lost their keys.
    #[expect(clippy::type_complexity, reason = "two lists of pairs")]
    fn commit(&self) -> Outcome<(Vec<(u32, u32)>, Vec<(u32, String)>)> {
        let moves = self.take()?.ok_or_else(Self::ended)?;
        let outcome = moves.commit();
        let stayed = outcome.stayed.into_iter().map(|(frame, why)| (frame, format!("{why:?}")));
        Ok((outcome.moved, stayed.collect()))
    }

    /// Cancels all moves. Does nothing if they were committed or cancelled.
    fn cancel(&self) -> Outcome<()> {
        drop(self.take()?);
        Ok(())
    }

    fn __len__(&self) -> usize {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map_or(0, Moves::len)
    }
}

/// A batch in flight: frames that are freed meanwhile are not reused before it ends.
#[pyclass(frozen, module = "kvpool")]
pub struct FrameBatch {
    batch: Mutex<Option<Batch>>,
    process: Process,
}

impl FrameBatch {
    pub fn new(batch: Batch) -> Self {
        Self { batch: Mutex::new(Some(batch)), process: Process::current() }
    }
}

#[pymethods]
impl FrameBatch {
    /// Ends the batch. Does nothing if it has ended.
    fn end(&self) -> Outcome<()> {
        self.process.check()?;
        drop(self.batch.lock().unwrap_or_else(PoisonError::into_inner).take());
        Ok(())
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

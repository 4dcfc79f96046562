//! Access to the rows of tokens in a pool's storage, and errors of a full pool.

use std::sync::Arc;

use kvpool::storage::{CopyDone, Elements, ElementsMut, FrameMove, Storage};
use kvpool::{AllocError, BuildError, Pool, PoolBuilder, SequenceError};

use crate::content::Shape;

/// The rows of tokens in the storage of a pool, or of its engine.
///
/// Threads store only into slots that they have just appended to their own sequences, and into the
/// states of these, under a batch in flight, and load only from their own sequences.
#[derive(Clone)]
pub struct Rows(Arc<dyn Storage>);

impl Rows {
    /// Returns the rows of a pool, which must have storage of its own.
    pub fn of(pool: &Pool) -> Result<Self, String> {
        pool.storage().cloned().map(Self).ok_or_else(|| "the pool has no storage".to_owned())
    }

    /// Builds a pool without storage, and returns it with rows in the storage of an engine, which no
    /// one else uses: when the pool moves blocks, their frames are copied there.
    pub fn build(builder: PoolBuilder, storage: Arc<dyn Storage>) -> Result<(Pool, Self), BuildError> {
        let rows = storage.clone();
        let copier = move |moves: &[FrameMove], done: CopyDone| {
            // SAFETY: the frame rule, which the pool keeps until `done` is called.
            unsafe { storage.copy_then(moves, done) }
        };
        Ok((builder.engine_copies(Arc::new(copier)).build()?, Self(rows)))
    }

    /// Returns the size of a token and of a block.
    pub fn shape(&self) -> Shape {
        Shape::of(self.0.layout())
    }

    /// Stores K and V of tokens in one layer, a row per slot.
    pub fn store(&self, layer: usize, k: &[u8], v: &[u8], slots: &[i64]) -> Result<(), String> {
        let dtype = self.0.layout().dtype();
        let (k, v) = (Elements::new(dtype, k).map_err(text)?, Elements::new(dtype, v).map_err(text)?);
        // SAFETY: the frame rule. The slots are of tokens that the calling thread has just appended
        // to its own sequences, or of their states, under a batch in flight. The pool gives such
        // blocks one owner until the batch has ended, which is the guarantee that a replay checks.
        unsafe { self.0.store(layer, k, v, slots) }.map_err(text)
    }

    /// Copies whole frames, as an engine copies the states of its sequences.
    pub fn copy(&self, moves: &[FrameMove]) -> Result<(), String> {
        // SAFETY: the frame rule. The pool has named the frames to the calling thread for this
        // copy. No one writes the first of each: it is of the run of the thread's own sequence, or
        // of a checkpoint, whose frames are not reused while the batch is in flight. No one else
        // accesses the second: it is of the run of its sequence, or of a checkpoint that is not
        // found before the batch has ended.
        unsafe { self.0.copy(moves) }.map_err(text)
    }

    /// Loads K and V of tokens in one layer, a row per slot.
    pub fn load(&self, layer: usize, slots: &[i64], k: &mut [u8], v: &mut [u8]) -> Result<(), String> {
        let dtype = self.0.layout().dtype();
        let (k, v) = (ElementsMut::new(dtype, k).map_err(text)?, ElementsMut::new(dtype, v).map_err(text)?);
        // SAFETY: as in `store`: the calling thread owns the sequences of these slots. Blocks that
        // they share with other sequences are full, and not written again.
        unsafe { self.0.load(layer, slots, k, v) }.map_err(text)
    }
}

/// Returns the free and the retired blocks if the pool is full; any other error as text. A request
/// larger than the pool means that the pool has just shrunk; the request is rejected elsewhere.
/// Evictable blocks are refused only while a batch in flight may read them, and so count as
/// retired. If there is no run for the states of a sequence, free blocks count as free, too.
pub fn full(error: SequenceError) -> Result<(usize, usize), String> {
    match error {
        SequenceError::Alloc(AllocError::Exhausted { free, retired, evictable, .. }) => {
            Ok((free, retired + evictable))
        }
        SequenceError::Alloc(AllocError::NoRun { free, evictable, .. }) => Ok((free, evictable)),
        SequenceError::Alloc(AllocError::TooLarge { .. }) => Ok((0, 0)),
        error => Err(error.to_string()),
    }
}

fn text(error: impl ToString) -> String {
    error.to_string()
}

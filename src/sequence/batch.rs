//! A step of the engine.

use std::fmt;

use thiserror::Error;

use crate::error::{SequenceError, StorageError};
use crate::ids::{BlockHandle, SequenceId, Ticket};
use crate::storage::DeviceStream;

use super::batch_inner::{BatchInner, Finish};
use super::registry::Sequences;
use super::sequence::Sequence;

/// One step of the engine, in flight: the lease under which tables are read and memory is accessed.
/// Begun by [`Pool::begin_batch`](crate::Pool::begin_batch), ended by [`finish`](Self::finish).
///
/// Batches can move between threads, overlap, and end in any order. A frame read from a table under
/// a batch is not reused before the batch ends. The engine must not end a batch until the kernels
/// that read its tables or write to its slots have finished.
///
/// At its end, the full blocks that it filled are *sealed*: their bytes are final, and they can be
/// shared, moved and, if their tokens are known, found in the prefix cache. Drafted tokens are not
/// final until [committed](Sequence::commit).
///
/// # Abandoned batches
///
/// A batch that is dropped without [`finish`](Self::finish), by an error or a panic, or whose
/// device fails, is *abandoned*: what it wrote counts as not computed. Each sequence that it wrote
/// to is cut to where its first write began, which also removes what other batches appended behind;
/// ids that were announced before stay announced. The blocks become the sequence's
/// [reservation](Sequence::reserve), so that the step can be tried again. While another batch that
/// wrote to the sequence is in flight, or the batch's stream has not reached its end, they are
/// instead freed once that is over; in the last remaining block, the batch's work must precede the
/// second try in stream order. Without storage, a block that the engine copied for the batch is
/// removed.
///
/// ```
/// # use kvpool::{KvLayout, Pool, SequenceError, SequenceId};
/// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
/// # let mut sequence = pool.sequence(SequenceId(1)).open()?;
/// let launch = |fails: bool| if fails { Err("launch failed") } else { Ok(()) };
/// let mut step = |fails| -> Result<(), Box<dyn std::error::Error>> {
///     let mut batch = pool.begin_batch();
///     batch.append(&mut sequence, 20)?;
///     launch(fails)?;    // an error drops the batch
///     batch.finish();
///     Ok(())
/// };
/// assert!(step(true).is_err() && step(false).is_ok());
/// assert_eq!(sequence.len(), 20);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// ```
/// use kvpool::{BlockTable, KvLayout, Pool, SequenceId};
///
/// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
/// let mut sequence = pool.sequence(SequenceId(1)).open()?;
/// let mut batch = pool.begin_batch();
/// let new = batch.append(&mut sequence, 20)?;
/// let (mut slots, mut table) = (Vec::new(), BlockTable::new());
/// batch.slot_mapping(&sequence, new.tokens, &mut slots)?;
/// batch.block_table([&sequence], &mut table)?;
/// // ... kernels run ...
/// batch.finish();
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a batch that is dropped is abandoned: what was appended under it is withdrawn"]
pub struct Batch {
    pub(super) step: BatchInner,
    /// Slots of a store or a load; kept to reuse the buffer.
    pub(super) slots: Vec<i64>,
}

/// Error of a batch that could not be finished on a stream. The batch is still in flight.
#[derive(Debug, Error)]
#[error("batch {}: {error}", batch.ticket())]
pub struct FinishError {
    /// The error of the stream.
    pub error: StorageError,
    /// The batch.
    pub batch: Box<Batch>,
}

impl Batch {
    internal! {
        /// Begins a batch.
        ///
        /// # Panics
        /// If 65,536 batches are in flight.
        fn begin(sequences: &Sequences) -> Self {
            Self { step: BatchInner::begin(sequences.clone()), slots: Vec::new() }
        }
    }

    /// See [`Pool::begin_batch_on`](crate::Pool::begin_batch_on).
    pub(crate) fn begin_on(sequences: &Sequences, stream: &DeviceStream) -> Result<Self, StorageError> {
        sequences.check_stream(stream)?;
        let mut batch = Self::begin(sequences);
        batch.step.stream = Some(stream.clone());
        Ok(batch)
    }

    /// Returns its position in the order of batches.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        self.step.ticket()
    }

    /// Returns the blocks that this batch filled, which become final when it ends: a binding that
    /// lends out writable memory of blocks can refuse to end it.
    pub fn blocks_to_seal(&self) -> impl ExactSizeIterator<Item = BlockHandle> + Clone {
        self.step.promised.iter().map(|promise| promise.handle)
    }

    /// Ends the batch: its tokens have been computed and stored, and the caller's work no longer
    /// accesses memory. [On a stream](crate::Pool::begin_batch_on), it ends in stream order.
    pub fn finish(mut self) {
        self.step.is_finished = true;
    }

    /// Ends the batch when the device has completed the work enqueued on this stream so far.
    /// Returns at once; the future need not be awaited.
    ///
    /// All work that uses the batch's tables and slots must be enqueued on this stream, or the
    /// stream must wait for it. If the batch was begun on another stream, its copies on write there
    /// are waited for too. If it was begun without one, it has copied on write at the time of the
    /// append, regardless of queued work: intended for batches whose bytes are written when they
    /// end on the host, or that write to no shared block.
    ///
    /// # Errors
    /// [`FinishError`], with the batch, if [`Pool::begin_batch_on`](crate::Pool::begin_batch_on)
    /// would refuse the stream. The future fails if the device fails first: the batch has then
    /// ended without caching its blocks, and the pool hands out no more blocks.
    pub fn finish_on(self, stream: &DeviceStream) -> Result<Finish, FinishError> {
        if let Err(error) = self.step.sequences.check_stream(stream) {
            return Err(FinishError { error, batch: Box::new(self) });
        }
        let (tell, told) = Finish::pair(stream.device());
        let mut step = self.step;
        step.is_finished = true;
        let begun = step.stream.take().filter(|begun| begun.as_raw() != stream.as_raw());
        match begun.filter(|_| !step.copied.is_empty()) {
            None => step.end_after(&[stream], Some(tell)),
            Some(begun) => step.end_after(&[&begun, stream], Some(tell)),
        }
        Ok(told)
    }

    /// Records that this batch writes again to open blocks, which may be due.
    pub(super) fn writes_again(&mut self, sequence: &mut Sequence, from: u32) {
        sequence.seals.wrote_again(self.ticket());
        self.step.note(sequence, from, None);
    }

    #[inline]
    pub(super) fn check(&self, of: &Sequences, id: SequenceId) -> Result<(), SequenceError> {
        if self.step.sequences.same(of) { Ok(()) } else { Err(SequenceError::ForeignSequence { id }) }
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.step.fmt(f)
    }
}

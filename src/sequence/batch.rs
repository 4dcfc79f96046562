//! One step of the engine: tokens are appended and tables built under it, and device memory is
//! accessed until it ends.

use std::fmt;
use std::ops::Range;

use thiserror::Error;

use crate::error::{SequenceError, StorageError};
use crate::ids::{BlockHandle, BlockId, Ticket};
use crate::storage::{DeviceStream, FrameMove};
use crate::sync::Ordering::Relaxed;

use super::batch_inner::{BatchInner, Finish, Promise};
use super::plan::Growth;
use super::plan::{too_long, zero_tokens};
use super::registry::Sequences;
use super::sequence::{Access, Sequence};
use super::tokens::Tokens;

/// One step of the engine, in flight: the lease under which tables are read and memory is accessed.
///
/// [`Pool::begin_batch`](crate::Pool::begin_batch) begins it, [`finish`](Self::finish) ends it. It
/// may move between threads, overlap with other batches, and end in any order.
///
/// Until it ends, no frame that was read from a table under it is reused. The engine must therefore
/// not end a batch before the kernels have finished that read its tables or write to its slots.
///
/// When it ends, the full blocks that it filled are *sealed*: their bytes are final, so that they
/// can be shared, moved and, if their tokens are known, found in the prefix cache. Drafted tokens
/// are not final until [committed](Sequence::commit).
///
/// # Abandoned batches
///
/// A batch that is dropped without [`finish`](Self::finish), by an error or a panic, or whose
/// device fails, is *abandoned*: what was written under it counts as not computed. Each sequence
/// that it wrote to is cut to where its first write began, including what other batches appended
/// behind; ids that were announced before stay announced. The blocks become the sequence's
/// [reservation](Sequence::reserve), so that the step can be tried again. While another batch that
/// wrote to the sequence is in flight, or the batch's stream has not got to its end, they are freed
/// instead, once it has; in the last block that stays, work of that batch must precede the second
/// try in stream order. Without storage, a block that the engine copied for the batch goes as a
/// whole.
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

/// Result of an append.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Appended {
    /// Positions of the new tokens in the sequence.
    pub tokens: Range<usize>,
    /// Number of allocated blocks, including a copy.
    pub new_blocks: usize,
    /// The block that was copied because it could not be written in place.
    pub copied: Option<Copied>,
}

/// A block that was replaced by a copy in a sequence's list.
///
/// A pool with storage has copied the bytes, or enqueued the copy. Without storage the engine must
/// copy them before the batch's own writes; the old frame keeps its bytes until the batch ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copied {
    /// The old block.
    pub from: BlockId,
    /// The copy.
    pub to: BlockId,
    /// Their frames.
    pub frames: FrameMove,
}

/// What an append took besides the room in the last block.
pub(super) struct Grown {
    pub(super) new_blocks: usize,
    pub(super) copied: Option<Copied>,
}

impl Grown {
    const IN_PLACE: Self = Self { new_blocks: 0, copied: None };

    #[inline]
    fn appended(self, plan: &Growth) -> Appended {
        let tokens = plan.from as usize..plan.length as usize;
        Appended { tokens, new_blocks: self.new_blocks, copied: self.copied }
    }
}

/// The last block that an append writes into, and how it may be accessed.
pub(super) struct Tail {
    pub(super) id: BlockId,
    pub(super) access: Access,
}

impl Batch {
    internal! {
        /// Begins a batch.
        ///
        /// # Panics
        ///
        /// If 65,536 batches are in flight.
        fn begin(sequences: &Sequences) -> Self {
            Self { step: BatchInner::begin(sequences.clone()), slots: Vec::new() }
        }
    }

    /// Begins a batch on a device's stream: see
    /// [`Pool::begin_batch_on`](crate::Pool::begin_batch_on).
    pub(crate) fn begin_on(sequences: &Sequences, stream: &DeviceStream) -> Result<Self, StorageError> {
        sequences.check_stream(stream)?;
        let mut batch = Self::begin(sequences);
        batch.step.stream = Some(stream.clone());
        Ok(batch)
    }

    /// Returns its position in the order of batches.
    pub fn ticket(&self) -> Ticket {
        self.step.ticket()
    }

    /// Returns the blocks that become final when this batch ends: those that it filled.
    ///
    /// A binding that lends out writable memory of blocks can refuse to end the batch before.
    pub fn blocks_to_seal(&self) -> impl ExactSizeIterator<Item = BlockHandle> + Clone {
        self.step.promised.iter().map(|promise| promise.handle)
    }

    /// Ends the batch: everything that was appended under it has been computed and stored. The
    /// caller's work must have ended: it no longer accesses memory.
    ///
    /// A batch [begun on a stream](crate::Pool::begin_batch_on) ends when the stream gets there.
    pub fn finish(mut self) {
        self.step.is_finished = true;
    }

    /// Ends the batch when the device has completed the work enqueued on this stream so far.
    ///
    /// All work that uses the batch's tables and slots must have been enqueued on this stream, or
    /// the stream must wait for it. Copies on write need no care: if the batch was begun on another
    /// stream, that one is waited for too. Returns at once; the returned future need not be
    /// awaited.
    ///
    /// Intended for batches whose bytes are written when they end on the host, or that write to no
    /// shared block: a batch not [begun on the stream](crate::Pool::begin_batch_on) copies on write
    /// at the time of the append, regardless of work still queued there.
    ///
    /// # Errors
    ///
    /// [`FinishError`], which returns the batch, in the cases in which
    /// [`Pool::begin_batch_on`](crate::Pool::begin_batch_on) refuses a stream. The future fails if
    /// the device failed before the stream got there. The batch has then ended without any of its
    /// blocks being cached, and the pool hands out no blocks any more.
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

    /// Appends tokens to a sequence: a number of final ones, ids, or [others](Tokens).
    ///
    /// Allocates blocks as needed, and copies the last block first if it cannot be written in
    /// place. With final tokens, earlier drafted ones become final too. [`step`](Self::step)
    /// appends to many sequences, all or none.
    ///
    /// # Errors
    ///
    /// The sequence is unchanged: [`SequenceError::Alloc`] if there are no blocks,
    /// [`SequenceError::Invalid`] for no or too many tokens,
    /// [`SequenceError::ForeignSequence`], [`SequenceError::Storage`] if the copy failed. With
    /// [ids](Tokens::Ids), which are then not announced, also [`SequenceError::TokensUnknown`] if
    /// earlier tokens were not announced, drafted ones included, and [`SequenceError::TokensAhead`]
    /// if other announced tokens must be appended first.
    #[inline]
    pub fn append<'t>(
        &mut self,
        sequence: &mut Sequence,
        tokens: impl Into<Tokens<'t>>,
    ) -> Result<Appended, SequenceError> {
        let tokens = tokens.into();
        sequence.catch_up();
        if self.is_nothing(sequence, tokens)? {
            let length = sequence.list.tokens() as usize;
            return Ok(Appended { tokens: length..length, new_blocks: 0, copied: None });
        }
        let plan = self.plan(sequence, tokens)?;
        if let Err(tail) = self.find_room(sequence, &plan) {
            return self.append_to_list(sequence, &plan, tail, tokens);
        }
        self.append_in_place(sequence, &plan, tokens);
        Ok(Grown::IN_PLACE.appended(&plan))
    }

    /// Completes an append that the last block takes, which is [open](Self::find_room).
    #[inline(always)]
    pub(super) fn append_in_place(&mut self, sequence: &mut Sequence, plan: &Growth, tokens: Tokens<'_>) {
        self.fill_last(sequence, plan);
        self.complete(sequence, plan, tokens);
    }

    /// Completes an append that does not fit into the last block, or must not be written there.
    #[inline(never)]
    pub(super) fn append_to_list(
        &mut self,
        sequence: &mut Sequence,
        plan: &Growth,
        tail: Option<Tail>,
        tokens: Tokens<'_>,
    ) -> Result<Appended, SequenceError> {
        let grown = self.grow_list(sequence, plan, tail)?;
        // Only now, so that an error needs no rollback.
        self.complete(sequence, plan, tokens);
        Ok(grown.appended(plan))
    }

    /// Announces the tokens of a growth that have ids, and makes them final unless they are
    /// drafted.
    #[inline(always)]
    fn complete(&mut self, sequence: &mut Sequence, plan: &Growth, tokens: Tokens<'_>) {
        if let (Tokens::Ids(ids), Some(known), Some(cache)) =
            (tokens, &mut sequence.known, &self.step.sequences.0.cache)
        {
            known.announce_checked(cache, ids);
        }
        if !matches!(tokens, Tokens::Draft(_)) {
            self.make_final(sequence, plan);
        }
    }

    /// Makes the tokens of a growth final.
    #[inline]
    fn make_final(&mut self, sequence: &mut Sequence, plan: &Growth) {
        let has_drafts = sequence.committed < plan.from;
        sequence.committed = plan.length;
        if let Some(known) = &mut sequence.known {
            known.committed(plan.length);
        }
        if plan.full > plan.first {
            self.filled(sequence, plan);
        } else if has_drafts {
            sequence.seals.complete(plan.full);
        }
    }

    /// Promises full blocks of final tokens to this batch if no other writer is in flight.
    ///
    /// Otherwise the sequence seals them later.
    fn filled(&mut self, sequence: &mut Sequence, plan: &Growth) {
        let (ticket, blocks) = (self.ticket(), &self.step.sequences.0.blocks);
        let written = (plan.first + u32::from(plan.tail)) as usize;
        self.step.since = self.step.since.min(sequence.look_for_uncached(written));
        let others = sequence.seals.last_writer_but(ticket);
        // This batch was added last. The look at all slots is for sequences with more writers than
        // their set tells apart.
        let is_last_writer = others == Ticket(0)
            || blocks.clock().others_ended(&sequence.writers)
            || blocks.clock().ended(others);
        // Only after the others were found to have ended, not abandoned.
        let is_last_writer = is_last_writer && !sequence.is_stale();
        // Earlier blocks are settled: the promise begins where they end.
        if sequence.seals.settled() == plan.first && is_last_writer {
            let ids = &sequence.list.ids()[plan.first as usize..plan.full as usize];
            let known = sequence.token_hashes();
            self.step.promised.extend((plan.first..plan.full).zip(ids).map(|(place, id)| {
                // Relaxed: only the owner, borrowed here, changes it.
                let id = BlockId(id.load(Relaxed));
                let hash = known.and_then(|(known, cache)| Some((known, cache, known.hash(place)?)));
                if let Some((known, cache, hash)) = hash {
                    cache.note(id, hash, known.era(), place, known.mark());
                }
                Promise {
                    handle: blocks.handle(id),
                    is_noted: hash.is_some(),
                    stored: hash.and_then(|(known, cache, _)| known.stored(cache, id, place)),
                }
            }));
            sequence.seals.promise(plan.full, ticket);
        } else {
            sequence.seals.complete(plan.full);
        }
    }

    /// Makes the last block writable in place, if the planned growth writes to it, and returns the
    /// copy if one was necessary. On an error, nothing has changed.
    pub(super) fn open_tail(
        &mut self,
        sequence: &mut Sequence,
        plan: &Growth,
    ) -> Result<Option<Copied>, SequenceError> {
        let Some(id) = sequence.list.last().filter(|_| plan.tail) else { return Ok(None) };
        let tail = self.tail(sequence, plan.first, id);
        if tail.access == Access::Open {
            return Ok(None);
        }
        let plan = Growth { length: plan.from, fresh: 0, full: plan.first, ..*plan };
        Ok(self.grow_list(sequence, &plan, Some(tail))?.copied)
    }

    /// Records that this batch writes to open blocks of the sequence, from a position on.
    #[inline(always)]
    pub(super) fn writes(&mut self, sequence: &mut Sequence, from: u32) {
        sequence.seals.wrote(self.ticket());
        self.step.note(sequence, from);
    }

    /// Records that this batch writes to open blocks again, some of which may be due.
    pub(super) fn writes_again(&mut self, sequence: &mut Sequence, from: u32) {
        sequence.seals.wrote_again(self.ticket());
        self.step.note(sequence, from);
    }

    /// Returns an error for a sequence of another pool.
    #[inline]
    pub(super) fn check(&self, of: &Sequences, id: crate::ids::SequenceId) -> Result<(), SequenceError> {
        if self.step.sequences.same(of) { Ok(()) } else { Err(SequenceError::ForeignSequence { id }) }
    }

    /// Returns whether all announced tokens were appended, if those are to be.
    #[inline(always)]
    pub(super) fn is_nothing(&self, sequence: &Sequence, tokens: Tokens<'_>) -> Result<bool, SequenceError> {
        let Tokens::Announced(_) = tokens else { return Ok(false) };
        let id = sequence.id();
        self.check(&sequence.sequences, id)?;
        if sequence.known.is_none() {
            return Err(SequenceError::TokensUnknown { id, known: 0 });
        }
        Ok(tokens.count(sequence) == 0)
    }

    /// Plans an append, or returns the error for one that no number of blocks permits.
    // Always inline, as below: to pass these results through memory takes longer than the rest.
    #[inline(always)]
    pub(super) fn plan(&self, sequence: &Sequence, tokens: Tokens<'_>) -> Result<Growth, SequenceError> {
        let (id, length) = (sequence.id(), sequence.list.tokens());
        self.check(&sequence.sequences, id)?;
        if let (Tokens::Ids(_), Some(known)) = (tokens, sequence.known.as_deref()) {
            known.check_all_announced(id, length as usize)?;
        }
        let tokens = tokens.count(sequence);
        if tokens == 0 {
            return Err(zero_tokens(id));
        }
        let blocks = sequence.list.len() as u32;
        Growth::plan(length, blocks, tokens, self.step.sequences.0.block_tokens)
            .ok_or_else(|| too_long(id, tokens, length as usize))
    }

    /// Returns `Ok` if the last block takes the tokens, and is open. Nothing has changed.
    ///
    /// `Err`: [grow the list](Self::grow_list), given the last block, if there are tokens in it.
    #[inline(always)]
    pub(super) fn find_room(&self, sequence: &mut Sequence, plan: &Growth) -> Result<(), Option<Tail>> {
        sequence.settle();
        sequence.frames.catch_up(&sequence.list, &self.step.sequences.0.blocks);
        let Some(id) = sequence.list.last().filter(|_| plan.tail) else { return Err(None) };
        let tail = self.tail(sequence, plan.first, id);
        if plan.fresh > 0 || tail.access != Access::Open { Err(Some(tail)) } else { Ok(()) }
    }

    /// Grows a sequence by tokens for which there [is room](Self::find_room) in its last block.
    #[inline(always)]
    fn fill_last(&mut self, sequence: &mut Sequence, plan: &Growth) {
        sequence.list.last().into_iter().for_each(|last| self.step.sequences.0.blocks.touch(&[last]));
        sequence.publish(plan.length);
        self.writes(sequence, plan.from);
    }

    #[inline(always)]
    fn tail(&self, sequence: &Sequence, place: u32, id: BlockId) -> Tail {
        let word = self.step.sequences.0.blocks.word(id);
        let access = sequence.access(place, word, self.ticket());
        debug_assert!(access != Access::Open || sequence.frames.last() == Some(word.frame()));
        Tail { id, access }
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.step.fmt(f)
    }
}

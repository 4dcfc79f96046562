//! A step of the engine: tokens are appended under it, tables are built under it, and memory is touched until it ends.
//!
//! # Copy on write
//!
//! An append into a block that is not the sequence's alone takes a fresh block, copies the old one's bytes there, and puts
//! it in the old one's place. On host memory the copy is done when the append returns, and the old block is released
//! at once. Elsewhere (a device's storage only enqueues it; without storage the engine copies) the batch keeps the
//! reference until it ends: until then nobody is the old block's only owner, and so nobody writes to it. The batch's own
//! writes must be enqueued after the append, so that they come after the copy.
//!
//! Model: `loom-tests/tests/sequences.rs`, `copies_on_write_meet`.

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use thiserror::Error;

use crate::block::AllocRequest;
use crate::error::{AllocError, SequenceError, StorageError};
use crate::ids::{BlockId, FrameId, Ticket};
use crate::storage::{DeviceStream, FrameMove};

use super::TOKENS_MAX;
use super::batch_inner::{BatchInner, Finish, Promise};
use super::plan::Growth;
use super::registry::Sequences;
use super::sequence::{Access, Sequence};
use super::token_hashes::TokenHashes;

/// One step in flight. It may move between threads, overlap with others, and end in any order. It ends when it is
/// [finished](Self::finish) or dropped: full blocks of final tokens that were filled in it are sealed then, and registered
/// with the prefix cache, if their tokens are known and it is not dropped by a panic. Tokens whose bytes could not be
/// computed are therefore to be [taken back](Sequence::truncate) before the batch ends.
///
/// Until it ends, no frame that was read from a table under it is reused: everything that a kernel is given was built
/// by a batch that ends after the kernel.
pub struct Batch {
    pub(super) step: BatchInner,
    /// Slots of a store or a load; kept for its room.
    pub(super) slots: Vec<i64>,
}

/// Why a batch was not finished on a stream. The batch goes on.
#[derive(Debug, Error)]
#[error("batch {}: {error}", batch.ticket())]
pub struct FinishError {
    /// What was wrong with the stream.
    pub error: StorageError,
    /// The batch.
    pub batch: Box<Batch>,
}

/// What an append did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Appended {
    /// The new tokens, by their places in the sequence.
    pub tokens: Range<usize>,
    /// Blocks that were taken, a copy among them.
    pub new_blocks: usize,
    /// The block that was copied because it could not be written.
    pub copied: Option<Copied>,
}

/// A block whose place in a sequence was taken by a copy. A pool with storage has copied the bytes, or enqueued it;
/// without, the engine must, before the batch's own writes: the old frame keeps its bytes until the batch ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copied {
    /// The old block.
    pub from: BlockId,
    /// The copy.
    pub to: BlockId,
    /// Their frames.
    pub frames: FrameMove,
}

/// How an append goes into the tail.
struct Tail {
    id: BlockId,
    access: Access,
}

impl Batch {
    /// Begins a batch.
    ///
    /// # Panics
    ///
    /// If 131,072 batches are in flight.
    pub fn begin(sequences: &Sequences) -> Self {
        Self { step: BatchInner::begin(sequences.clone()), slots: Vec::new() }
    }

    /// Begins a batch on a device's stream: copies on write are enqueued there, ahead of what the batch writes, and the batch
    /// ends when the stream gets there, however it is ended on the host.
    ///
    /// What it reads and copies must be written by what was enqueued on the stream before, or what the stream waits for.
    ///
    /// # Errors
    ///
    /// [`StorageError::ForeignStream`], also for a pool without storage on a device; [`StorageError::Capturing`];
    /// [`StorageError::DeviceLost`].
    ///
    /// # Panics
    ///
    /// As [`begin`](Self::begin).
    pub fn begin_on(sequences: &Sequences, stream: &DeviceStream) -> Result<Self, StorageError> {
        sequences.check_stream(stream)?;
        let mut batch = Self::begin(sequences);
        batch.step.stream = Some(stream.clone());
        Ok(batch)
    }

    /// Its place in the order of batches.
    pub fn ticket(&self) -> Ticket {
        self.step.ticket()
    }

    /// Ends the batch: the work on the device has ended, and nothing reads or writes memory for it any more. A batch that was
    /// [begun on a stream](Self::begin_on) ends when the stream gets there. The same as dropping it.
    pub fn finish(self) {}

    /// Ends the batch when the device has done what was enqueued on this stream until now: everything that was built under it
    /// must have been enqueued there, or the stream waits for it. Copies on write need not be thought of: of a batch that was begun on another
    /// stream, that one is waited for, too. Returns at once, with a future that nobody needs to await.
    ///
    /// For batches whose bytes were written by the time that they end on the host, or that write to no shared block: a batch that was
    /// not [begun on the stream](Self::begin_on) copies on write when it appends, whatever is still to come there.
    ///
    /// # Errors
    ///
    /// [`FinishError`], which has the batch, as [`begin_on`](Self::begin_on) refuses a stream. The future: that the device failed before the stream got there. Then the batch
    /// has ended without any block of it being cached, and the pool hands out no blocks any more.
    pub fn finish_on(self, stream: &DeviceStream) -> Result<Finish, FinishError> {
        if let Err(error) = self.step.sequences.check_stream(stream) {
            return Err(FinishError { error, batch: Box::new(self) });
        }
        let (tell, told) = Finish::pair(stream.device());
        let mut step = self.step;
        let begun = step.stream.take().filter(|begun| begun.as_raw() != stream.as_raw());
        match begun.filter(|_| !step.copied.is_empty()) {
            None => step.end_after(&[stream], Some(tell)),
            Some(begun) => step.end_after(&[&begun, stream], Some(tell)),
        }
        Ok(told)
    }

    /// Appends tokens that are final: a prompt, a chunk of one, or a decoded token. Takes blocks as needed, and copies the
    /// last one first if it cannot be written. Tokens that were drafted before are final with these.
    ///
    /// # Errors
    ///
    /// The sequence is unchanged: [`SequenceError::Alloc`] if there are no blocks, [`SequenceError::ZeroTokens`],
    /// [`SequenceError::TooLong`], [`SequenceError::ForeignSequence`], [`SequenceError::Storage`] if the copy failed.
    #[inline]
    pub fn append(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<Appended, SequenceError> {
        let (appended, plan) = self.grow(sequence, tokens)?;
        sequence.committed = plan.length;
        sequence.seals.wrote(self.ticket());
        if let Some(known) = &mut sequence.known {
            known.committed(plan.length);
        }
        if plan.full > plan.first {
            self.filled(sequence, &plan);
        }
        Ok(appended)
    }

    /// Blocks are full of final tokens: this batch seals them if no other in flight wrote there, else the sequence will.
    fn filled(&mut self, sequence: &mut Sequence, plan: &Growth) {
        let (ticket, blocks) = (self.ticket(), &self.step.sequences.0.blocks);
        let others = if plan.tail { sequence.seals.last_writer_but(ticket) } else { Ticket(0) };
        // Those before are settled: what is promised begins where they end.
        if sequence.seals.settled() == plan.first && (others == Ticket(0) || blocks.clock().ended(others)) {
            let ids = (plan.first..plan.full).map(|place| sequence.list.id(place as usize));
            let known = sequence.known.as_deref();
            self.step.promised.extend((plan.first..).zip(ids).map(|(place, id)| {
                let hash = known.and_then(|known| Some((known, known.hash(place)?)));
                if let Some((known, hash)) = hash {
                    known.cache().note(id, hash, known.era(), place);
                }
                Promise {
                    handle: blocks.handle(id),
                    is_noted: hash.is_some(),
                    stored: hash.and_then(|(known, _)| known.stored(id, place)),
                }
            }));
            sequence.seals.promise(plan.full, ticket);
        } else {
            sequence.seals.complete(plan.full);
        }
    }

    /// [Announces](Sequence::announce) tokens and appends them.
    ///
    /// # Errors
    ///
    /// As for [`append`](Self::append); [`SequenceError::TokensUnknown`], also for drafted tokens before these that were not
    /// announced; [`SequenceError::TokensAhead`] if others were announced and are to be appended first. On any error
    /// the tokens are not announced either.
    pub fn append_tokens(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
    ) -> Result<Appended, SequenceError> {
        self.check(&sequence.sequences, sequence.id())?;
        if let Some(known) = sequence.known.as_deref() {
            known.is_told_all(sequence.id(), sequence.len())?;
        }
        let before = sequence.known.as_deref().map(TokenHashes::mark);
        sequence.announce(tokens)?;
        let appended = self.append(sequence, tokens.len());
        if let (Err(_), Some(before), Some(known)) = (&appended, before, &mut sequence.known) {
            known.restore(before);
        }
        appended
    }

    /// Appends tokens that may be taken back: speculative ones. [`Sequence::commit`] says which of them are final,
    /// [`Sequence::truncate`] takes back the rest.
    ///
    /// # Errors
    ///
    /// As for [`append`](Self::append).
    pub fn draft(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<Appended, SequenceError> {
        let (appended, _) = self.grow(sequence, tokens)?;
        sequence.seals.wrote(self.ticket());
        Ok(appended)
    }

    /// Refuses a sequence of another pool.
    #[inline]
    pub(super) fn check(&self, of: &Sequences, id: crate::ids::SequenceId) -> Result<(), SequenceError> {
        if self.step.sequences.same(of) { Ok(()) } else { Err(SequenceError::ForeignSequence { id }) }
    }

    #[inline]
    fn grow(&mut self, sequence: &mut Sequence, tokens: usize) -> Result<(Appended, Growth), SequenceError> {
        let (id, length) = (sequence.id(), sequence.list.tokens());
        self.check(&sequence.sequences, id)?;
        if tokens == 0 {
            return Err(SequenceError::ZeroTokens { id });
        }
        let plan = Growth::plan(length, tokens, self.step.sequences.0.block_tokens)
            .ok_or(SequenceError::TooLong { id, asked: tokens, length: length as usize, max: TOKENS_MAX })?;
        sequence.settle();
        let tail = plan.tail.then(|| self.tail(sequence, plan.first));
        let mut done =
            Appended { tokens: length as usize..plan.length as usize, new_blocks: 0, copied: None };
        if plan.fresh > 0 || tail.as_ref().is_some_and(|tail| tail.access != Access::Open) {
            self.grow_blocks(sequence, &plan, tail.as_ref(), &mut done)?;
        }
        if let Some(tail) = tail.filter(|_| done.copied.is_none()) {
            self.step.sequences.0.blocks.touch(&[tail.id]);
        }
        sequence.list.publish(plan.length);
        if let Some(copied) = done.copied {
            if self.copies_at_once() {
                sequence.release_unlinked(&[copied.from]);
            } else {
                self.step.copied.push(copied.from);
            }
        }
        Ok((done, plan))
    }

    fn tail(&self, sequence: &Sequence, place: u32) -> Tail {
        let id = sequence.list.id(place as usize);
        Tail { id, access: sequence.access(place, self.step.sequences.0.blocks.word(id), self.ticket()) }
    }

    /// The part of an append that changes blocks. On an error, nothing has.
    fn grow_blocks(
        &mut self,
        sequence: &mut Sequence,
        plan: &Growth,
        tail: Option<&Tail>,
        done: &mut Appended,
    ) -> Result<(), SequenceError> {
        let near = sequence.list.last().map(|last| FrameId(self.step.sequences.0.blocks.frame(last).0 + 1));
        let copies = tail.is_some_and(|tail| tail.access == Access::Copy);
        let base = sequence.list.len();
        let request = AllocRequest::new(plan.fresh as usize + copies as usize)
            .sequence(sequence.id())
            .priority(sequence.priority());
        let mut copy = None;
        if request.blocks > 0 {
            // Room in the list for what no pool could hold would be memory for nothing.
            let total = self.step.sequences.0.blocks.total();
            if request.blocks > total {
                return Err(AllocError::TooLarge { asked: request.blocks, total }.into());
            }
            sequence.list.reserve(base + plan.fresh as usize);
            let (list, mut place) = (&mut sequence.list, base);
            self.allocate(&request, near, &mut |id| {
                if copies && copy.is_none() {
                    copy = Some(id);
                } else {
                    list.stage(place, id);
                    place += 1;
                }
            })?;
        }
        let Some(tail) = tail else {
            done.new_blocks = request.blocks;
            return Ok(());
        };
        // Just being moved, so that its bytes are read: a copy after all. Reached by the model `moves`.
        let open = |tail: &Tail| self.step.sequences.0.blocks.reopen_guarded(tail.id);
        if matches!(tail.access, Access::Reopen | Access::Withdraw) && !open(tail) {
            let one = AllocRequest { blocks: 1, ..request };
            if let Err(error) = self.allocate(&one, near, &mut |id| copy = Some(id)) {
                self.give_up(sequence, base, plan, None);
                return Err(error.into());
            }
        }
        done.new_blocks = plan.fresh as usize + copy.is_some() as usize;
        if let Some(to) = copy {
            match catch_unwind(AssertUnwindSafe(|| self.copy(tail.id, to))) {
                Ok(Ok(copied)) => done.copied = Some(copied),
                Ok(Err(error)) => {
                    self.give_up(sequence, base, plan, copy);
                    return Err(error);
                }
                Err(panic) => {
                    // On a stream it may have been enqueued: then the destination must not get another owner.
                    let may_go_on = self.step.stream.is_some();
                    self.give_up(sequence, base, plan, copy.filter(|_| !may_go_on));
                    resume_unwind(panic);
                }
            }
            sequence.list.replace(plan.first as usize, to);
        }
        if tail.access == Access::Withdraw {
            self.step.promised.retain(|promised| promised.handle.id != tail.id);
        }
        // Whoever sealed it, it is open now.
        sequence.seals.reopen(plan.first);
        Ok(())
    }

    /// Takes blocks for the sequence's list, and times it when it is due.
    fn allocate(
        &self,
        request: &AllocRequest,
        near: Option<FrameId>,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        let shared = &self.step.sequences.0;
        let mut allocate = || shared.blocks.allocate_guarded(request, near, take);
        if shared.sampler.is_due() { shared.sampler.time(allocate) } else { allocate() }
    }

    /// Whether a copy is done when the call returns.
    fn copies_at_once(&self) -> bool {
        self.step.sequences.0.storage.is_some() && self.step.stream.is_none()
    }

    fn copy(&self, from: BlockId, to: BlockId) -> Result<Copied, SequenceError> {
        let shared = &self.step.sequences.0;
        let frames = FrameMove::new(shared.blocks.frame(from), shared.blocks.frame(to));
        let copied = match (&shared.storage, &self.step.stream) {
            (None, _) => Ok(()),
            // SAFETY: the destination was allocated just now and is nobody else's. The source is in the sequence's list,
            // which holds a reference: it is not freed, and it is not written, being shared or (if it is the sequence's
            // alone) written through this sequence only, which is borrowed mutably.
            (Some(storage), None) => unsafe { storage.copy(&[frames]) },
            // SAFETY: as above; and until the stream has done it the batch keeps a reference on the source, and whoever writes
            // the destination does so behind it on this stream, or after the stream is settled.
            (Some(storage), Some(stream)) => unsafe { storage.copy_on(stream, &[frames]) },
        };
        self.step.sequences.noting_loss(copied)?;
        Ok(Copied { from, to, frames })
    }

    /// Gives back what was taken for an append that failed.
    #[cold]
    fn give_up(&self, sequence: &mut Sequence, base: usize, plan: &Growth, copy: Option<BlockId>) {
        let mut taken = sequence.list.staged(base..base + plan.fresh as usize);
        taken.extend(copy);
        taken.reverse();
        self.step.sequences.0.blocks.release_listed(&taken);
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.step.fmt(f)
    }
}

//! The slow path of an append: blocks are allocated, and the last one is copied or reopened.
//!
//! An append into a block that the sequence does not own exclusively copies it to a new block,
//! which replaces it in the list. On host memory the copy is complete when the append returns, and
//! the old block is released at once. Otherwise (device storage enqueues the copy; without storage
//! the engine copies) the batch keeps the reference until it ends, so that no sequence owns the old
//! block exclusively and writes to it. The batch's own writes must be enqueued after the append, so
//! that they follow the copy. Model: `loom-tests/tests/sequences.rs`, `copies_on_write_meet`.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::block::{AllocRequest, ListEnd, Operation};
use crate::error::{AllocError, SequenceError};
use crate::ids::BlockId;
use crate::storage::FrameMove;
use crate::sync::Ordering::Relaxed;

use super::batch::Batch;
use super::plan::Growth;
use super::sequence::{Access, Sequence};

/// A block that was replaced by a copy in a sequence's list.
///
/// A pool with storage copies the bytes or enqueues the copy. Without storage the engine must copy
/// them before the batch's own writes; the old frame keeps its bytes until the batch ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copied {
    /// The old block.
    pub from: BlockId,
    /// The copy.
    pub to: BlockId,
    /// Their frames.
    pub frames: FrameMove,
}

pub(super) struct Grown {
    pub(super) new_blocks: usize,
    pub(super) copied: Option<Copied>,
}

/// The last block that an append writes into, and the access that it requires.
pub(super) struct Tail {
    pub(super) id: BlockId,
    pub(super) access: Access,
}

impl Batch {
    #[inline(never)]
    pub(super) fn grow_list(
        &mut self,
        sequence: &mut Sequence,
        plan: &Growth,
        tail: Option<Tail>,
    ) -> Result<Grown, SequenceError> {
        let grown = self.grow_blocks(sequence, plan, tail.as_ref())?;
        // The first append of a sequence comes here: a prefix leaves no room in its last block.
        sequence.lookup.take().into_iter().for_each(|lookup| sequence.count_lookup(lookup));
        if let Some(tail) = tail.filter(|_| grown.copied.is_none()) {
            self.step.sequences.0.blocks.touch(&[tail.id]);
        }
        sequence.publish(plan.length);
        // The engine may not have made its copy.
        let copies = grown.copied.is_some() && self.step.sequences.0.storage.is_none();
        let from = if copies { plan.first * sequence.kind.block_tokens } else { plan.from };
        self.step.note(sequence, from, Some(plan.from));
        if grown.new_blocks > 0 {
            sequence.reserve_end();
        }
        if let Some(copied) = grown.copied {
            if self.copies_at_once() {
                sequence.release_unlinked(&[copied.from]);
            } else {
                self.step.copied.push(copied.from);
                self.step.sequences.0.copying.fetch_add(1, Relaxed);
            }
        }
        Ok(grown)
    }

    /// Allocates and replaces blocks for an append. On an error, nothing has changed.
    fn grow_blocks(
        &mut self,
        sequence: &mut Sequence,
        plan: &Growth,
        tail: Option<&Tail>,
    ) -> Result<Grown, SequenceError> {
        let end = sequence.list_end();
        let copies = tail.is_some_and(|tail| tail.access == Access::Copy);
        let base = sequence.list.len();
        let needed = plan.fresh as usize + copies as usize;
        let mut drawn = needed.min(sequence.reserved.len());
        let request = AllocRequest::new(needed - drawn).sequence(sequence.id()).priority(sequence.priority());
        let mut copy = None;
        if needed > 0 {
            // The list does not grow for a request that no pool could satisfy.
            let total = self.step.sequences.0.blocks.total();
            if needed > total {
                return Err(AllocError::TooLarge { asked: needed, total }.into());
            }
            sequence.list.reserve(base + plan.fresh as usize);
            let (list, mut place) = (&mut sequence.list, base);
            let mut put = |id| {
                if copies && copy.is_none() {
                    copy = Some(id);
                } else {
                    list.stage(place, id);
                    place += 1;
                }
            };
            // They stay in the reservation until nothing can fail for lack of blocks.
            sequence.reserved.iter().rev().take(drawn).for_each(|&id| put(id));
            if request.blocks > 0 {
                self.allocate(&request, end, &mut put)?;
            }
            if drawn > 0 {
                sequence.reserved.truncate(sequence.reserved.len() - drawn);
                sequence.note_reserved();
            }
        }
        let Some(tail) = tail else { return Ok(Grown { new_blocks: needed, copied: None }) };
        // Copied if it is being moved: its bytes are being read. Reached by the model `moves`.
        let open = |tail: &Tail| self.step.sequences.0.blocks.reopen(tail.id);
        if matches!(tail.access, Access::Reopen | Access::Withdraw) && !open(tail) {
            let one = AllocRequest { blocks: 1, ..request };
            copy = sequence.reserved.pop();
            if copy.is_some() {
                drawn += 1;
                sequence.note_reserved();
            } else if let Err(error) = self.allocate(&one, end, &mut |id| copy = Some(id)) {
                self.give_up(sequence, base, plan, None, drawn);
                return Err(error.into());
            }
        }
        let mut grown = Grown { new_blocks: plan.fresh as usize + copy.is_some() as usize, copied: None };
        if let Some(to) = copy {
            match catch_unwind(AssertUnwindSafe(|| self.copy(tail.id, to))) {
                Ok(Ok(copied)) => grown.copied = Some(copied),
                Ok(Err(error)) => {
                    self.give_up(sequence, base, plan, copy, drawn);
                    return Err(error);
                }
                Err(panic) => {
                    // The copy may already be enqueued: the destination must not get another owner.
                    let may_go_on = self.step.stream.is_some();
                    self.give_up(sequence, base, plan, copy.filter(|_| !may_go_on), drawn);
                    resume_unwind(panic);
                }
            }
            let place = plan.first as usize;
            sequence.list.replace(place, to);
            sequence.frames.set(place, self.step.sequences.0.blocks.frame(to));
        }
        if tail.access == Access::Withdraw {
            self.step.promised.retain(|promised| promised.handle.id != tail.id);
        }
        sequence.seals.reopen(plan.first);
        Ok(grown)
    }

    fn allocate(
        &self,
        request: &AllocRequest,
        end: ListEnd,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        let shared = &self.step.sequences.0;
        let _timing = shared.sampler.start(Operation::Append);
        shared.blocks.allocate_listed(request, Some(end), take)
    }

    fn copies_at_once(&self) -> bool {
        self.step.sequences.0.storage.is_some() && self.step.stream.is_none()
    }

    fn copy(&self, from: BlockId, to: BlockId) -> Result<Copied, SequenceError> {
        let blocks = &self.step.sequences.0.blocks;
        let frames = FrameMove::new(blocks.frame(from), blocks.frame(to));
        // SAFETY: the destination was just allocated and has no other owner. The source is in the
        // sequence's list, which holds a reference: it is not freed, and not written, being shared
        // or written only through this sequence, which is borrowed mutably. The batch keeps a
        // reference on it until a stream has done the copy.
        unsafe { self.copy_frames(&[frames]) }?;
        Ok(Copied { from, to, frames })
    }

    /// Copies frames, or enqueues the copies, in a pool with storage.
    ///
    /// # Safety
    /// [The frame rule](crate::storage::Storage#the-frame-rule), on a stream until it has done the
    /// copies; writes to the destinations follow on this stream, or after it is settled.
    pub(super) unsafe fn copy_frames(&self, frames: &[FrameMove]) -> Result<(), SequenceError> {
        let copied = match (&self.step.sequences.0.storage, &self.step.stream) {
            (None, _) => Ok(()),
            // SAFETY: the caller's promise.
            (Some(storage), None) => unsafe { storage.copy(frames) },
            // SAFETY: the caller's promise.
            (Some(storage), Some(stream)) => unsafe { storage.copy_on(stream, frames) },
        };
        Ok(self.step.sequences.noting_loss(copied)?)
    }

    /// Returns the blocks taken for a failed append: `drawn` of them to the reservation.
    #[cold]
    fn give_up(
        &self,
        sequence: &mut Sequence,
        base: usize,
        plan: &Growth,
        copy: Option<BlockId>,
        drawn: usize,
    ) {
        let mut taken: Vec<BlockId> = copy.into_iter().collect();
        taken.extend(sequence.list.staged(base..base + plan.fresh as usize));
        let allocated = taken.split_off(drawn.min(taken.len()));
        sequence.reserved.extend(taken.into_iter().rev());
        sequence.note_reserved();
        let allocated: Vec<BlockId> = allocated.into_iter().rev().collect();
        self.step.sequences.0.blocks.release_listed(&allocated);
    }
}

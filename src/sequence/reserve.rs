//! Reservation: blocks that a sequence owns beyond its tokens, for appends that cannot fail.
//!
//! Reserved blocks are allocated and owned like those of the list, with one reference. They hold no
//! tokens and are in no table; no batch has seen them, except for those that an
//! [abandoned](super::abandoned) batch gave back (`was_listed`). An append takes them in order
//! before it allocates. They are not sealed, so compaction does not move them.

use smallvec::SmallVec;

use crate::block::{AllocRequest, Blocks, ListEnd, Waiting};
use crate::error::{AllocError, SequenceError};
use crate::ids::{BlockId, FrameId, Ticket};
use crate::sync::call;

use super::plan::{Growth, too_long};
use super::registry::Sequences;
use super::sequence::{Access, Sequence};

/// Allocates blocks for the end of a list, and passes on each.
pub(super) type Allocate<'a> =
    &'a mut dyn FnMut(&AllocRequest, ListEnd, &mut dyn FnMut(BlockId)) -> Result<(), AllocError>;

impl Sequence {
    /// Allocates blocks behind cached ones, the last of which is `last`. On an error these,
    /// `shared`, return to their places in the eviction order.
    pub(super) fn allocate_behind(
        &self,
        last: Option<BlockId>,
        shared: impl FnOnce() -> Vec<BlockId>,
        request: &AllocRequest,
        is_in_line: bool,
        allocate: Allocate<'_>,
    ) -> Result<Vec<BlockId>, AllocError> {
        let (pool, mut fresh) = (self.pool_blocks(), Vec::with_capacity(request.blocks));
        if request.blocks > 0 {
            let next = last.map(|last| FrameId(pool.frame(last).0 + 1));
            let end = ListEnd { next, tenant: self.tenant, ..ListEnd::default() };
            let outcome = allocate(request, end, &mut |id| fresh.push(id));
            if outcome.is_err()
                && last.is_some()
                && let Some(cache) = self.sequences.cache()
            {
                cache.untake(pool, &shared(), is_in_line);
            }
            outcome?;
        }
        Ok(fresh)
    }

    /// Returns the number of reserved blocks.
    pub fn reserved_blocks(&self) -> usize {
        self.reserved.len()
    }

    /// Reserves the blocks that the next `tokens` tokens need, without waiting.
    ///
    /// Appends take reserved blocks first, and cannot fail for lack of blocks while these suffice.
    /// They include the copy of a shared last block; a later [fork](Self::fork) costs one more.
    /// Forks have no reservation, and a transfer to another pool leaves it behind.
    ///
    /// # Errors
    /// [`SequenceError::Alloc`] if there are too few blocks, or the sequence would exceed the pool;
    /// [`SequenceError::Invalid`] for too many tokens. The sequence is unchanged.
    pub fn reserve(&mut self, tokens: usize) -> Result<(), SequenceError> {
        let _call = call();
        let Some(request) = self.reservation(tokens)? else { return Ok(()) };
        let pool = self.pool_blocks().clone();
        Ok(self.allocate_reserved(&pool, &request)?)
    }

    pub(super) fn allocate_reserved(
        &mut self,
        pool: &Blocks,
        request: &AllocRequest,
    ) -> Result<(), AllocError> {
        let end = self.list_end();
        self.take_reserved(|take| pool.allocate_listed(request, Some(end), take))
    }

    /// Releases the reserved blocks, and returns their number.
    pub fn release_reservation(&mut self) -> usize {
        let _call = call();
        self.catch_up();
        // The last ones first, as in a truncated list.
        let reserved = std::mem::take(&mut self.reserved);
        if !reserved.is_empty() {
            self.note_reserved();
            self.release_reserved(&reserved);
        }
        reserved.len()
    }

    #[inline]
    pub(super) fn note_reserved(&self) {
        self.list.note_reserved(self.reserved.len());
    }

    /// Makes these new blocks, in order, its reservation, and releases the last `leave` of them.
    pub(super) fn reserve_but(&mut self, mut blocks: Vec<BlockId>, leave: usize) {
        blocks.reverse();
        let left: SmallVec<[BlockId; 8]> = blocks.drain(..leave).collect();
        self.reserved = blocks;
        self.note_reserved();
        if !left.is_empty() {
            self.pool_blocks().release_unpublished(&left);
        }
    }

    /// Releases what is left of the last reserved `blocks`.
    pub(super) fn unreserve(&mut self, blocks: usize) {
        let unused = blocks.min(self.reserved.len());
        if unused > 0 {
            self.release_last_reserved(unused);
        }
    }

    fn release_last_reserved(&mut self, blocks: usize) {
        let released: SmallVec<[BlockId; 8]> = self.reserved.drain(..blocks).collect();
        self.note_reserved();
        self.release_reserved(&released);
        self.reserve_end();
    }

    fn release_reserved(&mut self, released: &[BlockId]) {
        if self.was_listed {
            self.was_listed = !self.reserved.is_empty();
            self.release_unlinked(released);
        } else {
            self.pool_blocks().release_unpublished(released);
        }
    }

    pub(crate) fn check_in(&self, sequences: &Sequences) -> Result<(), SequenceError> {
        let is_own = self.sequences.same(sequences);
        if is_own { Ok(()) } else { Err(SequenceError::ForeignSequence { id: self.id() }) }
    }

    /// Returns the request for the blocks that a reservation for `tokens` more tokens lacks.
    pub(crate) fn reservation(&mut self, tokens: usize) -> Result<Option<AllocRequest>, SequenceError> {
        self.catch_up();
        if tokens == 0 {
            return Ok(None);
        }
        // As before an append: otherwise it would need more blocks than the append.
        self.settle();
        self.slide();
        let (id, length, blocks) = (self.id(), self.list.tokens(), self.list.len() as u32);
        let plan = Growth::plan(length, blocks, tokens, self.kind.block_tokens)
            .ok_or_else(|| too_long(id, tokens, length as usize))?;
        let needed = plan.fresh as usize + usize::from(plan.tail && self.copies_tail(plan.first));
        Ok(self.lacking(needed)?)
    }

    /// Returns the request for the blocks that the reservation lacks of `needed`.
    pub(super) fn lacking(&self, needed: usize) -> Result<Option<AllocRequest>, AllocError> {
        let asked = needed.saturating_sub(self.reserved.len());
        if asked == 0 {
            return Ok(None);
        }
        self.check_fits(asked)?;
        Ok(Some(AllocRequest::new(asked).sequence(self.id()).priority(self.priority())))
    }

    /// Returns an error if the whole pool has too few blocks for the sequence and `more` blocks.
    fn check_fits(&self, more: usize) -> Result<(), AllocError> {
        let held = self.list.len() - self.gap().len();
        let whole = AllocRequest::new(held + self.reserved.len() + more);
        self.pool_blocks().check_request(&whole.sequence(self.id()).priority(self.priority()))
    }

    /// Returns its blocks, and those of its reservation.
    pub(super) fn owned_ids(&self) -> impl Iterator<Item = BlockId> {
        let listed = self.listed().filter(|&id| !self.sequences.is_null(id));
        listed.chain(self.reserved.iter().copied())
    }

    pub(super) fn copies_tail(&self, place: u32) -> bool {
        let Some(tail) = self.list.last() else { return false };
        // A sealed block that only this sequence owns is reopened, but copied while it moves.
        self.access(place, self.pool_blocks().word(tail), Ticket(0)) != Access::Open
    }

    /// Adds new blocks, in order, to its reservation.
    pub(super) fn add_reserved(&mut self, blocks: &[BlockId]) {
        self.reserved.splice(..0, blocks.iter().rev().copied());
        self.note_reserved();
        self.reserve_end();
    }

    fn take_reserved(
        &mut self,
        allocate: impl FnOnce(&mut dyn FnMut(BlockId)) -> Result<(), AllocError>,
    ) -> Result<(), AllocError> {
        // Usually the reservation is empty, and its memory is reused.
        let mut before = std::mem::take(&mut self.reserved);
        let mut taken = if before.is_empty() { std::mem::take(&mut before) } else { Vec::new() };
        let outcome = allocate(&mut |id| taken.push(id));
        if outcome.is_err() {
            // A refused request may have passed blocks on before it gave them back.
            taken.clear();
        }
        taken.reverse();
        taken.append(&mut before);
        self.reserved = taken;
        outcome?;
        self.note_reserved();
        self.reserve_end();
        Ok(())
    }

    /// Tries once to reserve blocks for `tokens` more tokens, in the turn of a place in the queue.
    pub(crate) fn reserve_in_turn(
        &mut self,
        request: &AllocRequest,
        place: &mut Waiting<'_>,
    ) -> Result<(), AllocError> {
        // The pool may have shrunk since the request entered the queue.
        self.check_fits(request.blocks)?;
        self.pool_blocks().check_floors(request, self.tenant, self.owned_ids())?;
        let end = self.list_end();
        self.take_reserved(|take| place.allocate(request, Some(end), take))
    }
}

//! Shares by id, and operations by handle: pins, seals and inspection. Each operation by handle
//! checks its pool, range and generation in the very word that it replaces.

use crate::error::HandleError;
use crate::ids::{BlockHandle, BlockId};
use crate::sync::Ordering::*;

use crate::block::core::Core;
use crate::block::state::{BlockInfo, BlockWord, InfoCell};

impl Core {
    /// Adds a reference on each block of a lease: all or none. Panics if a block has no reference.
    pub fn share(&self, ids: &[BlockId]) -> Result<(), HandleError> {
        self.share_listed(ids)?;
        self.count_further(ids.len() as isize);
        Ok(())
    }

    /// Like [`share`](Self::share), for blocks in a sequence's list.
    pub fn share_listed(&self, ids: &[BlockId]) -> Result<(), HandleError> {
        for (i, &id) in ids.iter().enumerate() {
            // Relaxed: the caller's reference orders its accesses; only the count changes.
            let shared = self.space.table.word(id).fetch_update(Relaxed, Relaxed, |bits| {
                BlockWord::from_bits(bits).share().map(BlockWord::to_bits)
            });
            if let Err(bits) = shared {
                let word = BlockWord::from_bits(bits);
                self.unshare(&ids[..i]);
                assert!(word.is_owned(), "block {id} shared without a reference: {word:?}");
                return Err(HandleError::TooManyReferences { id, max: BlockWord::REFS_MAX });
            }
        }
        self.touch(ids);
        Ok(())
    }

    /// Pins a block: it is neither evicted nor moved until its pins are dropped.
    pub fn pin(&self, handle: BlockHandle) -> Result<(), HandleError> {
        let full = HandleError::TooManyPins { id: handle.id, max: BlockWord::PINS_MAX };
        if self.update(&handle, BlockWord::pin)? { Ok(()) } else { Err(full) }
    }

    /// Drops a pin. Does nothing if the block was freed, which cleared its pins.
    pub fn unpin(&self, handle: BlockHandle) {
        if self.update(&handle, BlockWord::unpin) == Ok(true) {
            // A request that waits for a run can have the block moved now.
            self.announce();
        }
    }

    /// Seals a block, for its owner. Does nothing if the handle is stale.
    pub fn seal(&self, handle: BlockHandle) {
        let _ = self.update(&handle, BlockWord::seal);
    }

    /// Makes a sealed block writable for its only owner. False: it is shared or moving, or moves are
    /// just being published, perhaps of this block: see the [log](crate::block::MoveCount).
    pub fn reopen(&self, id: BlockId) -> bool {
        // Acquire: accesses of earlier owners and cancelled copies happen before our writes.
        // Release: continues the order for later checks of the word.
        let reopened = self.space.table.word(id).fetch_update(AcqRel, Acquire, |bits| {
            BlockWord::from_bits(bits).reopen().map(BlockWord::to_bits)
        });
        let Ok(before) = reopened else { return false };
        if !BlockWord::from_bits(before).is_sealed() || !self.moves.may_lack_moves() {
            return true;
        }
        // Release: as above. It was open for this thread alone.
        let sealed =
            self.space.table.word(id).fetch_update(AcqRel, Relaxed, |bits| {
                BlockWord::from_bits(bits).seal().map(BlockWord::to_bits)
            });
        debug_assert!(sealed.is_ok(), "its owner keeps it");
        false
    }

    /// Records the newest batch as the blocks' last access.
    #[inline]
    pub fn touch(&self, ids: &[BlockId]) {
        let now = self.space.clock.newest();
        for &id in ids {
            self.space.table.info(id).touch(now);
        }
    }

    /// Returns a snapshot of a block.
    pub fn info(&self, handle: BlockHandle) -> Result<BlockInfo, HandleError> {
        let word = self.check(&handle)?;
        Ok(self.info_of(handle.id, word))
    }

    pub(crate) fn info_of(&self, id: BlockId, word: BlockWord) -> BlockInfo {
        self.space.table.info(id).read(id, word, self.config.device, self.space.clock.newest())
    }

    #[inline]
    pub(in crate::block) fn check(&self, handle: &BlockHandle) -> Result<BlockWord, HandleError> {
        if !self.is_of_this_pool(handle) {
            return Err(self.refuse(handle));
        }
        let word = self.word(handle.id);
        let is_good = is_current(self.space.table.info(handle.id), handle, word);
        if is_good { Ok(word) } else { Err(self.refuse(handle)) }
    }

    #[inline]
    fn is_of_this_pool(&self, handle: &BlockHandle) -> bool {
        let is_null = self.config.has_null_block && handle.id.0 == 0;
        handle.pool == self.tag && !is_null && handle.id.index() < self.rows()
    }

    #[cold]
    #[inline(never)]
    fn refuse(&self, handle: &BlockHandle) -> HandleError {
        if handle.pool != self.tag {
            HandleError::Foreign { handle: *handle, pool: self.tag }
        } else if !self.is_of_this_pool(handle) {
            HandleError::OutOfRange {
                handle: *handle,
                total: self.rows() - self.config.has_null_block as usize,
            }
        } else {
            HandleError::Stale {
                handle: *handle,
                now: self.space.table.info(handle.id).generation(self.word(handle.id)),
            }
        }
    }

    /// Applies a transition to a block's word while the handle is current. False: not allowed.
    #[inline]
    pub(in crate::block) fn update(
        &self,
        handle: &BlockHandle,
        transition: impl Fn(BlockWord) -> Option<BlockWord>,
    ) -> Result<bool, HandleError> {
        if !self.is_of_this_pool(handle) {
            return Err(self.refuse(handle));
        }
        let row = self.space.table.row(handle.id);
        // Acquire: as in `word`.
        let mut word = BlockWord::from_bits(row.word.load(Acquire));
        loop {
            if !is_current(row.info, handle, word) {
                return Err(self.refuse(handle));
            }
            let Some(next) = transition(word) else { return Ok(false) };
            // Acquire: as in `word`. Release: a handle check sees what the owner did.
            match row.word.compare_exchange_weak(word.to_bits(), next.to_bits(), AcqRel, Acquire) {
                Ok(_) => return Ok(true),
                // Another thread changed it in between. Reached by the model `share_release`.
                Err(now) => word = BlockWord::from_bits(now),
            }
        }
    }
}

#[inline(always)]
fn is_current(info: &InfoCell, handle: &BlockHandle, word: BlockWord) -> bool {
    // The high bits are read after the word (an Acquire): they change only while the block is free,
    // and a word that is not owned, or has other low bits, is refused in any case.
    word.is_owned() && info.generation(word) == handle.generation
}

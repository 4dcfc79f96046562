//! Operations by handle, for engines that keep their own tables.
//!
//! Every call checks the handle's pool, range and generation; a list is checked as a whole before
//! anything is changed.
//!
//! A block can become guarded, or cease to be, while a handle is good: a lease turns its references
//! into handles, and back. Operations that only handles may do to unguarded blocks therefore check
//! the very word that they replace.

use crate::error::HandleError;
use crate::frame::RunList;
use crate::ids::{BlockHandle, BlockId, FrameId, Run};
use crate::sync::{AtomicU64, Ordering::*};

use super::Owner;
use crate::block::core::Core;
use crate::block::state::{InfoCell, TableView};
use crate::block::thread_cache::{CacheRef, CountedRef};
use crate::block::{BlockInfo, BlockWord, Blocks, INLINE_BLOCKS, Ownership, Released};

/// On whose behalf an operation by handle changes a word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::block) enum By {
    /// An engine that counts references by handle: refused if the block is guarded.
    Handle,
    /// The owner of the block, of either kind, or a step that concerns no reference.
    Owner,
}

impl Blocks {
    /// Drops one reference on each block.
    ///
    /// # Errors
    ///
    /// [`HandleError`] if a handle is foreign, out of range, stale, or repeated more often than its
    /// block has references: nothing was freed.
    ///
    /// Exception: a handle that *another thread* frees at the same moment, though only one
    /// reference is left, is reported, and the others of the list are freed.
    #[inline]
    pub fn free(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        match handles {
            [handle] => self.free_one(self.recent_thread_cache(), handle),
            _ if handles.len() <= INLINE_BLOCKS => self.free_inline(self.recent_thread_cache(), handles),
            _ => self.with_thread_cache(|cache| self.free_many(cache, handles)),
        }
    }

    #[inline]
    pub(in crate::block) fn free_one(
        &self,
        cache: Option<CacheRef<'_>>,
        handle: &BlockHandle,
    ) -> Result<(), HandleError> {
        if let Some(frame) = self.release_handle(handle)?
            && !self.give_back_one(cache, frame)
        {
            self.give_back_frames(cache, &[frame]);
        }
        Ok(())
    }

    /// As [`free`](Self::free), for at most [`INLINE_BLOCKS`] handles.
    pub(in crate::block) fn free_inline(
        &self,
        cache: Option<CacheRef<'_>>,
        handles: &[BlockHandle],
    ) -> Result<(), HandleError> {
        // Each block is looked up once: the words found are those that are exchanged.
        let mut words = [BlockWord::free(FrameId(0)); INLINE_BLOCKS];
        let table = self.space.table.view();
        let (mut newest, mut ascends) = (0, true);
        for (handle, word) in handles.iter().zip(&mut words) {
            *word = self.check_unguarded(table, handle)?;
            ascends &= handle.id.0 >= newest;
            newest = handle.id.0 + 1;
        }
        if !ascends {
            self.check_repeats(handles)?;
        }
        let mut frames = [FrameId(0); INLINE_BLOCKS];
        let mut count = 0;
        let mut outcome = Ok(());
        for (handle, &word) in handles.iter().zip(&words) {
            let freed = match self.release_word_only(table.row(handle.id).word, word) {
                Some(frame) => Some(frame),
                None => self.release_raced(handle, &mut outcome),
            };
            if let Some(frame) = freed {
                frames[count] = frame;
                count += 1;
            }
        }
        let frames = &frames[..count];
        if count != 0 && !self.give_back_inline(cache, frames) {
            self.give_back_frames(cache, frames);
        }
        outcome
    }

    /// As [`free`](Self::free), for any number of handles.
    pub(in crate::block) fn free_many(
        &self,
        cache: Option<CountedRef<'_>>,
        handles: &[BlockHandle],
    ) -> Result<(), HandleError> {
        self.check_list(handles)?;
        let mut freed = RunList::new();
        let outcome = self.release_checked(handles, |frame| freed.push(frame));
        self.give_back(cache, &freed);
        outcome
    }
}

impl Core {
    /// Drops a reference; returns the frame if it was the last.
    #[inline]
    fn release_handle(&self, handle: &BlockHandle) -> Result<Option<FrameId>, HandleError> {
        match self.release_only(handle) {
            Some(frame) => Ok(Some(frame)),
            None => self.release_shared_handle(handle),
        }
    }

    /// Drops the only reference, and returns the frame. `None`: nothing was done, take the slow
    /// path.
    #[inline(always)]
    fn release_only(&self, handle: &BlockHandle) -> Option<FrameId> {
        let (atomic, word) = self.look_up(self.space.table.view(), handle)?;
        self.release_word_only(atomic, word)
    }

    /// Drops the only reference of a block whose word was found good for a handle, and returns the
    /// frame. `None`: nothing was done, take the slow path.
    #[inline(always)]
    fn release_word_only(&self, atomic: &AtomicU64, word: BlockWord) -> Option<FrameId> {
        let next = word.release_only(Ownership::ByHandle)?;
        Self::is_released(atomic, word, next).then(|| next.frame())
    }

    /// As [`release_handle`](Self::release_handle), for a block that has other references, is
    /// moving, or is being changed by another thread, and for a bad handle.
    #[inline(never)]
    fn release_shared_handle(&self, handle: &BlockHandle) -> Result<Option<FrameId>, HandleError> {
        let released = self
            .update(handle, By::Handle, |word| word.release().map(|released| (released.word(), released)))?;
        if let Some(Released::Shared(_)) = released {
            self.count_further(-1);
        }
        // A good handle's word is not free.
        Ok(released.and_then(|released| self.released(handle.id, released)))
    }

    /// As [`release_shared_handle`](Self::release_shared_handle), for a handle that was good when
    /// checked; notes in `outcome` if it is not any more.
    #[inline(never)]
    fn release_raced(&self, handle: &BlockHandle, outcome: &mut Result<(), HandleError>) -> Option<FrameId> {
        match self.release_shared_handle(handle) {
            Ok(frame) => frame,
            // Another thread has freed it since the check, or turned it into a lease. Reached by
            // the models `share_release` and `guarded`.
            Err(error) => {
                if outcome.is_ok() {
                    *outcome = Err(error);
                }
                None
            }
        }
    }

    /// Releases handles that were good when checked; `owe` gets the frames of last references.
    fn release_checked(
        &self,
        handles: &[BlockHandle],
        mut owe: impl FnMut(FrameId),
    ) -> Result<(), HandleError> {
        let mut outcome = Ok(());
        for handle in handles {
            let freed = self.release_only(handle).or_else(|| self.release_raced(handle, &mut outcome));
            freed.into_iter().for_each(&mut owe);
        }
        outcome
    }

    /// Adds a reference on each block.
    ///
    /// # Errors
    ///
    /// [`HandleError`]: no block has gained a reference.
    pub fn share_handles(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        for (i, handle) in handles.iter().enumerate() {
            let full = || HandleError::TooManyReferences { id: handle.id, max: BlockWord::REFS_MAX };
            let shared = self.update(handle, By::Handle, |word| word.share().map(|next| (next, ())));
            if let Err(error) = shared.and_then(|shared| shared.ok_or_else(full)) {
                // By handle: if another thread wrongly freed our reference meanwhile, none is taken
                // from the block's next owner.
                self.count_further(i as isize);
                let _ = self.release_checked(&handles[..i], |frame| {
                    self.give_back(None, &[Run { start: frame, len: 1 }]);
                });
                return Err(error);
            }
        }
        self.count_further(handles.len() as isize);
        let now = self.space.clock.newest();
        handles.iter().for_each(|handle| self.space.table.info(handle.id).touch_loosely(now));
        Ok(())
    }

    /// Adds a reference on each block, on each of which the caller holds one. Like a
    /// [release](Blocks::release) by id, it is not [counted](Self::counted_references) among
    /// handles.
    ///
    /// # Errors
    ///
    /// [`HandleError::TooManyReferences`]: no block has gained a reference.
    ///
    /// # Panics
    ///
    /// If a block is free or guarded: the caller holds no reference by handle.
    pub fn share(&self, ids: &[BlockId]) -> Result<(), HandleError> {
        self.share_as(ids, Owner::Handles)
    }

    /// As [`share`](Self::share), for blocks in a sequence's list.
    ///
    /// # Errors
    ///
    /// # Panics
    ///
    /// As for [`share`](Self::share), unless the blocks are guarded.
    pub fn share_listed(&self, ids: &[BlockId]) -> Result<(), HandleError> {
        self.share_as(ids, Owner::Guarded)
    }

    fn share_as(&self, ids: &[BlockId], owner: Owner) -> Result<(), HandleError> {
        let ownership = owner.ownership();
        for (i, &id) in ids.iter().enumerate() {
            // Relaxed: the caller's reference orders its accesses; only the count changes.
            let shared = self.space.table.word(id).fetch_update(Relaxed, Relaxed, |bits| {
                let word = BlockWord::from_bits(bits);
                word.share().filter(|_| word.ownership() == ownership).map(BlockWord::to_bits)
            });
            if let Err(bits) = shared {
                let word = BlockWord::from_bits(bits);
                self.release_at(None, &ids[..i], owner);
                let is_ours = word.is_owned() && word.ownership() == ownership;
                assert!(is_ours, "block {id} shared without a reference: {word:?}");
                return Err(HandleError::TooManyReferences { id, max: BlockWord::REFS_MAX });
            }
        }
        self.touch(ids);
        Ok(())
    }

    /// Pins a block: it is neither evicted nor moved until as many unpins.
    ///
    /// # Errors
    ///
    /// [`HandleError`], also for a guarded block; nothing was changed.
    pub fn pin(&self, handle: BlockHandle) -> Result<(), HandleError> {
        self.pin_by(handle, By::Handle)
    }

    /// As [`pin`](Self::pin), for any block; the caller [unpins](Self::unpin_any) once, its own pin
    /// only.
    pub(crate) fn pin_any(&self, handle: BlockHandle) -> Result<(), HandleError> {
        self.pin_by(handle, By::Owner)
    }

    fn pin_by(&self, handle: BlockHandle, by: By) -> Result<(), HandleError> {
        self.update(&handle, by, |word| word.pin().map(|next| (next, ())))?
            .ok_or(HandleError::TooManyPins { id: handle.id, max: BlockWord::PINS_MAX })
    }

    /// Drops a pin.
    ///
    /// # Errors
    ///
    /// [`HandleError`], also for a guarded block: the pin may be its owner's; nothing was changed.
    pub fn unpin(&self, handle: BlockHandle) -> Result<(), HandleError> {
        self.unpin_by(handle, By::Handle)
    }

    /// Drops a pin of [`pin_any`](Self::pin_any). The block may be free by then, and the pin gone
    /// with it.
    pub(crate) fn unpin_any(&self, handle: BlockHandle) {
        let _ = self.unpin_by(handle, By::Owner);
    }

    fn unpin_by(&self, handle: BlockHandle, by: By) -> Result<(), HandleError> {
        self.update(&handle, by, |word| word.unpin().map(|next| (next, ())))?
            .ok_or(HandleError::NotPinned { id: handle.id })?;
        // A request that waits for a run can have the block moved now.
        self.announce();
        Ok(())
    }

    /// Seals a block: its bytes are final, no owner writes them, and it can be moved.
    ///
    /// # Errors
    ///
    /// [`HandleError`], also for a guarded block, which its owner seals; nothing was changed.
    pub fn seal(&self, handle: BlockHandle) -> Result<(), HandleError> {
        // A good handle's word is not free.
        self.update(&handle, By::Handle, |word| word.seal().map(|next| (next, ())))?;
        // As in `unpin`. Seals by batches are announced with the batch's end.
        self.announce();
        Ok(())
    }

    /// Seals a guarded block, for its owner. Does nothing if the handle is stale: the block was
    /// released.
    pub(crate) fn seal_guarded(&self, handle: BlockHandle) {
        let _ = self.update(&handle, By::Owner, |word| word.seal().map(|next| (next, ())));
    }

    /// Makes a sealed block writable again.
    ///
    /// Returns true if it has one reference and is now open; false if it is shared, or its bytes
    /// are being copied to another frame, so that the caller must write to a block of its own.
    ///
    /// # Errors
    ///
    /// [`HandleError`], also for a guarded block; nothing was changed.
    pub fn reopen(&self, handle: BlockHandle) -> Result<bool, HandleError> {
        Ok(self.update(&handle, By::Handle, |word| word.reopen().map(|next| (next, ())))?.is_some())
    }

    /// As [`reopen`](Self::reopen), for a block of a lease or of a sequence that the caller borrows
    /// mutably.
    pub(crate) fn reopen_guarded(&self, id: BlockId) -> bool {
        // Acquire: accesses of earlier owners happen before our writes, and so do the reads of a
        // copy that was dropped. Release: continues the order for later checks of the word.
        let reopened = self.space.table.word(id).fetch_update(AcqRel, Acquire, |bits| {
            BlockWord::from_bits(bits).reopen().map(BlockWord::to_bits)
        });
        reopened.is_ok()
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
    ///
    /// # Errors
    ///
    /// [`HandleError`] if the handle is foreign, out of range or stale.
    pub fn info(&self, handle: BlockHandle) -> Result<BlockInfo, HandleError> {
        let word = self.check(&handle)?;
        Ok(self.info_of(handle.id, word))
    }

    /// Returns a snapshot of a block with this word, of any owner.
    pub(crate) fn info_of(&self, id: BlockId, word: BlockWord) -> BlockInfo {
        self.space.table.info(id).read(id, word, self.config.device, self.space.clock.newest())
    }

    /// Returns the block's word, if the handle is good.
    #[inline]
    pub(in crate::block) fn check(&self, handle: &BlockHandle) -> Result<BlockWord, HandleError> {
        let found = self.look_up(self.space.table.view(), handle);
        found.map(|(_, word)| word).ok_or_else(|| self.refuse(handle))
    }

    /// Turns the handles' references into a lease's, if each is the only one of its block.
    ///
    /// # Errors
    ///
    /// [`HandleError`], including [`HandleError::Shared`] and [`HandleError::Guarded`], also if a
    /// handle is in the list twice; nothing was changed.
    pub(crate) fn guard(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        for (i, handle) in handles.iter().enumerate() {
            let guarded = self.update(handle, By::Handle, |word| word.guard().map(|next| (next, ())));
            // A good handle's word is owned, and a guarded one was refused.
            let guarded = guarded.and_then(|done| done.ok_or(HandleError::Shared { id: handle.id }));
            if let Err(error) = guarded {
                self.unguard(handles[..i].iter().map(|handle| handle.id));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Turns a lease's references into handles' again.
    ///
    /// # Panics
    ///
    /// If a block is not leased.
    pub(crate) fn unguard(&self, ids: impl IntoIterator<Item = BlockId>) {
        for id in ids {
            // Release: a thread that finds the bit cleared, and frees the block by an older handle,
            // sees what the lease's owner did. Relaxed on the way in: the owner's reference orders
            // its accesses. Movers and pins may change the word meanwhile; none of them reads the
            // bit.
            let atomic = self.space.table.word(id);
            let unguarded = atomic.fetch_update(Release, Relaxed, |bits| {
                BlockWord::from_bits(bits).unguard().map(BlockWord::to_bits)
            });
            if let Err(bits) = unguarded {
                panic!("block {id} unguarded without a lease: {:?}", BlockWord::from_bits(bits));
            }
        }
    }

    /// Refuses a handle whose block is guarded: no reference on it belongs to a handle. Returns the
    /// block's word.
    #[inline(always)]
    fn check_unguarded(&self, table: TableView<'_>, handle: &BlockHandle) -> Result<BlockWord, HandleError> {
        match self.look_up(table, handle) {
            Some((_, word)) if !word.is_guarded() => Ok(word),
            Some(_) => Err(HandleError::Guarded { handle: *handle }),
            None => Err(self.refuse(handle)),
        }
    }

    /// Returns the word of a handle's block, and its place. `None`: the handle is bad.
    #[inline(always)]
    fn look_up<'a>(&self, table: TableView<'a>, handle: &BlockHandle) -> Option<(&'a AtomicU64, BlockWord)> {
        if handle.pool != self.tag {
            return None;
        }
        // The null block is not excluded: it is never owned.
        let row = match table.first_row(handle.id) {
            Some(row) => row,
            None if self.is_of_this_pool(handle) => table.row(handle.id),
            None => return None,
        };
        // Acquire: as in `word`.
        let word = BlockWord::from_bits(row.word.load(Acquire));
        is_current(row.info, handle, word).then_some((row.word, word))
    }

    #[inline]
    fn is_of_this_pool(&self, handle: &BlockHandle) -> bool {
        let is_null = self.config.has_null_block && handle.id.0 == 0;
        handle.pool == self.tag && !is_null && handle.id.index() < self.rows()
    }

    /// Returns the error for a handle that was found bad.
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

    /// Applies a transition to a block's word, while the handle is good. `Ok(None)`: the word does
    /// not allow the transition.
    #[inline]
    pub(in crate::block) fn update<R>(
        &self,
        handle: &BlockHandle,
        by: By,
        transition: impl Fn(BlockWord) -> Option<(BlockWord, R)>,
    ) -> Result<Option<R>, HandleError> {
        if self.is_of_this_pool(handle) {
            self.update_checked(handle, by, transition)
        } else {
            Err(self.refuse(handle))
        }
    }

    /// As [`update`](Self::update), for a handle whose pool and range were checked.
    #[inline]
    fn update_checked<R>(
        &self,
        handle: &BlockHandle,
        by: By,
        transition: impl Fn(BlockWord) -> Option<(BlockWord, R)>,
    ) -> Result<Option<R>, HandleError> {
        let atomic = self.space.table.word(handle.id);
        let mut word = self.word(handle.id);
        loop {
            if !is_current(self.space.table.info(handle.id), handle, word) {
                return Err(self.refuse(handle));
            }
            if by == By::Handle && word.is_guarded() {
                return Err(HandleError::Guarded { handle: *handle });
            }
            let Some((next, result)) = transition(word) else { return Ok(None) };
            // Acquire and Release: as in `release_word`; a transition is a release at the most.
            match atomic.compare_exchange_weak(word.to_bits(), next.to_bits(), AcqRel, Acquire) {
                Ok(_) => return Ok(Some(result)),
                // Another thread shared, pinned, released or freed in between. Reached by the model
                // `share_release`.
                Err(now) => word = BlockWord::from_bits(now),
            }
        }
    }

    /// Refuses a list of handles to free, before anything is changed.
    #[inline]
    fn check_list(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        let table = self.space.table.view();
        for handle in handles {
            self.check_unguarded(table, handle)?;
        }
        self.check_repeats(handles)
    }

    /// Refuses a list that contains a block more often than it has references.
    #[inline]
    fn check_repeats(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        if handles.is_sorted_by(|a, b| a.id < b.id) || handles.is_sorted_by(|a, b| a.id > b.id) {
            return Ok(());
        }
        if handles.len() <= INLINE_BLOCKS {
            // Fewer comparisons than a sort would make, and nothing on the heap.
            let repeated =
                |(i, handle): (usize, &BlockHandle)| handles[..i].iter().any(|other| other.id == handle.id);
            if !handles.iter().enumerate().any(repeated) {
                return Ok(());
            }
        }
        self.count_repeats(handles)
    }

    #[cold]
    fn count_repeats(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        let mut sorted = handles.to_vec();
        sorted.sort_unstable_by_key(|handle| handle.id);
        for same in sorted.chunk_by(|a, b| a.id == b.id) {
            if same.len() > 1 && same.len() > self.word(same[0].id).refs() as usize {
                return Err(HandleError::Repeated { handle: same[0] });
            }
        }
        Ok(())
    }
}

/// Returns whether a word is owned and of the handle's generation. A block that became evictable
/// and was hit again has another generation.
#[inline(always)]
fn is_current(info: &InfoCell, handle: &BlockHandle, word: BlockWord) -> bool {
    // The high bits are read after the word (an Acquire): they change only while the block is free,
    // and a word that is not owned, or has other low bits, is refused in any case.
    word.is_owned() && info.generation(word) == handle.generation
}

impl Released {
    /// Returns the word after the release.
    pub const fn word(self) -> BlockWord {
        match self {
            Self::Shared(word)
            | Self::Last { word, .. }
            | Self::ToMover { word, .. }
            | Self::Evictable { word } => word,
        }
    }
}

//! Eviction of cached blocks without owners: the pool's side. The last release of a *cached* block
//! leaves it *evictable*: in its frame, with its bytes, until a hit or an eviction. The [`Evictor`]
//! orders evictions and finds blocks for hits; a block's state is in its word alone.
//!
//! # Protocol
//!
//! ```text
//! register   (the evictor notes the block's contents);  word: owned, listed  ->  sealed, cached      one compare-exchange
//! uncache    word: owned, cached  ->  owned;  the evictor forgets it                                one compare-exchange
//! hit        (the evictor compares the block's contents, between);  word  ->  one reference more     one compare-exchange
//!            of exactly the word that was read before
//! release    word: last reference, cached  ->  evictable, generation + 1;  the clock is read;  the evictor is told
//! evict      word: evictable, not moving  ->  free;  the evictor forgets it;  the frame is the evicting thread's
//! ```
//!
//! # Invariants
//!
//! - *A hit is exact.* The evictor's records of a block change only while it is not cached, and the
//!   word changes between two registrations: a hit's compare-exchange of the very word under which
//!   it read the records fails if they could have changed.
//! - *A hit is final*: from its compare-exchange on it is a reference like any other.
//! - *A frame is not reused too early.* Every batch that may have seen a block began before the
//!   clock was read after its last release: that ticket is the *tag*. An eviction that does not
//!   find the tag of the word's generation takes the newest ticket instead.
//! - *A stopped thread loses no block*: a [walk](Core::evict_any) finds all evictable ones.
//! - *Floors.* In a pool with tenants, each eviction passes [their gate](crate::block::tenants).
//!
//! Model: `loom-tests/tests/evictable.rs`.

use smallvec::SmallVec;

use crate::frame::RunList;
use crate::ids::{BlockHandle, BlockId, FrameId, Run, Ticket};
use crate::sync::{AtomicU64, Ordering::*, prefetch};

use super::complete::note_units;
use crate::block::core::{Core, Evictable, NotEvicted};
use crate::block::space::FreedFrames;
use crate::block::state::{BlockWord, TenantSet};
use crate::block::tenants::{EvictedFor, Tenant};

/// The word of one block.
#[derive(Clone, Copy)]
pub(crate) struct WordCell<'a>(&'a AtomicU64);

impl WordCell<'_> {
    #[inline]
    pub(crate) fn read(self) -> BlockWord {
        // Acquire: as in `Core::word`.
        BlockWord::from_bits(self.0.load(Acquire))
    }

    /// Adds a list's reference to a block whose contents were read under `word`. Returns whether it
    /// was evictable; `None` if the word has changed since, or is full.
    #[inline]
    pub(crate) fn hit(self, word: BlockWord) -> Option<bool> {
        self.exchange_hit(word, word.hit()?)
    }

    /// Like [`hit`](Self::hit), for a block of a frame pool.
    #[inline]
    pub(crate) fn hit_in_place(self, word: BlockWord) -> Option<bool> {
        self.exchange_hit(word, word.share_in_place().filter(|_| word.is_cached())?)
    }

    #[inline]
    pub(crate) fn prefetch(self) {
        prefetch(self.0);
    }

    #[inline]
    fn exchange_hit(self, word: BlockWord, next: BlockWord) -> Option<bool> {
        // Acquire: the block's bytes and records are visible to their reader. No Release: we have
        // not used the block, and a read-modify-write continues earlier release sequences.
        let hit = self.0.compare_exchange(word.to_bits(), next.to_bits(), Acquire, Relaxed);
        hit.ok().map(|_| !word.is_owned())
    }
}

/// The words of the blocks that a pool had when it was built.
#[derive(Clone, Copy)]
pub(crate) struct FirstCells<'a>(&'a [AtomicU64]);

impl<'a> FirstCells<'a> {
    #[inline]
    pub(crate) fn get(self, id: BlockId) -> Option<WordCell<'a>> {
        self.0.get(id.index()).map(WordCell)
    }
}

enum Exchanged {
    Evicted(FrameId),
    /// The block's tenant is at its floor.
    Protected,
    /// The word has changed.
    Changed,
}

impl Core {
    /// Caches and seals a block of a sequence's list. False: the sequence has released it.
    pub(crate) fn seal_cached(&self, handle: BlockHandle) -> bool {
        self.update(&handle, BlockWord::seal_cached) == Ok(true)
    }

    /// Returns the place of a block's word, for several accesses.
    #[inline]
    pub(crate) fn cell(&self, id: BlockId) -> WordCell<'_> {
        WordCell(self.space.table.word(id))
    }

    #[inline]
    pub(crate) fn first_cells(&self) -> FirstCells<'_> {
        FirstCells(self.space.table.view().words())
    }

    /// Uncaches an owned block, which the evictor must forget. False: not owned or not cached.
    pub(crate) fn uncache(&self, id: BlockId) -> bool {
        // Acquire and Release: as in `outlive`.
        let uncached = self.space.table.word(id).fetch_update(AcqRel, Relaxed, |bits| {
            BlockWord::from_bits(bits).uncache().map(BlockWord::to_bits)
        });
        uncached.is_ok()
    }

    #[inline]
    pub(in crate::block) fn count_evictable(&self, blocks: usize) {
        // Relaxed, here and below: a statistic. A thread that sees a release also sees the count before it.
        self.evictable.fetch_add(blocks, Relaxed);
    }

    #[inline]
    pub(crate) fn count_not_evictable(&self, evictable: usize) {
        if evictable > 0 {
            self.evictable.fetch_sub(evictable, Relaxed);
        }
    }

    /// Returns the number of evictable blocks: never too low.
    pub fn evictable(&self) -> usize {
        // A hit may be counted before the release that made it possible.
        (self.evictable.load(Relaxed) as isize).max(0) as usize
    }

    pub(in crate::block) fn tag_evictable(
        &self,
        blocks: &[Evictable],
        tell: impl FnOnce(&[Evictable], Ticket),
    ) {
        if blocks.is_empty() {
            return;
        }
        // After the releases: every batch that saw the blocks is visible to this load.
        let tag = self.space.clock.idle_or_tag().unwrap_or(Ticket(0));
        tell(blocks, tag);
    }

    /// Evicts one block, if no batch from `oldest` on sees it. The caller owns its frame.
    pub(crate) fn evict(&self, id: BlockId, oldest: Ticket) -> Result<FrameId, NotEvicted> {
        self.evict_for(id, oldest, EvictedFor::ANY)
    }

    pub(in crate::block) fn evict_for(
        &self,
        id: BlockId,
        oldest: Ticket,
        by: EvictedFor,
    ) -> Result<FrameId, NotEvicted> {
        let frame = self.evict_unforgotten(id, by, |word| self.is_unseen(id, word, oldest))?;
        self.forget_evicted(id);
        Ok(frame)
    }

    pub(in crate::block) fn evict_in(&self, frame: FrameId, oldest: Ticket, tenant: Tenant) -> bool {
        let id = self.space.table.block_at(frame);
        let is_here = |word: BlockWord| word.frame() == frame && self.is_unseen(id, word, oldest);
        let is_evicted = self.evict_unforgotten(id, EvictedFor::Tenant(tenant), is_here).is_ok();
        if is_evicted {
            self.forget_evicted(id);
        }
        is_evicted
    }

    /// Like [`evict`](Self::evict), for an evictor that forgets and counts the block itself.
    #[inline]
    pub(crate) fn evict_unforgotten(
        &self,
        id: BlockId,
        by: EvictedFor,
        is_unseen: impl Fn(BlockWord) -> bool,
    ) -> Result<FrameId, NotEvicted> {
        loop {
            let word = self.word(id);
            if word.evict().is_none() {
                return Err(if word.is_evictable() { NotEvicted::Moving } else { NotEvicted::Owned });
            }
            if !is_unseen(word) {
                return Err(NotEvicted::Seen);
            }
            match self.exchange_evicted(id, word, by) {
                Exchanged::Evicted(frame) => return Ok(frame),
                Exchanged::Protected => return Err(NotEvicted::Protected),
                Exchanged::Changed => {}
            }
        }
    }

    fn evict_word(&self, id: BlockId, word: BlockWord, by: EvictedFor) -> Option<FrameId> {
        let Exchanged::Evicted(frame) = self.exchange_evicted(id, word, by) else { return None };
        self.forget_evicted(id);
        Some(frame)
    }

    fn forget_evicted(&self, id: BlockId) {
        self.count_not_evictable(1);
        if let Some(evictor) = &self.evictor {
            evictor.forget(self, id);
        }
    }

    #[inline]
    fn exchange_evicted(&self, id: BlockId, word: BlockWord, by: EvictedFor) -> Exchanged {
        let Some(next) = word.evict() else { return Exchanged::Changed };
        // Acquire: the last owners' accesses to the bytes happen before the next owner's. No
        // Release: a handle check only sees that the block is free.
        let exchange = || {
            let atomic = self.space.table.word(id);
            atomic.compare_exchange(word.to_bits(), next.to_bits(), Acquire, Relaxed).is_ok()
        };
        let is_evicted = match self.tenants() {
            None => exchange(),
            Some(tenants) => match tenants.evict(id, by, exchange) {
                Some(is_evicted) => {
                    // A search may have found no room beyond the floor meanwhile.
                    (!is_evicted).then(|| self.announce());
                    is_evicted
                }
                None => return Exchanged::Protected,
            },
        };
        if is_evicted { Exchanged::Evicted(next.frame()) } else { Exchanged::Changed }
    }

    /// Returns whether no batch in flight, from `oldest` on, sees an evictable block.
    #[inline]
    pub(crate) fn is_unseen(&self, id: BlockId, word: BlockWord, oldest: Ticket) -> bool {
        let evictor = self.evictor.as_ref();
        match evictor.and_then(|evictor| evictor.tag(id, word)) {
            Some(tag) => tag < oldest,
            // Not recorded yet by the releasing thread: assume the newest ticket.
            None => match (self.space.clock.idle_or_tag(), evictor) {
                (Some(newest), Some(evictor)) => {
                    evictor.assume_tag(id, word, newest);
                    false
                }
                _ => true,
            },
        }
    }

    pub(in crate::block) fn can_evict(&self, id: BlockId, word: BlockWord, oldest: Ticket) -> bool {
        word.evict().is_some()
            && self.is_unseen(id, word, oldest)
            && !self.is_protected(self.tenant_of(id), Tenant::NONE)
    }

    pub(crate) fn can_evict_at(&self, frame: FrameId, oldest: Ticket) -> bool {
        let id = self.space.table.block_at(frame);
        let word = self.word(id);
        word.frame() == frame && self.can_evict(id, word, oldest)
    }

    /// Evicts up to `wanted` blocks in the evictor's order; 0 does not mean that none is evictable.
    pub(in crate::block) fn evict_some_for(
        &self,
        tenant: Tenant,
        wanted: usize,
        freed: &mut dyn FnMut(&[FrameId]),
    ) -> usize {
        let Some(evictor) = self.evictor.as_ref().filter(|_| self.evictable() > 0) else { return 0 };
        let (mut got, oldest) = (0, self.space.clock.oldest());
        let mut freed = |frames: &[FrameId]| {
            got += frames.len();
            freed(frames);
        };
        match self.tenants() {
            None => evictor.evict(self, oldest, (wanted, Tenant::NONE), &mut freed),
            Some(tenants) => {
                tenants.count_passed_over(tenant);
                if self.evictable_for(tenant) > 0 {
                    evictor.evict(self, oldest, (wanted, tenant), &mut freed);
                }
            }
        }
        got
    }

    /// Before a refusal: if the evictor finds no block, walks over all words.
    #[cold]
    pub(in crate::block) fn evict_any(&self, wanted: usize, freed: &mut dyn FnMut(&[FrameId])) -> usize {
        self.evict_any_for(Tenant::NONE, wanted, freed)
    }

    #[cold]
    pub(in crate::block) fn evict_any_for(
        &self,
        tenant: Tenant,
        wanted: usize,
        freed: &mut dyn FnMut(&[FrameId]),
    ) -> usize {
        if self.knows_no_eviction(tenant) {
            return 0;
        }
        let got = self.evict_some_for(tenant, wanted, freed);
        if got > 0 || self.evictable_for(tenant) == 0 {
            return got;
        }
        let state = self.evictions();
        let (mut got, mut kept, mut protected) = (0, 0, TenantSet::default());
        for id in (0..self.rows() as u32).map(BlockId) {
            match self.evict_for(id, state.oldest, EvictedFor::Tenant(tenant)) {
                Ok(frame) => {
                    freed(&[frame]);
                    got += 1;
                    if got == wanted {
                        break;
                    }
                }
                Err(NotEvicted::Seen) => {
                    kept += usize::from(self.is_seen_for_certain(id, self.word(id), state.oldest));
                }
                Err(NotEvicted::Protected) => {
                    protected.add(self.tenant_of(id).index());
                    kept += 1;
                }
                Err(NotEvicted::Owned | NotEvicted::Moving) => {}
            }
        }
        if got == 0 {
            self.remember_no_eviction(state, kept, protected);
        }
        got
    }

    /// Returns whether a batch from `oldest` on sees a block according to a final tag.
    pub(super) fn is_seen_for_certain(&self, id: BlockId, word: BlockWord, oldest: Ticket) -> bool {
        // One load: between two, the releasing thread could record an older tag than was assumed.
        let tag = self.evictor.as_ref().and_then(|evictor| evictor.noted_tag(id, word));
        tag.is_some_and(|tag| tag >= oldest)
    }

    /// Evicts these blocks if evictable and not moving; retires frames that batches may see.
    pub(crate) fn evict_these(&self, ids: impl IntoIterator<Item = BlockId>) -> usize {
        let (mut seen, mut evicted, oldest) = (RunList::new(), 0, self.space.clock.oldest());
        let mut freed = FreedFrames::new(&self.space);
        for id in ids {
            let mut word = self.word(id);
            while word.evict().is_some() {
                let is_unseen = self.is_unseen(id, word, oldest);
                if let Some(frame) = self.evict_word(id, word, EvictedFor::Caller) {
                    if is_unseen {
                        freed.push(frame)
                    } else {
                        seen.push(frame)
                    }
                    evicted += 1;
                }
                word = self.word(id);
            }
        }
        drop(freed);
        self.free_or_retire(&seen);
        self.announce();
        evicted
    }

    /// Evicts and frees unseen blocks with unchanged words. The caller announces.
    pub(crate) fn evict_released(&self, blocks: &[Evictable], stays: &mut dyn FnMut(BlockId)) -> usize {
        let (mut freed, mut evicted, oldest) = (RunList::new(), 0, self.space.clock.oldest());
        for &Evictable { id, word } in blocks {
            let is_unseen = self.is_unseen(id, word, oldest);
            // By this very word: a later owner may have exposed it to a batch above the tag.
            let frame = is_unseen.then(|| self.evict_word(id, word, EvictedFor::ANY)).flatten();
            match frame {
                Some(frame) => {
                    freed.push(frame);
                    evicted += 1;
                }
                None => stays(id),
            }
        }
        freed.iter().for_each(|&run| self.space.free_run(run));
        evicted
    }

    /// Evicts up to `wanted` blocks through the bitmaps, to merge frames. The caller announces.
    pub(super) fn evict_to_units(&self, wanted: usize, tenant: Tenant) -> usize {
        let early = self.evictor.as_ref().filter(|evictor| evictor.evicts_early(&[], 1));
        let evict = |core: &Self, wanted: usize, freed: &mut dyn FnMut(&[FrameId])| {
            core.evict_some_for(tenant, wanted, freed)
        };
        let Some(evictor) = early else { return self.evict_to_free(wanted, evict) };
        let mut units = SmallVec::new();
        let evicted = self.evict_to_free(wanted, |core, wanted, freed| {
            evict(core, wanted, &mut |frames| {
                note_units(&mut units, frames);
                freed(frames);
            })
        });
        evicted + self.complete_units(&**evictor, units)
    }

    fn evict_to_free(
        &self,
        wanted: usize,
        evict: impl FnOnce(&Self, usize, &mut dyn FnMut(&[FrameId])) -> usize,
    ) -> usize {
        let mut freed = FreedFrames::new(&self.space);
        evict(self, wanted, &mut |frames| frames.iter().for_each(|&frame| freed.push(frame)))
    }

    pub(crate) fn evict_free(&self, wanted: usize) -> usize {
        let evicted = if wanted > 0 { self.evict_to_free(wanted, Self::evict_any) } else { 0 };
        if evicted > 0 {
            self.announce();
        }
        evicted
    }

    pub(crate) fn evict_region(&self, region: Run) {
        if self.evictable() == 0 {
            return;
        }
        let (mut freed, oldest) = (FreedFrames::new(&self.space), self.space.clock.oldest());
        let evicted = region.frames().filter(|&frame| self.evict_in(frame, oldest, Tenant::NONE));
        evicted.for_each(|frame| freed.push(frame));
        drop(freed);
        self.announce();
    }

    /// Returns an evicted block's frame, unless it went to the reserve or was not wiped.
    pub(in crate::block) fn take_evicted(&self, frame: FrameId, is_urgent: bool) -> Option<FrameId> {
        let run = Run { start: frame, len: 1 };
        if !self.space.wipe(run) {
            return None;
        }
        let is_taken = !is_urgent && self.space.reserve.is_short() && self.space.reserve.fill(run).len == 0;
        (!is_taken).then_some(frame)
    }
}

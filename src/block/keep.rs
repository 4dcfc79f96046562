//! Blocks that are kept although nobody owns them: a cache's side of the words.
//!
//! A sealed block of a sequence can be *cached*. Its last release leaves it *evictable*: in its frame, with its bytes,
//! until somebody hits it or its frame is needed. Which block is evicted first, and how a hit finds one, is the
//! [`Keeper`]'s affair; what is true of a block is in its word.
//!
//! # Protocol
//!
//! ```text
//! register   (the keeper notes what the block holds);  word: owned, listed  ->  sealed, cached      one compare-exchange
//! hit        (the keeper compares what the block holds, between);  word  ->  one reference more     one compare-exchange
//!            of exactly the word that was read before
//! keep       word: last reference, cached  ->  evictable, generation + 1;  the clock is read;  the keeper is told
//! evict      word: evictable, not moving  ->  free;  the keeper forgets it;  the frame is the evictor's
//! ```
//!
//! # Invariants
//!
//! - *A hit is of what was noted.* What the keeper notes of a block changes only while the block is not cached, and the word
//!   changes with every step between two registrations: a hit's compare-exchange of the very word under which it read
//!   the notes fails if they could have changed.
//! - *A hit cannot be taken away*: from its compare-exchange on it is a reference like any other.
//! - *A frame is not reused too early.* Every batch that may have seen a block began before the clock was read after its last
//!   release: the tag. Whoever evicts and does not find the tag that belongs to the word's generation takes the newest
//!   ticket for it.
//! - *Nothing is lost with a thread.* Whether a block is evictable is in its word alone: a [walk](Core::evict_any) finds those
//!   that the keeper was never told of.
//!
//! Model: `loom-tests/tests/evictable.rs`.

use crate::ids::{BlockHandle, BlockId, FrameId, Run, Ticket};
use crate::sync::{Arc, Ordering::*};

use super::blocks::Core;
use super::release::Freed;
use super::{BlockWord, Released};

/// Who knows what evictable blocks hold, and which of them goes first.
///
/// Called from threads that release and allocate, with blocks in their hands: it must not wait, nor panic.
pub trait Keeper: Send + Sync {
    /// There will be blocks up to this number.
    fn grow(&self, core: &Core, rows: usize);

    /// These blocks became evictable, in this order; each may have been hit, released again, or evicted, since. `tag`: the
    /// newest batch that may have seen them before; 0 if none in flight has.
    fn keep(&self, core: &Core, kept: &[Kept], tag: Ticket);

    /// Evicts up to `wanted` blocks by [`Core::evict`] and passes on the frames, all of which no batch in flight sees.
    /// `oldest`: the oldest batch in flight. Fewer does not mean that there are no more.
    fn evict(&self, core: &Core, oldest: Ticket, wanted: usize, freed: &mut dyn FnMut(FrameId));

    /// The newest batch that may have seen a block which is evictable, as far as it is known: `word` is the block's.
    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket>;

    /// The block was evicted, and is free; its frame is the caller's until this returns.
    fn forget(&self, core: &Core, id: BlockId);
}

/// Shared with who asks it for more.
impl<T: Keeper> Keeper for Arc<T> {
    fn grow(&self, core: &Core, rows: usize) {
        (**self).grow(core, rows);
    }

    fn keep(&self, core: &Core, kept: &[Kept], tag: Ticket) {
        (**self).keep(core, kept, tag);
    }

    fn evict(&self, core: &Core, oldest: Ticket, wanted: usize, freed: &mut dyn FnMut(FrameId)) {
        (**self).evict(core, oldest, wanted, freed);
    }

    fn tag(&self, id: BlockId, word: BlockWord) -> Option<Ticket> {
        (**self).tag(id, word)
    }

    fn forget(&self, core: &Core, id: BlockId) {
        (**self).forget(core, id);
    }
}

/// A block that became evictable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kept {
    /// The block.
    pub id: BlockId,
    /// Its word as its last release left it: what is noted of the release is noted for this generation.
    pub word: BlockWord,
}

impl Core {
    /// Registers a block of a sequence's list with the cache: from now on its bytes are final. Nothing happens if the
    /// handle is stale by now, and false is returned: it went its way.
    pub(crate) fn seal_cached(&self, handle: BlockHandle) -> bool {
        self.update(&handle, |word| word.seal_cached().map(|next| (next, ())))
            .is_ok_and(|done| done.is_some())
    }

    /// A reference for a sequence's list on a block that held what was looked for when its word was `word`. `None`: it
    /// changed since, or has as many references as it can; else whether it was evictable.
    #[inline]
    pub(crate) fn hit(&self, id: BlockId, word: BlockWord) -> Option<bool> {
        let next = word.hit()?;
        // Acquire: what was stored into the block is seen by whoever reads it as a prefix. Release: goes on with the order
        // of those who released it, for whoever is the last.
        let hit = self.table.word(id).compare_exchange(word.to_bits(), next.to_bits(), AcqRel, Relaxed);
        hit.ok().map(|_| !word.is_owned())
    }

    /// So many hits were of evictable blocks.
    #[inline]
    pub(crate) fn count_hits(&self, evictable: usize) {
        if evictable > 0 {
            // Relaxed: a statistic.
            self.evictable.fetch_sub(evictable, Relaxed);
        }
    }

    /// Blocks that nobody owns, and that are kept for their bytes.
    pub fn evictable(&self) -> usize {
        // A hit may be counted before the release that made it possible.
        (self.evictable.load(Relaxed) as isize).max(0) as usize
    }

    /// These blocks' last references went just now.
    pub(super) fn keep(&self, kept: &[Kept], keep: impl FnOnce(&[Kept], Ticket)) {
        if kept.is_empty() {
            return;
        }
        self.evictable.fetch_add(kept.len(), Relaxed);
        // After the releases, as in `give_back`: every batch that saw the blocks is visible to this load.
        let tag = self.clock.idle_or_tag().unwrap_or(Ticket(0));
        keep(kept, tag);
    }

    /// Evicts one block, if it is evictable and no batch in flight, of which `oldest` is the oldest, sees it; its frame is
    /// the caller's.
    ///
    /// # Errors
    ///
    /// [`NotEvicted`]; nothing has changed.
    pub fn evict(&self, id: BlockId, oldest: Ticket) -> Result<FrameId, NotEvicted> {
        let keeper = self.keeper.as_ref().ok_or(NotEvicted::Owned)?;
        let atomic = self.table.word(id);
        loop {
            let word = self.word(id);
            if !word.is_evictable() {
                return Err(NotEvicted::Owned);
            }
            if word.is_moving() {
                return Err(NotEvicted::Moving);
            }
            if !self.is_unseen(keeper.tag(id, word), oldest) {
                return Err(NotEvicted::Seen);
            }
            let Some(Released::Last { word: next, .. }) = word.evict() else { return Err(NotEvicted::Owned) };
            // Acquire: what the last owners did with the bytes happens before the next owner's. Release: as for every
            // word, for who checks a handle.
            if atomic.compare_exchange(word.to_bits(), next.to_bits(), AcqRel, Relaxed).is_ok() {
                self.evictable.fetch_sub(1, Relaxed);
                keeper.forget(self, id);
                return Ok(next.frame());
            }
        }
    }

    /// Whether no batch in flight sees a block with this tag.
    #[inline]
    fn is_unseen(&self, tag: Option<Ticket>, oldest: Ticket) -> bool {
        let is_unseen = match tag {
            Some(tag) => tag < oldest,
            None => self.clock.idle_or_tag().is_none(),
        };
        is_unseen || cfg!(kvpool_mutant = "evict_seen")
    }

    /// Whether an eviction would succeed just now.
    pub(super) fn can_evict(&self, id: BlockId, word: BlockWord, oldest: Ticket) -> bool {
        let tag = self.keeper.as_ref().and_then(|keeper| keeper.tag(id, word));
        word.is_evictable() && !word.is_moving() && self.is_unseen(tag, oldest)
    }

    /// Evicts up to `wanted` blocks, those first that the keeper wants to go. It passes over some that are moving or seen, not
    /// over all: none does not mean that none can be.
    pub(super) fn evict_some(&self, wanted: usize, freed: &mut dyn FnMut(FrameId)) -> usize {
        let Some(keeper) = self.keeper.as_ref().filter(|_| self.evictable() > 0) else { return 0 };
        let mut got = 0;
        keeper.evict(self, self.clock.oldest(), wanted, &mut |frame| {
            got += 1;
            freed(frame);
        });
        got
    }

    /// Evicts up to `wanted` blocks, before a request is refused: if the keeper gives none, by a walk over all words, which
    /// finds also those that it does not know, has in its hands, or has behind others that cannot go.
    #[cold]
    pub(super) fn evict_any(&self, wanted: usize, freed: &mut dyn FnMut(FrameId)) -> usize {
        let got = self.evict_some(wanted, freed);
        if got > 0 || self.evictable() == 0 {
            return got;
        }
        let (oldest, ids) = (self.clock.oldest(), (0..self.rows() as u32).map(BlockId));
        let evicted = ids.filter_map(|id| self.evict(id, oldest).ok()).take(wanted);
        evicted.map(freed).count()
    }

    /// Evicts everything that can be, for a cache that is cleared: frames go back to the pool, those of blocks that are
    /// moving by their movers. Returns how many blocks.
    pub fn evict_all(&self) -> usize {
        let Some(keeper) = self.keeper.as_ref() else { return 0 };
        let (mut freed, mut seen) = (Freed::new(), Freed::new());
        let (mut evicted, oldest) = (0, self.clock.oldest());
        for id in (0..self.rows() as u32).map(BlockId) {
            let cleared = self.table.word(id).fetch_update(AcqRel, Acquire, |bits| {
                let released = BlockWord::from_bits(bits).evict()?;
                Some(released.word().to_bits())
            });
            let Ok(bits) = cleared else { continue };
            evicted += 1;
            self.evictable.fetch_sub(1, Relaxed);
            let word = BlockWord::from_bits(bits);
            let is_seen = keeper.tag(id, word).is_none_or(|tag| tag >= oldest);
            keeper.forget(self, id);
            if word.is_moving() {
                // Its frame is the mover's now, who pays the rest.
                self.held.fetch_add(1, Relaxed);
            } else if is_seen {
                seen.push(word.frame());
            } else {
                freed.push(word.frame());
            }
        }
        freed.runs.iter().for_each(|&run| self.free_run(run));
        self.free_or_retire(&seen.runs);
        self.announce();
        evicted
    }

    /// Evicts up to so many blocks, and frees them.
    pub(crate) fn evict_free(&self, wanted: usize) {
        let mut free = |frame| self.free_run(Run { start: frame, len: 1 });
        if wanted > 0 && self.evict_any(wanted, &mut free) > 0 {
            self.announce();
        }
    }

    /// Evicts what is evictable in these frames, and frees it.
    pub(crate) fn evict_region(&self, region: Run) {
        if self.evictable() == 0 {
            return;
        }
        let oldest = self.clock.oldest();
        for frame in region.frames() {
            if let Ok(frame) = self.evict(self.table.block_at(frame), oldest) {
                self.free_run(Run { start: frame, len: 1 });
            }
        }
        self.announce();
    }

    /// A frame of an evicted block, for a request that takes from the reserve or not: what the reserve is short of comes
    /// first. `None`: it went there.
    pub(super) fn take_evicted(&self, frame: FrameId, is_urgent: bool) -> Option<FrameId> {
        let run = Run { start: frame, len: 1 };
        self.wipe(run);
        let is_taken = !is_urgent && self.reserve.is_short() && self.reserve.fill(run).len == 0;
        (!is_taken).then_some(frame)
    }
}

/// Why a block was not evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotEvicted {
    /// It is owned, or free.
    Owned,
    /// It is being moved.
    Moving,
    /// A batch in flight may see it.
    Seen,
}

//! Blocks that are kept although nobody owns them: a cache's side of the words.
//!
//! A sealed block of a sequence can be *cached*. Its last release leaves it *evictable*: in its frame, with its bytes,
//! until somebody hits it or its frame is needed. Which block is evicted first, and how a hit finds one, is the
//! [`Evictor`]'s affair; what is true of a block is in its word.
//!
//! # Protocol
//!
//! ```text
//! register   (the evictor notes what the block holds);  word: owned, listed  ->  sealed, cached      one compare-exchange
//! hit        (the evictor compares what the block holds, between);  word  ->  one reference more     one compare-exchange
//!            of exactly the word that was read before
//! keep       word: last reference, cached  ->  evictable, generation + 1;  the clock is read;  the evictor is told
//! evict      word: evictable, not moving  ->  free;  the evictor forgets it;  the frame is the evictor's
//! ```
//!
//! # Invariants
//!
//! - *A hit is of what was noted.* What the evictor notes of a block changes only while the block is not cached, and the word
//!   changes with every step between two registrations: a hit's compare-exchange of the very word under which it read
//!   the notes fails if they could have changed.
//! - *A hit cannot be taken away*: from its compare-exchange on it is a reference like any other.
//! - *A frame is not reused too early.* Every batch that may have seen a block began before the clock was read after its last
//!   release: the tag. Whoever evicts and does not find the tag that belongs to the word's generation takes the newest
//!   ticket for it.
//! - *Nothing is lost with a thread.* Whether a block is evictable is in its word alone: a [walk](Core::evict_any) finds those
//!   that the evictor was never told of.
//!
//! Model: `loom-tests/tests/evictable.rs`.

use crate::frame::RunList;
use crate::ids::{BlockHandle, BlockId, FrameId, Run, Ticket};
use crate::sync::Ordering::*;

use crate::block::core::Core;
use crate::block::release::By;
use crate::block::{BlockWord, Evictable, Evictor, NotEvicted};

impl Core {
    /// Registers a block of a sequence's list with the cache: from now on its bytes are final. Nothing happens if the
    /// handle is stale by now, and false is returned: it went its way.
    pub(crate) fn seal_cached(&self, handle: BlockHandle) -> bool {
        self.update(&handle, By::Owner, |word| word.seal_cached().map(|next| (next, ())))
            .is_ok_and(|done| done.is_some())
    }

    /// A reference for a sequence's list on a block that held what was looked for when its word was `word`. `None`: it
    /// changed since, or has as many references as it can; else whether it was evictable.
    #[inline]
    pub(crate) fn hit(&self, id: BlockId, word: BlockWord) -> Option<bool> {
        let next = word.hit()?;
        // Acquire: what was stored into the block, and noted of it, is seen by whoever reads it as a prefix. No Release: we have
        // done nothing with the block yet, and a read-modify-write goes on with the order of those who released it.
        let hit =
            self.space.table.word(id).compare_exchange(word.to_bits(), next.to_bits(), Acquire, Relaxed);
        hit.ok().map(|_| !word.is_owned())
    }

    /// So many blocks may become evictable.
    #[inline]
    pub(in crate::block) fn count_evictable(&self, blocks: usize) {
        // Relaxed: a statistic. That it comes before the release counts for who sees the release.
        self.evictable.fetch_add(blocks, Relaxed);
    }

    /// So many blocks are not evictable any more, being hits, or did not become so.
    #[inline]
    pub(crate) fn count_hits(&self, evictable: usize) {
        if evictable > 0 {
            // Relaxed: a statistic.
            self.evictable.fetch_sub(evictable, Relaxed);
        }
    }

    /// Blocks that nobody owns, and that are kept for their bytes. While blocks are released, hit or evicted, some may be
    /// counted that are not; never the other way round.
    pub fn evictable(&self) -> usize {
        // A hit may be counted before the release that made it possible.
        (self.evictable.load(Relaxed) as isize).max(0) as usize
    }

    /// These blocks' last references went just now.
    pub(in crate::block) fn keep(&self, kept: &[Evictable], keep: impl FnOnce(&[Evictable], Ticket)) {
        if kept.is_empty() {
            return;
        }
        // After the releases, as in `give_back`: every batch that saw the blocks is visible to this load.
        let tag = self.space.clock.idle_or_tag().unwrap_or(Ticket(0));
        keep(kept, tag);
    }

    /// Evicts one block, if it is evictable and no batch in flight, of which `oldest` is the oldest, sees it; its frame is
    /// the caller's.
    ///
    /// # Errors
    ///
    /// [`NotEvicted`]; nothing has changed.
    pub(crate) fn evict(&self, id: BlockId, oldest: Ticket) -> Result<FrameId, NotEvicted> {
        let evictor = self.evictor.as_ref().ok_or(NotEvicted::Owned)?;
        loop {
            let word = self.word(id);
            if word.evict().is_none() {
                return Err(if word.is_evictable() { NotEvicted::Moving } else { NotEvicted::Owned });
            }
            if !self.is_unseen(id, word, oldest) {
                return Err(NotEvicted::Seen);
            }
            if let Some(frame) = self.evict_word(&**evictor, id, word) {
                return Ok(frame);
            }
        }
    }

    /// Evicts a block whose word is `word`; its frame is the caller's. `None`: the word is another by now.
    fn evict_word(&self, evictor: &dyn Evictor, id: BlockId, word: BlockWord) -> Option<FrameId> {
        let next = word.evict()?;
        // Acquire: what the last owners did with the bytes happens before the next owner's. No Release: who checks a handle sees
        // that the block is free, and no more.
        let evicted = self
            .space
            .table
            .word(id)
            .compare_exchange(word.to_bits(), next.to_bits(), Acquire, Relaxed)
            .is_ok();
        evicted.then(|| {
            self.evictable.fetch_sub(1, Relaxed);
            evictor.forget(self, id);
            next.frame()
        })
    }

    /// Whether no batch in flight, of which `oldest` is the oldest, sees a block that is evictable.
    #[inline]
    fn is_unseen(&self, id: BlockId, word: BlockWord, oldest: Ticket) -> bool {
        let evictor = self.evictor.as_ref();
        let is_unseen = match evictor.and_then(|evictor| evictor.tag(id, word)) {
            Some(tag) => tag < oldest,
            // Who released it has not come to note it. Until then it is taken to be seen by all batches of this moment.
            None => match (self.space.clock.idle_or_tag(), evictor) {
                (Some(newest), Some(evictor)) => {
                    evictor.set_tag(id, word, newest);
                    false
                }
                _ => true,
            },
        };
        is_unseen || cfg!(kvpool_mutant = "evict_seen")
    }

    /// Whether an eviction would succeed just now.
    pub(in crate::block) fn can_evict(&self, id: BlockId, word: BlockWord, oldest: Ticket) -> bool {
        word.evict().is_some() && self.is_unseen(id, word, oldest)
    }

    /// Evicts up to `wanted` blocks, those first that the evictor wants to go. It passes over some that are moving or seen, not
    /// over all: none does not mean that none can be.
    pub(in crate::block) fn evict_some(&self, wanted: usize, freed: &mut dyn FnMut(FrameId)) -> usize {
        let Some(evictor) = self.evictor.as_ref().filter(|_| self.evictable() > 0) else { return 0 };
        let mut got = 0;
        evictor.evict(self, self.space.clock.oldest(), wanted, &mut |frame| {
            got += 1;
            freed(frame);
        });
        got
    }

    /// Evicts up to `wanted` blocks, before a request is refused: if the evictor gives none, by a walk over all words, which
    /// finds also those that it does not know, has in its hands, or has behind others that cannot go.
    #[cold]
    pub(in crate::block) fn evict_any(&self, wanted: usize, freed: &mut dyn FnMut(FrameId)) -> usize {
        let got = self.evict_some(wanted, freed);
        if got > 0 || self.evictable() == 0 {
            return got;
        }
        let (oldest, ids) = (self.space.clock.oldest(), (0..self.rows() as u32).map(BlockId));
        let evicted = ids.filter_map(|id| self.evict(id, oldest).ok()).take(wanted);
        evicted.map(freed).count()
    }

    /// Evicts everything that can be, for a cache that is cleared: what batches may see is retired. Blocks that are just
    /// being moved stay. Returns how many blocks were evicted.
    pub(crate) fn evict_all(&self) -> usize {
        let Some(evictor) = self.evictor.as_deref() else { return 0 };
        let (mut freed, mut seen) = (RunList::new(), RunList::new());
        let (mut evicted, oldest) = (0, self.space.clock.oldest());
        for id in (0..self.rows() as u32).map(BlockId) {
            let mut word = self.word(id);
            while word.evict().is_some() {
                let is_unseen = self.is_unseen(id, word, oldest);
                if let Some(frame) = self.evict_word(evictor, id, word) {
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
        freed.iter().for_each(|&run| self.space.free_run(run));
        self.free_or_retire(&seen);
        self.announce();
        evicted
    }

    /// Evicts blocks just as their release left them, and frees them; the caller announces. Those stay that a batch in flight
    /// may see, that are moving, or that somebody has had since. Returns how many were evicted.
    pub(crate) fn evict_one(&self, kept: &[Evictable], stays: &mut dyn FnMut(BlockId)) -> usize {
        let Some(evictor) = self.evictor.as_deref() else { return 0 };
        let (mut freed, mut evicted, oldest) = (RunList::new(), 0, self.space.clock.oldest());
        for &Evictable { id, word } in kept {
            let is_unseen = self.is_unseen(id, word, oldest);
            // Of this very word: whoever had the block since may show it to a batch that the tag does not know.
            let word = if cfg!(kvpool_mutant = "give_up_rewritten") { self.word(id) } else { word };
            let frame = is_unseen.then(|| self.evict_word(evictor, id, word)).flatten();
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

    /// Evicts up to so many blocks, and frees them.
    pub(crate) fn evict_free(&self, wanted: usize) {
        let mut free = |frame| self.space.free_run(Run { start: frame, len: 1 });
        if wanted > 0 && self.evict_any(wanted, &mut free) > 0 {
            self.announce();
        }
    }

    /// Evicts what is evictable in these frames, and frees it.
    pub(crate) fn evict_region(&self, region: Run) {
        if self.evictable() == 0 {
            return;
        }
        let oldest = self.space.clock.oldest();
        for frame in region.frames() {
            if let Ok(frame) = self.evict(self.space.table.block_at(frame), oldest) {
                self.space.free_run(Run { start: frame, len: 1 });
            }
        }
        self.announce();
    }

    /// A frame of an evicted block, for a request that takes from the reserve or not: what the reserve is short of comes
    /// first. `None`: it went there, or could not be wiped.
    pub(in crate::block) fn take_evicted(&self, frame: FrameId, is_urgent: bool) -> Option<FrameId> {
        let run = Run { start: frame, len: 1 };
        if !self.space.wipe(run) {
            return None;
        }
        let is_taken = !is_urgent && self.space.reserve.is_short() && self.space.reserve.fill(run).len == 0;
        (!is_taken).then_some(frame)
    }
}

//! Releases by id: one reference each, and the frames of blocks that had no other.

use smallvec::SmallVec;

use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run, Ticket};
use crate::sync::{AtomicU64, Ordering, Ordering::*};

use crate::block::core::{Core, Custody};
use crate::block::space::FreedFrames;
use crate::block::state::TableView;
use crate::block::thread_cache::Returning;
use crate::block::thread_cache::{CacheRef, CountedRef};
use crate::block::{BlockWord, Blocks, Evictable, INLINE_BLOCKS, Released};

/// The ordering of a release. Release: this owner's use of the bytes happens before the
/// next owner's. Acquire: the last release sees what all other owners did, and every batch that
/// they began.
const RELEASE_ORDER: Ordering = AcqRel;

/// Distance, in blocks, at which a release prefetches words.
const RELEASED_AHEAD: usize = 8;

#[cold]
#[inline(never)]
fn not_the_callers(id: BlockId, word: BlockWord) -> ! {
    let whose = if word.is_free() { "free" } else { "evictable" };
    panic!("block {id} released while {whose}: {word:?}")
}

/// Whether other threads may change the words of a lease's blocks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exposure {
    /// They may: a handle or a second lease of the blocks was given out.
    Shared,
    /// They may not: the release may be [private](crate::block).
    Private,
}

/// What remains to be done after the release of a listed block.
pub(super) enum ListRelease {
    /// There are other references.
    Shared,
    /// It was freed, and its frame is the mover's.
    Left,
    Freed(FrameId),
    Evictable(BlockWord),
}

impl Blocks {
    /// Drops one reference of a lease on each block, in the given order. Blocks without other
    /// references become free, or are retired while a batch is in flight.
    ///
    /// # Panics
    ///
    /// If a block is free: the caller does not own the reference.
    #[inline]
    pub fn release(&self, ids: &[BlockId]) {
        self.release_exposed(ids, Exposure::Shared);
    }

    /// As [`release`](Self::release), for a lease that knows whether the release may be private.
    #[inline]
    pub(crate) fn release_exposed(&self, ids: &[BlockId], exposure: Exposure) {
        if ids.len() <= INLINE_BLOCKS {
            self.release_inline(ids, exposure);
        } else {
            self.with_thread_cache(|cache| self.release_at(cache, ids, exposure));
        }
    }

    /// As [`release`](Self::release), for the block of a lease whose release may be private.
    #[inline]
    pub(crate) fn release_unseen(&self, id: BlockId) {
        match self.release_privately(self.space.table.view(), id) {
            Some(frame) => {
                let cache = self.recent_thread_cache();
                if !self.give_back_one(cache, frame) {
                    self.give_back_frame(cache, frame);
                }
            }
            None => self.release_unseen_slow(id),
        }
    }

    /// As [`release_unseen`](Self::release_unseen), for a block that is sealed or pinned.
    #[cold]
    #[inline(never)]
    fn release_unseen_slow(&self, id: BlockId) {
        self.release_inline(&[id], Exposure::Shared);
    }

    #[cold]
    #[inline(never)]
    fn give_back_frame(&self, cache: Option<CacheRef<'_>>, frame: FrameId) {
        self.give_back_frames(cache, &[frame]);
    }

    /// As [`release`](Self::release), for blocks that were in a sequence's list.
    #[inline]
    pub fn release_listed(&self, ids: &[BlockId]) {
        if self.evictor.is_some() {
            return self.release_cached(ids, |blocks, tag| self.tell_evictor(blocks, tag));
        }
        let mut frames = SmallVec::<[FrameId; INLINE_BLOCKS]>::new();
        for &id in ids {
            if let ListRelease::Freed(frame) = self.release_listed_word(id) {
                frames.push(frame);
            }
        }
        self.count_further(frames.len() as isize);
        let cache = self.recent_thread_cache();
        let is_few = (1..=INLINE_BLOCKS).contains(&frames.len());
        if !(frames.is_empty() || is_few && self.give_back_inline(cache, &frames)) {
            self.give_back_frames(cache, &frames);
        }
    }

    /// As [`release_listed`](Self::release_listed), for callers that tell the evictor themselves.
    ///
    /// `tell` gets the blocks that became evictable, like
    /// [`Evictor::became_evictable`](crate::block::Evictor::became_evictable).
    pub(crate) fn release_cached(&self, ids: &[BlockId], tell: impl FnOnce(&[Evictable], Ticket)) {
        if self.release_silently(ids, tell) {
            self.announce();
        }
    }

    /// As [`release_cached`](Self::release_cached), without an announcement of the blocks that
    /// became evictable. Returns whether there are any: the caller announces them, or has a place
    /// in line, and signals the line.
    pub(crate) fn release_silently(&self, ids: &[BlockId], tell: impl FnOnce(&[Evictable], Ticket)) -> bool {
        let (mut freed, mut evictable) = (RunList::new(), SmallVec::<[Evictable; 64]>::new());
        // Counted before they are evictable, so that a thread that is stopped in between hides
        // none.
        self.count_evictable(ids.len());
        for (i, &id) in ids.iter().enumerate() {
            if let Some(&next) = ids.get(i + RELEASED_AHEAD) {
                self.prefetch_word(next);
            }
            match self.release_listed_word(id) {
                ListRelease::Shared | ListRelease::Left => {}
                ListRelease::Freed(frame) => freed.push(frame),
                ListRelease::Evictable(word) => evictable.push(Evictable { id, word }),
            }
        }
        self.count_not_evictable(ids.len() - evictable.len());
        self.tag_evictable(&evictable, tell);
        if !freed.is_empty() {
            self.count_further(freed.iter().map(|run| run.len as isize).sum());
            // Announces both.
            self.with_thread_cache(|cache| self.give_back(cache, &freed));
            return false;
        }
        !evictable.is_empty()
    }

    /// As [`release_listed`](Self::release_listed), for blocks that were in no table and no list
    /// that another thread reads: no batch has seen them, so their frames are free at once.
    pub(crate) fn release_unpublished(&self, ids: &[BlockId]) {
        let (mut freed, mut count) = (FreedFrames::new(&self.space), 0);
        for &id in ids {
            if let ListRelease::Freed(frame) = self.release_listed_word(id) {
                freed.push(frame);
                count += 1;
            }
        }
        drop(freed);
        self.counters.freed(count);
        self.count_further(count as isize);
        if !ids.is_empty() {
            self.announce();
        }
    }

    #[inline(never)]
    fn release_inline(&self, ids: &[BlockId], exposure: Exposure) {
        let mut frames = [FrameId(0); INLINE_BLOCKS];
        let mut count = 0;
        let mut push = |frame| {
            frames[count] = frame;
            count += 1;
        };
        let table = self.space.table.view();
        // Two loops, each of which keeps in registers what it needs.
        let mut rest = ids.iter();
        if exposure == Exposure::Private {
            while let Some(&id) = rest.as_slice().first()
                && let Some(frame) = self.release_privately(table, id)
            {
                push(frame);
                rest.next();
            }
        }
        for &id in rest {
            if let Some(frame) = self.release_word(table, id, exposure) {
                push(frame);
            }
        }
        let (frames, cache) = (&frames[..count], self.recent_thread_cache());
        if !frames.is_empty() && !self.give_back_inline(cache, frames) {
            self.give_back_frames(cache, frames);
        }
    }

    #[cold]
    #[inline(never)]
    pub(in crate::block) fn give_back_frames(&self, cache: Option<CacheRef<'_>>, frames: &[FrameId]) {
        let mut freed = RunList::new();
        frames.iter().for_each(|&frame| freed.push(frame));
        match cache {
            Some(cache) => cache.counted(|cache| self.give_back(Some(cache), &freed)),
            None => self.with_thread_cache(|cache| self.give_back(cache, &freed)),
        }
    }
}

impl Core {
    fn release_at(&self, cache: Option<CountedRef<'_>>, ids: &[BlockId], exposure: Exposure) {
        let mut freed = RunList::new();
        let table = self.space.table.view();
        for &id in ids {
            if let Some(frame) = self.release_word(table, id, exposure) {
                freed.push(frame);
            }
        }
        self.give_back(cache, &freed);
    }

    /// Drops a reference; returns the frame if it was the last.
    #[inline(always)]
    fn release_word(&self, table: TableView<'_>, id: BlockId, exposure: Exposure) -> Option<FrameId> {
        if exposure == Exposure::Private
            && let Some(frame) = self.release_privately(table, id)
        {
            return Some(frame);
        }
        let atomic = table.row(id).word;
        let word = BlockWord::from_bits(atomic.load(Relaxed));
        match word.release_only() {
            Some(next) if Self::is_released(atomic, word, next) => Some(next.frame()),
            _ => self.release_shared(id),
        }
    }

    /// Drops the only reference, of a lease whose release may be private, and returns the frame.
    /// `None`: nothing was done, take the slow path.
    #[inline(always)]
    fn release_privately(&self, table: TableView<'_>, id: BlockId) -> Option<FrameId> {
        let atomic = table.row(id).word;
        let word = BlockWord::from_bits(atomic.load(Relaxed));
        let next = word.release_private()?;
        // A plain store: see "Private release" in `block`. Release: as in `RELEASE_ORDER`. No
        // Acquire: the block had no other owner since it was allocated, or reopened.
        atomic.store(next.to_bits(), Release);
        Some(next.frame())
    }

    /// Drops the only reference of a block; false if its word has changed.
    #[inline(always)]
    pub(in crate::block) fn is_released(atomic: &AtomicU64, word: BlockWord, next: BlockWord) -> bool {
        atomic.compare_exchange(word.to_bits(), next.to_bits(), RELEASE_ORDER, Relaxed).is_ok()
    }

    /// As [`release_word`](Self::release_word), for a block that has other references, is moving,
    /// or is being changed by another thread.
    #[inline(never)]
    fn release_shared(&self, id: BlockId) -> Option<FrameId> {
        let released = self.drop_reference(id);
        if let Released::Shared(_) = released {
            self.count_further(-1);
        }
        self.released(id, released)
    }

    /// Drops a reference in any state of its block.
    pub(super) fn drop_reference(&self, id: BlockId) -> Released {
        let atomic = self.space.table.word(id);
        let mut word = BlockWord::from_bits(atomic.load(Relaxed));
        loop {
            let released = word.release().unwrap_or_else(|| not_the_callers(id, word));
            match atomic.compare_exchange_weak(
                word.to_bits(),
                released.word().to_bits(),
                RELEASE_ORDER,
                Relaxed,
            ) {
                Ok(_) => return released,
                // Another thread shared, pinned or released in between. Reached by the model
                // `share_release`.
                Err(now) => word = BlockWord::from_bits(now),
            }
        }
    }

    /// Drops a reference on a block of a list, which may be cached. The caller
    /// [counts](Self::count_further) a block that is freed.
    #[inline]
    fn release_listed_word(&self, id: BlockId) -> ListRelease {
        let released = self.release_listed_if(id, |_| true, &mut || ());
        let released = released.unwrap_or_else(|word| not_the_callers(id, word));
        if let ListRelease::Left = released {
            self.count_further(1);
        }
        released
    }

    /// As [`release_listed_word`](Self::release_listed_word), if the word that is replaced passes a
    /// check. `counts` is called before an attempt to make the block evictable.
    ///
    /// # Errors
    ///
    /// The word that has no reference, or failed the check; nothing has changed.
    #[inline]
    pub(super) fn release_listed_if(
        &self,
        id: BlockId,
        is_right: impl Fn(BlockWord) -> bool,
        counts: &mut dyn FnMut(),
    ) -> Result<ListRelease, BlockWord> {
        let atomic = self.space.table.word(id);
        let mut word = BlockWord::from_bits(atomic.load(Relaxed));
        if let Some(next) = word.release_kept().filter(|_| is_right(word)) {
            counts();
            match atomic.compare_exchange(word.to_bits(), next.to_bits(), RELEASE_ORDER, Relaxed) {
                Ok(_) => return Ok(ListRelease::Evictable(next)),
                Err(now) => word = BlockWord::from_bits(now),
            }
        }
        loop {
            if let Some(next) = word.outlived() {
                word = self.outlive(id, word, next);
                continue;
            }
            let released = word.release().filter(|_| is_right(word)).ok_or(word)?;
            if let Released::Evictable { .. } = released {
                counts();
            }
            match atomic.compare_exchange_weak(
                word.to_bits(),
                released.word().to_bits(),
                RELEASE_ORDER,
                Relaxed,
            ) {
                Ok(_) => {
                    if let Released::Evictable { word } = released {
                        return Ok(ListRelease::Evictable(word));
                    }
                    return Ok(match self.released(id, released) {
                        Some(frame) => ListRelease::Freed(frame),
                        None if released.word().is_owned() => ListRelease::Shared,
                        None => ListRelease::Left,
                    });
                }
                // Another thread hit, shared, pinned or released in between. Reached by the models
                // in `evictable`.
                Err(now) => word = BlockWord::from_bits(now),
            }
        }
    }

    fn tell_evictor(&self, blocks: &[Evictable], tag: Ticket) {
        self.evictor.iter().for_each(|evictor| evictor.became_evictable(self, blocks, tag));
    }

    /// Takes back a [hit](Self::hit) whose block proved to hold other contents, before it is
    /// counted.
    #[cold]
    pub(crate) fn give_back_hit(&self, id: BlockId, was_evictable: bool) {
        if !was_evictable {
            // As in `release_cached`.
            self.count_evictable(1);
        }
        match self.release_listed_word(id) {
            ListRelease::Evictable(word) => {
                self.tag_evictable(&[Evictable { id, word }], |blocks, tag| self.tell_evictor(blocks, tag));
            }
            ListRelease::Shared | ListRelease::Left => self.count_not_evictable(1),
            ListRelease::Freed(frame) => {
                self.count_not_evictable(1);
                self.counters.freed(1);
                self.count_further(1);
                self.free_or_retire(&[Run { start: frame, len: 1 }]);
            }
        }
        self.announce();
    }

    /// Uncaches a block of which the caller has the only reference. Returns its current word.
    #[cold]
    fn outlive(&self, id: BlockId, word: BlockWord, next: BlockWord) -> BlockWord {
        let atomic = self.space.table.word(id);
        // Acquire: sees what earlier owners did before they released the block. Release: that
        // happens before the accesses of the block's next owner.
        match atomic.compare_exchange(word.to_bits(), next.to_bits(), AcqRel, Relaxed) {
            Ok(_) => {
                if let Some(evictor) = &self.evictor {
                    evictor.forget(self, id);
                    self.counters.outlived();
                }
                BlockWord::from_bits(atomic.load(Relaxed))
            }
            Err(now) => BlockWord::from_bits(now),
        }
    }

    /// Completes a release: returns the frame, now the caller's, if it was the last reference.
    #[inline]
    pub(in crate::block) fn released(&self, id: BlockId, released: Released) -> Option<FrameId> {
        match released {
            // Only a list's release leaves a block evictable, and it handles that case itself.
            Released::Shared(_) | Released::Evictable { .. } => None,
            Released::Last { word, carry } => {
                if carry {
                    self.space.table.info(id).carry_generation();
                }
                Some(word.frame())
            }
            Released::ToMover { .. } => {
                self.count_left_to_mover();
                None
            }
        }
    }

    /// Counts the frame of a moving block, which its last release left to the mover. Reached by the
    /// models in `moves`.
    #[cold]
    #[inline(never)]
    fn count_left_to_mover(&self) {
        // Relaxed: a statistic.
        self.space.held.fetch_add(1, Relaxed);
        self.counters.freed(1);
    }

    /// Gives back frames of free blocks: to free lists, or to limbo if a batch may still see them.
    /// Announces them.
    #[inline(never)]
    pub(in crate::block) fn give_back(&self, cache: Option<CountedRef<'_>>, runs: &[Run]) {
        if runs.is_empty() {
            return;
        }
        let frames = runs.iter().map(|run| run.len as usize).sum();
        match &cache {
            Some(cache) => cache.counters().freed(frames),
            None => self.counters.freed(frames),
        }
        let _custody = self.custody();
        let word = self.space.clock.read();
        match (word.in_flight() != 0).then(|| word.newest()) {
            None => {
                // Waiting requests find frames sooner in the bitmaps than in a magazine.
                let cached = cache.filter(|_| !word.is_awaited()).and_then(|cache| {
                    cache.enter(|local| {
                        let mut returning = Returning::new(&self.space);
                        runs.iter().for_each(|&run| returning.run(run));
                        returning.finish(&mut local.magazines);
                        local.reclaim(&self.space);
                    })
                });
                if cached.is_none() {
                    runs.iter().for_each(|&run| self.space.free_run(run));
                }
            }
            Some(tag) => {
                let retired = cache.and_then(|cache| {
                    cache.enter(|local| runs.iter().for_each(|&run| local.retire(&self.space, run, tag)))
                });
                if retired.is_none() {
                    // A visitor is inside the thread cache, or the thread has none. Reached by
                    // `a_visited_owner_retires_elsewhere`.
                    runs.iter().for_each(|&run| self.shared_limbo.push(run, tag));
                }
            }
        }
    }

    /// As [`reclaim_shared_limbo`](Self::reclaim_shared_limbo), if a run is probably due; for
    /// frequent callers.
    pub fn reclaim_due_shared_limbo(&self) -> usize {
        let may_be_due = !self.shared_limbo.is_empty() && self.shared_limbo.is_due(self.space.clock.oldest());
        if may_be_due { self.reclaim_shared_limbo() } else { 0 }
    }

    /// Reclaims frames of the shared limbo that no batch sees any more, and returns their number.
    /// They include old frames of moves. Announces them.
    pub fn reclaim_shared_limbo(&self) -> usize {
        if self.shared_limbo.is_empty() {
            return 0;
        }
        self.reclaim_shared_limbo_with(&self.custody())
    }

    /// As [`reclaim_shared_limbo`](Self::reclaim_shared_limbo); the caller's custody announces.
    pub(in crate::block) fn reclaim_shared_limbo_with(&self, custody: &Custody<'_>) -> usize {
        if self.shared_limbo.is_empty() {
            return 0;
        }
        let mut reclaimed = 0;
        self.shared_limbo.reclaim(self.space.clock.oldest(), custody, |run| {
            reclaimed += run.len as usize;
            self.space.free_run(run);
        });
        reclaimed
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use crate::block::{AllocRequest, Blocks, BlocksConfig};
    use crate::ids::DeviceId;

    #[test]
    fn a_visited_owner_retires_elsewhere() {
        let config = BlocksConfig {
            frames: 64,
            frames_max: 64,
            segment_frames: 64,
            magazine_blocks: 8,
            threads: 1,
            has_null_block: false,
            reserve: 0,
            device: DeviceId::Host,
        };
        let blocks = Blocks::new(config, None);
        let mut ids = Vec::new();
        blocks.allocate(&AllocRequest::new(3), &mut |id| ids.push(id)).unwrap();
        let batch = blocks.clock().begin();
        let thread_cache = blocks.thread_caches.iter().next().expect("this thread's");
        thread_cache.visit(|_| blocks.release(&ids)).expect("the owner is outside");
        assert_eq!(blocks.shared_limbo.mirror().0, 3, "not in the thread cache's limbo");
        assert_eq!(blocks.counts().retired, 3);
        blocks.end_batch(batch);
        assert_eq!(blocks.counts().free(), 64);
        blocks.allocate(&AllocRequest::new(64), &mut |_| ()).expect("the shared limbo is reclaimed");
        assert_eq!(blocks.audit().unwrap().owned, 64);
    }
}

//! The path of freed frames: to free lists, or to a retire list while a batch may see them.

use crate::frame::{MagazinePair, RunList};
use crate::ids::{FrameId, Run};

use crate::block::core::{Blocks, Core, WakeGuard};
use crate::block::thread_cache::{CacheRef, CountedRef, INLINE_BLOCKS, Returning};

pub(super) struct Few {
    places: [FrameId; INLINE_BLOCKS],
    len: usize,
}

impl Few {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self { places: [FrameId(0); INLINE_BLOCKS], len: 0 }
    }

    #[inline]
    pub(super) fn frames(&self) -> &[FrameId] {
        &self.places[..self.len]
    }

    /// Releases keys by `fast`, in order, until it declines or no place is left. Returns the rest.
    #[inline(always)]
    pub(super) fn fill<'k, K: Copy>(
        &mut self,
        keys: &'k [K],
        fast: impl Fn(K) -> Option<FrameId>,
    ) -> &'k [K] {
        // A loop that calls nothing keeps its state in registers.
        let mut done = 0;
        for (place, &key) in self.places[self.len..].iter_mut().zip(keys) {
            let Some(frame) = fast(key) else { break };
            *place = frame;
            done += 1;
        }
        self.len += done;
        &keys[done..]
    }

    #[inline(never)]
    pub(super) fn join(&mut self, runs: &mut RunList) {
        self.frames().iter().for_each(|&frame| runs.push(frame));
        self.len = 0;
    }

    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.len == INLINE_BLOCKS
    }
}

impl Blocks {
    /// Gives back the frame of a free block, and announces it.
    #[inline(always)]
    pub(super) fn give_back_one(&self, frame: FrameId) {
        let cache = self.recent_thread_cache();
        if !self.is_pushed(cache, 1, |magazines| magazines.push_loaded(frame)) {
            self.give_back_frames(cache, &[frame]);
        }
    }

    // One function: with a body in each caller, its parts were not inlined, which cost 5 %.
    #[inline(never)]
    pub(super) fn give_back_few(&self, frames: &[FrameId]) {
        if frames.is_empty() {
            return;
        }
        let cache = self.recent_thread_cache();
        let push = |magazines: &mut MagazinePair| match *frames {
            [frame] => magazines.push_loaded(frame),
            _ => magazines.push_all(frames),
        };
        if !self.is_pushed(cache, frames.len(), push) {
            self.give_back_frames(cache, frames);
        }
    }

    /// Pushes free frames to the thread's magazines. Declines, having done nothing, in rare cases:
    /// full magazines, a visitor, a batch, a waiting request, wiping, another pool used last.
    #[inline(always)]
    pub(super) fn is_pushed(
        &self,
        cache: Option<CacheRef<'_>>,
        frames: usize,
        push: impl FnOnce(&mut MagazinePair) -> bool,
    ) -> bool {
        let section = |magazines: &mut MagazinePair| {
            // After the release: every batch that saw the frames is visible to this load. Inside
            // the section: a waiting request encounters us here, or we see that it waits.
            self.space.clock.read().is_quiet() && push(magazines)
        };
        !self.space.wipes()
            && cache.is_some_and(|cache| {
                let is_given = cache.enter_magazines(section) == Some(true);
                if is_given {
                    cache.counters().freed(frames);
                }
                is_given
            })
    }

    #[cold]
    #[inline(never)]
    pub(super) fn give_back_frames(&self, cache: Option<CacheRef<'_>>, frames: &[FrameId]) {
        let mut runs = RunList::new();
        frames.iter().for_each(|&frame| runs.push(frame));
        match cache {
            Some(cache) => cache.counted(|cache| self.give_back(Some(cache), &runs)),
            None => self.give_back_runs(&runs),
        }
    }

    pub(super) fn give_back_runs(&self, runs: &[Run]) {
        self.with_thread_cache(|cache| self.give_back(cache, runs));
    }
}

impl Core {
    /// Gives back and announces frames: to free lists, or while a batch sees them to a retire list.
    pub(super) fn give_back(&self, cache: Option<CountedRef<'_>>, runs: &[Run]) {
        let frames = runs.iter().map(|run| run.len as usize).sum();
        match &cache {
            Some(cache) => cache.counters().freed(frames),
            None => self.counters.freed(frames),
        }
        let _wake_guard = self.wake_guard();
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
                    // Visited, or without a cache. Reached by `a_visited_owner_retires_elsewhere`.
                    runs.iter().for_each(|&run| self.shared_retire_list.push(run, tag));
                }
            }
        }
    }

    /// Like [`reclaim_retired`](Self::reclaim_retired), if a run is probably due.
    pub fn reclaim_due_retired(&self) -> usize {
        let may_be_due =
            !self.shared_retire_list.is_empty() && self.shared_retire_list.is_due(self.space.clock.oldest());
        if may_be_due { self.reclaim_retired() } else { 0 }
    }

    /// Reclaims and announces due frames of the shared retire list; returns their number.
    pub fn reclaim_retired(&self) -> usize {
        if self.shared_retire_list.is_empty() {
            return 0;
        }
        self.reclaim_retired_with(&self.wake_guard())
    }

    pub(in crate::block) fn reclaim_retired_with(&self, wake_guard: &WakeGuard<'_>) -> usize {
        if self.shared_retire_list.is_empty() {
            return 0;
        }
        let mut reclaimed = 0;
        self.shared_retire_list.reclaim(self.space.clock.oldest(), wake_guard, |run| {
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
            run_frames: 0,
            device: DeviceId::Host,
        };
        let blocks = Blocks::new(config, None);
        let mut ids = Vec::new();
        blocks.allocate(&AllocRequest::new(3), &mut |id| ids.push(id)).unwrap();
        let batch = blocks.clock().begin();
        let thread_cache = blocks.thread_caches.iter().next().expect("this thread's");
        thread_cache.visit(|_| blocks.release(&ids)).expect("the owner is outside");
        assert_eq!(blocks.shared_retire_list.mirror().0, 3, "not in the thread cache's retire list");
        assert_eq!(blocks.counts().retired, 3);
        blocks.end_batch(batch);
        assert_eq!(blocks.counts().free(), 64);
        blocks.allocate(&AllocRequest::new(64), &mut |_| ()).expect("the shared retire list is reclaimed");
        assert_eq!(blocks.audit().unwrap().owned, 64);
    }
}

//! Thread caches: a thread's magazines and its limbo, in a cell that others may visit when the thread is idle or dead.
//!
//! Thread caches stand in a list that only grows; the thread cache of a thread that has ended is taken over by the next new thread.
//! Who lives in one is [`CacheHandle`](super::CacheHandle)'s matter.

use std::cell::Cell;
use std::ptr;

use crate::batch::Limbo;
use crate::frame::{MagazinePair, OwnerCell, Visits};
use crate::ids::{FrameId, Run, Ticket};
use crate::sync::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, CachePadded, Ordering::*, thread_local_const,
};

use super::blocks::Core;
use super::custody::Custody;
use super::release::Returning;

/// Retired frames between two looks at which batches have ended.
const RECLAIM_EVERY: usize = if cfg!(kvpool_loom) { 1 } else { 64 };

/// What is in a thread cache's cell.
pub(super) struct Local {
    pub(super) magazines: MagazinePair,
    pub(super) limbo: Limbo,
    newest_tag: Ticket,
    reclaim_at: usize,
}

impl Local {
    fn new(capacity: usize, near: FrameId) -> Self {
        let limbo = Limbo::default();
        Self {
            magazines: MagazinePair::new(capacity, near),
            limbo,
            newest_tag: Ticket(0),
            reclaim_at: RECLAIM_EVERY,
        }
    }

    /// Puts a run aside, and now and then gives back those that no batch sees any more.
    pub(super) fn retire(&mut self, core: &Core, run: Run, tag: Ticket) {
        self.limbo.retire(run, tag);
        self.newest_tag = self.newest_tag.max(tag);
        if self.limbo.len() >= self.reclaim_at {
            self.reclaim(core);
        }
    }

    /// Gives back what no batch sees any more: long runs to the bitmaps, single frames to the magazines.
    pub(super) fn reclaim(&mut self, core: &Core) {
        if self.limbo.is_empty() {
            return;
        }
        let Self { magazines, limbo, .. } = self;
        let mut returning = Returning::new(core);
        limbo.reclaim(core.clock.oldest(), |run| returning.run(run));
        returning.finish(magazines);
        self.reclaim_at = self.limbo.len() + RECLAIM_EVERY;
    }

    /// Gives everything that is free back to the bitmaps, where others find it; how many frames that were.
    pub(super) fn surrender(&mut self, core: &Core, _: &Custody<'_>) -> usize {
        let before = self.magazines.len() + self.limbo.len();
        self.limbo.reclaim(core.clock.oldest(), |run| core.free_run(run));
        self.reclaim_at = self.limbo.len() + RECLAIM_EVERY;
        self.magazines.flush(&core.frames);
        before - self.limbo.len()
    }
}

/// A place for one thread at a time.
pub(super) struct ThreadCache {
    cell: OwnerCell<Local>,
    taken: AtomicBool,
    /// Mirrors of the cell's contents, for those who count.
    cached: AtomicU32,
    retired: AtomicU32,
    newest_tag: AtomicU64,
    next: *const CachePadded<ThreadCache>,
}

// SAFETY: `next` is written before the thread cache is published and points to a thread cache of the same list, which lives as long.
unsafe impl Sync for ThreadCache {}
// SAFETY: as above.
unsafe impl Send for ThreadCache {}

impl ThreadCache {
    /// Runs `f` on the contents unless the owner is inside. Any thread.
    pub(super) fn visit<R>(&self, f: impl FnOnce(&mut Local) -> R) -> Option<R> {
        self.cell.visit(|local| self.mirrored(local, f))
    }

    /// As [`visit`](Self::visit), of many.
    pub(super) fn visit_all<'a>(
        thread_caches: impl Iterator<Item = &'a Self>,
        mut f: impl FnMut(&mut Local),
    ) -> Visits {
        OwnerCell::visit_all(
            thread_caches,
            |thread_cache| &thread_cache.cell,
            |thread_cache, local| thread_cache.mirrored(local, &mut f),
        )
    }

    /// Frames in magazines, frames retired, and the newest tag of these.
    pub(super) fn mirror(&self) -> (usize, usize, Ticket) {
        // Relaxed: statistics.
        let tag = Ticket(self.newest_tag.load(Relaxed));
        (self.cached.load(Relaxed) as usize, self.retired.load(Relaxed) as usize, tag)
    }

    #[inline]
    fn mirrored<R>(&self, local: &mut Local, f: impl FnOnce(&mut Local) -> R) -> R {
        let result = f(local);
        self.cached.store(local.magazines.len() as u32, Relaxed);
        if !local.limbo.is_empty() || self.retired.load(Relaxed) != 0 {
            self.retired.store(local.limbo.len() as u32, Relaxed);
            self.newest_tag.store(local.newest_tag.0, Relaxed);
        }
        result
    }
}

/// A thread cache that the current thread owns for the moment: for a step that runs nobody else's code.
#[derive(Clone, Copy)]
pub(super) struct CacheRef<'a>(&'a ThreadCache);

/// A thread cache that stays the thread's while a user's code runs further down the stack: a storage that wipes frames, a policy
/// that is asked for a victim, a waker. See [`CacheRef::counted`].
#[derive(Clone, Copy)]
pub(super) struct CountedRef<'a>(CacheRef<'a>);

impl<'a> CacheRef<'a> {
    /// # Safety
    ///
    /// The caller owns the thread cache, for as long as the thread cache is used.
    #[inline]
    pub(super) unsafe fn new(thread_cache: &'a ThreadCache) -> Self {
        Self(thread_cache)
    }

    /// The owner moves out; the next thread may move in.
    pub(super) fn leave(self) {
        // Release: pairs with the Acquire in `ThreadCaches::take`.
        self.0.taken.store(false, Release);
    }

    /// The thread cache for a longer way, on which a user's code may run. Until `f` returns, the thread gives up no thread cache.
    #[inline]
    pub(super) fn counted<R>(self, f: impl FnOnce(CountedRef<'_>) -> R) -> R {
        let _counted = ThreadUses::count();
        f(CountedRef(self))
    }

    /// Runs `f`, which runs nobody else's code, on the magazines, unless a visitor has them: then the caller goes without.
    #[inline]
    pub(super) fn enter_magazines<R>(self, f: impl FnOnce(&mut MagazinePair) -> R) -> Option<R> {
        let section = |local: &mut Local| {
            let result = f(&mut local.magazines);
            self.0.cached.store(local.magazines.len() as u32, Relaxed);
            result
        };
        // SAFETY: a reference to a thread cache is made for the thread cache's owner, and is not `Send`.
        unsafe { self.0.cell.enter(section) }
    }
}

impl CountedRef<'_> {
    /// Runs `f` on the contents, unless a visitor has them: then the caller goes without.
    #[inline]
    pub(super) fn enter<R>(self, f: impl FnOnce(&mut Local) -> R) -> Option<R> {
        let thread_cache = self.0.0;
        // SAFETY: as in `CacheRef::enter_magazines`.
        unsafe { thread_cache.cell.enter(|local| thread_cache.mirrored(local, f)) }
    }
}

thread_local_const! {
    /// [Counted](CountedRef) calls that the thread is in.
    static USES: Cell<usize> = Cell::new(0);
}

/// Counts a counted call of the thread for as long as it lives.
pub(super) struct ThreadUses;

impl ThreadUses {
    #[inline]
    fn count() -> Self {
        // A thread that is past having locals gives up no thread cache either.
        let _ = USES.try_with(|calls| calls.set(calls.get() + 1));
        Self
    }

    /// Whether the thread is in no counted call: it is about to use none of its thread caches.
    pub(super) fn is_out() -> bool {
        USES.try_with(|calls| calls.get() == 0).unwrap_or(false)
    }
}

impl Drop for ThreadUses {
    #[inline]
    fn drop(&mut self) {
        let _ = USES.try_with(|calls| calls.set(calls.get() - 1));
    }
}

/// All thread caches of a pool: a list that only grows.
#[derive(Default)]
pub(super) struct ThreadCaches {
    head: AtomicPtr<CachePadded<ThreadCache>>,
    count: AtomicUsize,
}

impl ThreadCaches {
    pub(super) fn iter(&self) -> impl Iterator<Item = &ThreadCache> {
        // SAFETY: published thread caches live as long as the list. Acquire: pairs with the Release in `take`.
        let mut next = unsafe { self.head.load(Acquire).as_ref() };
        std::iter::from_fn(move || {
            let thread_cache: &ThreadCache = next?;
            // SAFETY: as above; `next` was written before the thread cache was published.
            next = unsafe { thread_cache.next.as_ref() };
            Some(thread_cache)
        })
    }

    /// Thread caches that somebody lives in.
    pub(super) fn taken(&self) -> usize {
        // Acquire: pairs with the Release of those that left, so that what they left behind is seen.
        self.iter().filter(|thread_cache| thread_cache.taken.load(Acquire)).count()
    }

    /// A thread cache for a new thread: one whose thread has left, or a new one.
    pub(super) fn take(&self, core: &Core) -> &ThreadCache {
        // Acquire: pairs with the Release of the thread that left.
        let left = self.iter().find(|thread_cache| {
            !thread_cache.taken.load(Relaxed)
                && thread_cache.taken.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        });
        if let Some(thread_cache) = left {
            return thread_cache;
        }
        let index = self.count.fetch_add(1, Relaxed);
        let mut thread_cache = Box::new(CachePadded::new(ThreadCache {
            cell: OwnerCell::new(Local::new(core.config.magazine_blocks, core.shard(index))),
            taken: AtomicBool::new(true),
            cached: AtomicU32::new(0),
            retired: AtomicU32::new(0),
            newest_tag: AtomicU64::new(0),
            next: ptr::null(),
        }));
        let mut head = self.head.load(Relaxed);
        loop {
            thread_cache.next = head;
            let fresh = Box::into_raw(thread_cache);
            // Release: publishes the thread cache. Relaxed on failure: nothing of the other's thread cache is read but its address.
            match self.head.compare_exchange(head, fresh, Release, Relaxed) {
                // SAFETY: published just now.
                Ok(_) => return unsafe { &*fresh },
                Err(now) => {
                    head = now;
                    // SAFETY: not published; ours.
                    thread_cache = unsafe { Box::from_raw(fresh) };
                }
            }
        }
    }
}

impl Drop for ThreadCaches {
    fn drop(&mut self) {
        let mut next = self.head.load(Relaxed).cast_const();
        while !next.is_null() {
            // SAFETY: nobody has the list any more; each thread cache was made by `Box::into_raw` and is freed once.
            let thread_cache = unsafe { Box::from_raw(next.cast_mut()) };
            next = thread_cache.next;
        }
    }
}

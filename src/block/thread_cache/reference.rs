//! References by which a thread enters its own thread cache.

use std::cell::Cell;

use crate::frame::MagazinePair;
use crate::sync::{Ordering::*, thread_local_const};

use super::cell::ThreadCache;
use super::local::Local;

/// A thread cache that the current thread owns for the moment: for a step that runs nobody else's code.
#[derive(Clone, Copy)]
pub(in crate::block) struct CacheRef<'a>(&'a ThreadCache);

/// A thread cache that stays the thread's while a user's code runs further down the stack: a storage that wipes frames, a policy
/// that is asked for a victim, a waker. See [`CacheRef::counted`].
#[derive(Clone, Copy)]
pub(in crate::block) struct CountedRef<'a>(CacheRef<'a>);

impl<'a> CacheRef<'a> {
    /// # Safety
    ///
    /// The caller owns the thread cache, for as long as the thread cache is used.
    #[inline]
    pub(in crate::block) unsafe fn new(thread_cache: &'a ThreadCache) -> Self {
        Self(thread_cache)
    }

    /// The owner moves out; the next thread may move in.
    pub(in crate::block) fn leave(self) {
        // Release: pairs with the Acquire in `ThreadCaches::take`.
        self.0.taken.store(false, Release);
    }

    /// The thread cache for a longer way, on which a user's code may run. Until `f` returns, the thread gives up no thread cache.
    #[inline]
    pub(in crate::block) fn counted<R>(self, f: impl FnOnce(CountedRef<'_>) -> R) -> R {
        let _counted = ThreadUses::count();
        f(CountedRef(self))
    }

    /// Runs `f`, which runs nobody else's code, on the magazines, unless a visitor has them: then the caller goes without.
    #[inline]
    pub(in crate::block) fn enter_magazines<R>(self, f: impl FnOnce(&mut MagazinePair) -> R) -> Option<R> {
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
    pub(in crate::block) fn enter<R>(self, f: impl FnOnce(&mut Local) -> R) -> Option<R> {
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
pub(in crate::block) struct ThreadUses;

impl ThreadUses {
    #[inline]
    fn count() -> Self {
        // A thread that is past having locals gives up no thread cache either.
        let _ = USES.try_with(|calls| calls.set(calls.get() + 1));
        Self
    }

    /// Whether the thread is in no counted call: it is about to use none of its thread caches.
    pub(in crate::block) fn is_out() -> bool {
        USES.try_with(|calls| calls.get() == 0).unwrap_or(false)
    }
}

impl Drop for ThreadUses {
    #[inline]
    fn drop(&mut self) {
        let _ = USES.try_with(|calls| calls.set(calls.get() - 1));
    }
}

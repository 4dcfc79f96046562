//! References by which a thread enters its own thread cache.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::frame::MagazinePair;
use crate::sync::{Ordering::*, thread_local_const};

use super::cell::ThreadCache;
use super::local::Local;
use crate::block::state::OwnCounters;

/// The right to enter one's own thread cache for a step that runs no user code. Not `Send`.
#[derive(Clone, Copy)]
pub(in crate::block) struct CacheRef<'a>(&'a ThreadCache, PhantomData<*const ()>);

/// The right to enter one's own thread cache while user code may run further down the stack.
#[derive(Clone, Copy)]
pub(in crate::block) struct CountedRef<'a>(CacheRef<'a>);

impl<'a> CacheRef<'a> {
    /// # Safety
    ///
    /// The caller must own the thread cache for as long as the reference is used.
    #[inline]
    pub(in crate::block) unsafe fn new(thread_cache: &'a ThreadCache) -> Self {
        Self(thread_cache, PhantomData)
    }

    #[inline(always)]
    pub(in crate::block) fn counters(self) -> &'a OwnCounters {
        &self.0.counters
    }

    pub(in crate::block) fn leave(self) {
        // Release: pairs with the Acquire in `ThreadCaches::take`.
        self.0.in_use.store(false, Release);
    }

    /// Runs `f`, which may run user code. Until it returns, the thread gives up no thread cache.
    #[inline]
    pub(in crate::block) fn counted<R>(self, f: impl FnOnce(CountedRef<'_>) -> R) -> R {
        let _counted = ThreadUses::count();
        f(CountedRef(self))
    }

    /// Runs `f`, which must not run user code, on the magazines. `None` if a visitor is inside.
    #[inline]
    pub(in crate::block) fn enter_magazines<R>(self, f: impl FnOnce(&mut MagazinePair) -> R) -> Option<R> {
        let section = |local: &mut Local| {
            let result = f(&mut local.magazines);
            self.0.cached.store(local.magazines.len() as u32, Relaxed);
            result
        };
        // SAFETY: a `CacheRef` is only made for the thread cache's owner, and is not `Send`.
        unsafe { self.0.cell.enter(section) }
    }
}

impl CountedRef<'_> {
    #[inline]
    pub(in crate::block) fn counters(&self) -> &OwnCounters {
        self.0.counters()
    }

    #[inline]
    pub(in crate::block) fn enter<R>(self, f: impl FnOnce(&mut Local) -> R) -> Option<R> {
        let thread_cache = self.0.0;
        // SAFETY: as in `CacheRef::enter_magazines`.
        unsafe { thread_cache.cell.enter(|local| thread_cache.mirrored(local, f)) }
    }
}

thread_local_const! {
    static USES: Cell<usize> = Cell::new(0);
}

pub(in crate::block) struct ThreadUses;

impl ThreadUses {
    #[inline]
    fn count() -> Self {
        // A thread whose locals are destroyed gives up no thread cache either.
        let _ = USES.try_with(|calls| calls.set(calls.get() + 1));
        Self
    }

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

//! Cache handles: how a thread finds its thread cache, through a thread-local.
//!
//! ```text
//! Lease ── Arc<KeepAlive> ── Blocks ── thread caches           thread-local ── CacheHandle ── Arc<KeepAlive>
//! ```
//!
//! An owned lease keeps the blocks' metadata alive through its thread's [`KeepAlive`], whose count
//! only that thread's leases change: an `Arc` of the pool per lease would contend. The thread-local
//! never keeps the storage alive; it drops its cache handle when the thread ends, or opens a cache
//! in another pool after this one was closed.
//!
//! The slow paths run user code, which may drop the last reference to the pool and open a cache in
//! another one. If the thread then gave up its cache here, two threads could enter one cell. So a
//! thread gives up caches only outside of [counted](CacheRef::counted) calls.

use std::cell::{Cell, RefCell};
use std::ptr;

use crate::sync::{Arc, thread_local, thread_local_const};

use super::core::{Blocks, Core};
use super::thread_cache::{CacheRef, CountedRef, ThreadCache, ThreadUses};

/// Keeps a pool's blocks alive for the leases of one thread, the only user of this reference count.
pub struct KeepAlive(Blocks);

impl KeepAlive {
    /// Returns the blocks.
    #[inline]
    pub fn blocks(&self) -> &Blocks {
        &self.0
    }
}

struct CacheHandle {
    keep_alive: Arc<KeepAlive>,
    thread_cache: *const ThreadCache,
}

impl CacheHandle {
    fn new(blocks: &Blocks) -> Self {
        let keep_alive = Arc::new(KeepAlive(blocks.clone()));
        let thread_cache: *const ThreadCache =
            blocks.thread_caches.take(blocks.config.magazine_blocks, |index| blocks.shard(index));
        Self { keep_alive, thread_cache }
    }

    #[inline]
    fn cache(&self) -> CacheRef<'_> {
        // SAFETY: the thread cache lives as long as the blocks, which the keep-alive keeps alive.
        unsafe { CacheRef::new(&*self.thread_cache) }
    }

    fn flush(&self) {
        let core: &Core = &self.keep_alive.0;
        // A search that has read the bitmaps may miss frames that move there.
        let wake_guard = core.wake_guard();
        // A visitor that is inside empties it itself.
        self.cache().counted(|cache| cache.enter(|local| local.surrender(&core.space, &wake_guard)));
    }
}

impl Drop for CacheHandle {
    fn drop(&mut self) {
        self.flush();
        self.cache().leave();
    }
}

type Recent = (*const Core, *const ThreadCache, *const KeepAlive);
const NOWHERE: Recent = (ptr::null(), ptr::null(), ptr::null());

thread_local_const! {
    /// Without a destructor, so that reading it costs one load, also while the thread ends.
    static RECENT: Cell<Recent> = Cell::new(NOWHERE);
}

thread_local! {
    static CACHE_HANDLES: RefCell<CacheHandles> = RefCell::new(CacheHandles::default());
}

#[derive(Default)]
struct CacheHandles(Vec<CacheHandle>);

impl Drop for CacheHandles {
    fn drop(&mut self) {
        // Frames freed by the thread's remaining destructors go to the bitmaps directly.
        let _ = RECENT.try_with(|recent| recent.set(NOWHERE));
    }
}

impl Blocks {
    /// Calls `f` with the thread's cache, or with `None` if its locals are destroyed.
    #[inline]
    pub(super) fn with_thread_cache<R>(&self, f: impl FnOnce(Option<CountedRef<'_>>) -> R) -> R {
        match self.thread_entry() {
            Some((_, thread_cache, _)) => {
                // SAFETY: the thread's list keeps the pool alive, and the thread cache is this
                // thread's until it is given up, which does not happen while we are counted.
                unsafe { CacheRef::new(&*thread_cache) }.counted(|cache| f(Some(cache)))
            }
            None => f(None),
        }
    }

    /// Returns the thread's keep-alive, or a fresh one if its locals are destroyed.
    #[inline]
    pub(crate) fn keep_alive(&self) -> Arc<KeepAlive> {
        match self.thread_entry() {
            Some((_, _, keep_alive)) => {
                // SAFETY: the pointer came from `Arc::as_ptr`; the thread's list holds a reference.
                unsafe {
                    Arc::increment_strong_count(keep_alive);
                    Arc::from_raw(keep_alive)
                }
            }
            None => Arc::new(KeepAlive(self.clone())),
        }
    }

    #[inline]
    fn thread_entry(&self) -> Option<Recent> {
        let recent = RECENT.try_with(Cell::get).ok()?;
        if recent.0 == self.core_ptr() { Some(recent) } else { self.thread_entry_slow() }
    }

    #[cold]
    #[inline(never)]
    fn thread_entry_slow(&self) -> Option<Recent> {
        CACHE_HANDLES
            .try_with(|handles| {
                let handles = &mut handles.try_borrow_mut().ok()?.0;
                // No address is reused while the list holds its pool, so no entry can be mistaken.
                let known = handles.iter().position(|at| at.keep_alive.0.core_ptr() == self.core_ptr());
                let at = known.unwrap_or_else(|| {
                    // The pool used last may be dropped here, and its address reused.
                    RECENT.with(|recent| recent.set(NOWHERE));
                    // Reached by `no_users_code_takes_a_thread_cache_from_under_its_thread`.
                    if ThreadUses::is_out() {
                        handles.retain(|at| !at.keep_alive.0.is_closed());
                    }
                    handles.push(CacheHandle::new(self));
                    handles.len() - 1
                });
                let at = &handles[at];
                let recent = (self.core_ptr(), at.thread_cache, Arc::as_ptr(&at.keep_alive));
                RECENT.with(|cell| cell.set(recent));
                Some(recent)
            })
            .ok()?
    }
}

impl Core {
    /// Returns the thread's cache if it used this pool last; for a step that runs no user code.
    #[inline]
    pub(super) fn recent_thread_cache(&self) -> Option<CacheRef<'_>> {
        let (pool, thread_cache, _) = RECENT.try_with(Cell::get).ok()?;
        // SAFETY: as in `with_thread_cache`; no cache is given up before other code runs.
        ptr::eq(pool, self).then(|| unsafe { CacheRef::new(&*thread_cache) })
    }

    #[inline]
    pub(crate) fn count_further(&self, references: isize) {
        match self.recent_thread_cache() {
            _ if references == 0 => {}
            Some(cache) => cache.counters().further(references),
            None => self.counters.further(references),
        }
    }
}

/// Returns the thread's magazines to their pools; for a thread that is about to park for long.
pub fn flush_thread() {
    let _ = CACHE_HANDLES.try_with(|handles| {
        let Ok(handles) = handles.try_borrow() else { return };
        for at in handles.0.iter() {
            at.flush();
        }
    });
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;

//! A thread cache's cell, and the list of all thread caches of a pool, which only grows.

use std::ptr;

use crate::frame::{OwnerCell, Visits};
use crate::ids::{FrameId, Ticket};
use crate::sync::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, CachePadded, Ordering::*};

use super::local::Local;
use crate::block::state::OwnCounters;

pub(in crate::block) struct ThreadCache {
    pub(super) cell: OwnerCell<Local>,
    pub(super) in_use: AtomicBool,
    pub(super) cached: AtomicU32,
    retired: AtomicU32,
    newest_tag: AtomicU64,
    pub(in crate::block) counters: OwnCounters,
    next: *const CachePadded<ThreadCache>,
}

// SAFETY: `next` is written before the thread cache is published, and points to a thread cache of
// the same list, which lives as long.
unsafe impl Sync for ThreadCache {}
// SAFETY: as above.
unsafe impl Send for ThreadCache {}

impl ThreadCache {
    pub(in crate::block) fn visit<R>(&self, f: impl FnOnce(&mut Local) -> R) -> Option<R> {
        self.cell.visit(|local| self.mirrored(local, f))
    }

    pub(in crate::block) fn visit_all<'a>(
        thread_caches: impl Iterator<Item = &'a Self>,
        mut f: impl FnMut(&mut Local),
    ) -> Visits {
        OwnerCell::visit_all(
            thread_caches,
            |thread_cache| &thread_cache.cell,
            |thread_cache, local| thread_cache.mirrored(local, &mut f),
        )
    }

    /// Returns the frames in magazines, the retired frames, and the newest tag of the latter.
    pub(in crate::block) fn mirror(&self) -> (usize, usize, Ticket) {
        // Relaxed: statistics.
        let tag = Ticket(self.newest_tag.load(Relaxed));
        (self.cached.load(Relaxed) as usize, self.retired.load(Relaxed) as usize, tag)
    }

    #[inline]
    pub(super) fn mirrored<R>(&self, local: &mut Local, f: impl FnOnce(&mut Local) -> R) -> R {
        let result = f(local);
        self.cached.store(local.magazines.len() as u32, Relaxed);
        if !local.retire_list.is_empty() || self.retired.load(Relaxed) != 0 {
            self.retired.store(local.retire_list.len() as u32, Relaxed);
            self.newest_tag.store(local.newest_tag.0, Relaxed);
        }
        result
    }
}

#[derive(Default)]
pub(in crate::block) struct ThreadCaches {
    head: AtomicPtr<CachePadded<ThreadCache>>,
    count: AtomicUsize,
}

impl ThreadCaches {
    pub(in crate::block) fn iter(&self) -> impl Iterator<Item = &ThreadCache> {
        // SAFETY: published caches live as long as the list. Acquire: pairs with `take`'s Release.
        let mut next = unsafe { self.head.load(Acquire).as_ref() };
        std::iter::from_fn(move || {
            let thread_cache: &ThreadCache = next?;
            // SAFETY: as above; `next` was written before the thread cache was published.
            next = unsafe { thread_cache.next.as_ref() };
            Some(thread_cache)
        })
    }

    pub(in crate::block) fn in_use(&self) -> usize {
        // Acquire: pairs with the Release of owners that left: the caches' contents are visible.
        self.iter().filter(|thread_cache| thread_cache.in_use.load(Acquire)).count()
    }

    pub(in crate::block) fn take(
        &self,
        capacity: usize,
        near: impl FnOnce(usize) -> FrameId,
    ) -> &ThreadCache {
        // Acquire: pairs with the Release of the owner that left.
        let left = self.iter().find(|thread_cache| {
            !thread_cache.in_use.load(Relaxed)
                && thread_cache.in_use.compare_exchange(false, true, Acquire, Relaxed).is_ok()
        });
        if let Some(thread_cache) = left {
            return thread_cache;
        }
        let index = self.count.fetch_add(1, Relaxed);
        let mut thread_cache = Box::new(CachePadded::new(ThreadCache {
            cell: OwnerCell::new(Local::new(capacity, near(index))),
            in_use: AtomicBool::new(true),
            cached: AtomicU32::new(0),
            retired: AtomicU32::new(0),
            newest_tag: AtomicU64::new(0),
            counters: OwnCounters::default(),
            next: ptr::null(),
        }));
        let mut head = self.head.load(Relaxed);
        loop {
            thread_cache.next = head;
            let fresh = Box::into_raw(thread_cache);
            // Release: publishes the cache. Relaxed on failure: uses only the other head's address.
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
            // SAFETY: the list is exclusively ours; made by `Box::into_raw` and freed once.
            let thread_cache = unsafe { Box::from_raw(next.cast_mut()) };
            next = thread_cache.next;
        }
    }
}

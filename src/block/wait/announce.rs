//! Announcements to waiting requests, ends of batches, and maintenance of the queue.

use std::cmp::Reverse;
use std::time::Duration;

use crate::clock::InFlight;
use crate::error::{AllocError, HeadOfLine};
use crate::sync::{Ordering::*, fence, light_fence};

use crate::block::core::Core;
use crate::block::request::{AllocRequest, Priority};
use crate::block::space::Announce;
use crate::block::state::WaitQueue;
use crate::block::thread_cache::ThreadCache;

impl Announce for Core {
    #[inline]
    fn announce(&self) {
        self.announce();
    }
}

impl Core {
    /// Announces blocks. Must be called once they, or frames in transit, are in reach of searches.
    #[inline]
    pub fn announce(&self) {
        // Pairs with the heavy fence of a waiting request: it finds the blocks, or we see it.
        light_fence();
        if self.space.clock.read().is_awaited() {
            self.notify();
        }
    }

    /// Marks the device as failed: refuses every request, including waiting ones.
    pub fn poison(&self) {
        let awaited = self.space.clock.lose();
        if awaited {
            self.notify();
        }
    }

    /// Returns whether the pool's device has failed.
    pub fn is_lost(&self) -> bool {
        self.space.clock.read().is_lost()
    }

    /// Begins a batch. Its slot may stand for older tickets at first, and withhold frames that no
    /// batch sees, so a request that searched then is signalled again. Panics if 65,536 are in
    /// flight.
    pub fn begin_batch(&self) -> InFlight {
        let batch = self.space.clock.begin();
        self.announce();
        batch
    }

    /// Ends a batch, and announces the frames that it withheld. Panics if it is of another pool.
    pub fn end_batch(&self, batch: InFlight) {
        if self.space.clock.end(batch) {
            self.notify();
        }
    }

    /// Returns whether a request waits for blocks, or the reserve is short.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        self.space.clock.read().is_awaited()
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.waiters.count()
    }

    pub(crate) fn waiting_by_priority(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        if self.waiting() > 0 {
            self.with_wait_queue(|queue| {
                let keys = queue.places.keys().chain(queue.passed.keys());
                keys.for_each(|&(Reverse(priority), ..)| counts[priority as usize] += 1);
            });
        }
        counts
    }

    pub(crate) fn set_turn_patience(&self, patience: Duration) {
        let nanos = u64::try_from(patience.as_nanos()).unwrap_or(u64::MAX);
        self.waiters.patience.store(nanos, Relaxed);
    }

    pub(crate) fn turn_patience(&self) -> Duration {
        match self.waiters.patience.load(Relaxed) {
            u64::MAX => Duration::MAX,
            nanos => Duration::from_nanos(nanos),
        }
    }

    /// Returns the request that is first in the queue, even if it was passed over.
    pub fn head_of_line(&self) -> Option<HeadOfLine> {
        self.first_waiting().map(|(_, head)| head)
    }

    pub(crate) fn first_waiting(&self) -> Option<(u64, HeadOfLine)> {
        if self.waiting() == 0 {
            return None;
        }
        self.with_wait_queue(|queue| {
            let firsts = [queue.places.first_key_value(), queue.passed.first_key_value()];
            let (&(Reverse(priority), _, number), place) =
                firsts.into_iter().flatten().min_by_key(|&(&key, _)| key)?;
            let unpolled = place.absent.map(|absence| absence.since.elapsed());
            Some((number, HeadOfLine::new(priority, place.asked, place.entered.elapsed(), unpolled)))
        })
    }

    /// Refuses a request that does not wait while one of higher priority waits and is not absent.
    #[inline]
    pub(in crate::block) fn check_turn(&self, request: &AllocRequest) -> Result<(), AllocError> {
        if !self.is_awaited() { Ok(()) } else { self.check_queue(request, |other| other > request.priority) }
    }

    #[cold]
    fn check_queue(
        &self,
        request: &AllocRequest,
        comes_first: impl Fn(Priority) -> bool,
    ) -> Result<(), AllocError> {
        let Some(waiting) = self.waiters.highest().filter(|&highest| comes_first(highest)) else {
            return Ok(());
        };
        if let Some(queue) = self.waiters.try_lock() {
            let is_behind = queue.is_behind(comes_first);
            drop(queue);
            self.deliver();
            if !is_behind {
                return Ok(());
            }
        }
        Err(self.behind(request, waiting))
    }

    #[cold]
    fn behind(&self, request: &AllocRequest, waiting: Priority) -> AllocError {
        let counts = self.counts();
        let reserved = if waiting == Priority::Urgent { counts.reserved } else { 0 };
        let most = counts.free() + counts.evictable + counts.retired + counts.held + reserved;
        // Relaxed: as for `highest`.
        let lacking = self.waiters.asked.load(Relaxed).saturating_sub(most);
        let error =
            AllocError::Behind { asked: request.blocks, priority: request.priority, waiting, lacking };
        self.counters.refused(&error);
        error
    }

    /// Like [`check_turn`](Self::check_turn), but also while one of the same priority waits.
    pub(crate) fn check_is_first(&self, request: &AllocRequest) -> Result<(), AllocError> {
        if !self.is_awaited() { Ok(()) } else { self.check_queue(request, |other| other >= request.priority) }
    }

    /// Returns the number of requests that were passed over and not polled since.
    pub fn passed_over(&self) -> usize {
        if self.waiting() == 0 { 0 } else { self.with_wait_queue(|queue| queue.passed.len()) }
    }

    /// Passes over a head that was woken and is not polled; for callers that run regularly.
    pub(crate) fn look_after_queue(&self) {
        if self.waiting() > 1 {
            let woken = self.with_wait_queue(|queue| {
                if queue.pass_over() { queue.wake_head(self.turn_patience()) } else { None }
            });
            woken.into_iter().for_each(crate::sync::wake);
        }
    }

    #[cold]
    #[inline(never)]
    fn notify(&self) {
        self.space.top_up();
        if self.space.reserve.is_short() {
            self.reclaim_for_reserve();
        }
        // Release: pairs with the Acquire in `deliver`. A swap continues others' release sequences.
        self.waiters.pending.swap(true, Release);
        self.deliver();
    }

    /// Reclaims frames that no batch sees from retire lists, whose threads may be idle or gone, while
    /// the reserve is short. The caller announces them.
    #[cold]
    fn reclaim_for_reserve(&self) {
        let oldest = self.space.clock.oldest();
        let is_due = |cache: &&ThreadCache| {
            let (_, retired, newest) = cache.mirror();
            retired > 0 && newest < oldest
        };
        let is_shared_due = !self.shared_retire_list.is_empty() && self.shared_retire_list.is_due(oldest);
        if !is_shared_due && !self.thread_caches.iter().any(|cache| is_due(&cache)) {
            return;
        }
        let wake_guard = self.wake_guard();
        self.reclaim_retired_with(&wake_guard);
        // An owner that is inside is about to free frames, or to search for some.
        let is_due = |cache: &&ThreadCache| self.space.reserve.is_short() && is_due(cache);
        let _ = ThreadCache::visit_all(self.thread_caches.iter().filter(is_due), |local| {
            local.give_up_retired(&self.space, &wake_guard);
        });
        self.space.top_up();
        wake_guard.leave_to_queue();
    }

    /// Delivers a pending notification, unless another thread has the lock and delivers it.
    fn deliver(&self) {
        loop {
            // Pairs with the fence after an unlock: we take the lock, or its holder sees `pending`.
            fence(SeqCst);
            if !self.waiters.pending.load(Relaxed) {
                return;
            }
            let Some(mut queue) = self.waiters.try_lock() else { return };
            // Acquire: pairs with the Release in `notify`: the head's search finds the blocks.
            let woken = if self.waiters.pending.swap(false, Acquire) {
                queue.signal(self.turn_patience())
            } else {
                None
            };
            self.settle(&queue);
            self.waiters.publish(&queue);
            drop(queue);
            woken.into_iter().for_each(crate::sync::wake);
        }
    }

    /// Clears the awaited bit when no announcement is needed. The queue's lock must be held.
    pub(super) fn settle(&self, queue: &WaitQueue) {
        if queue.len() == 0 && self.space.clock.read().is_awaited() && !self.space.reserve.is_short() {
            self.space.clock.clear_awaited();
            // An urgent request may have taken from the reserve, and set the bit that we cleared.
            if self.space.reserve.is_short() {
                self.space.clock.set_awaited();
            }
        }
    }

    /// Runs `f` on the queue under its lock. The result of `f` is dropped without the lock.
    pub(super) fn with_wait_queue<R>(&self, f: impl FnOnce(&mut WaitQueue) -> R) -> R {
        let mut queue = self.waiters.lock();
        let result = f(&mut queue);
        self.waiters.publish(&queue);
        drop(queue);
        self.deliver();
        result
    }
}

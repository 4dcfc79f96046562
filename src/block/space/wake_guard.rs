//! Wake guard: the right to take free frames out of reach of searches, and the duty to announce
//! them.
//!
//! Some steps take free frames out of the places that a search visits, and put them back later:
//! they sift a chain of the [shared retire list](super::shared_retire_list), empty another thread's
//! cache into the bitmaps, or walk the reserve. A request that searches in between finds nothing,
//! and may go to sleep. Each such step therefore requires a [`WakeGuard`] as proof that an
//! announcement follows. Dropping the wake guard announces, also when the step panics:
//!
//! | step | its wake guard is |
//! |---|---|
//! | [`SharedRetireList::reclaim`](super::SharedRetireList::reclaim), `for_each` | a parameter |
//! | `Local::surrender`: the contents of a thread cache | a parameter |
//! | `Reserve::sift` | a parameter |
//! | `Core::gather`, `take_back`, `take_reserved`, `evict_run` | a parameter |
//! | `Core::allocate_into`, `give_back`, `trim`, `audit`, `reclaim_retired`, `vacate_reserve`, `Shrinking::collect`, `CacheHandle` | made there |
//!
//! Steps that only make frames available announce by a call: the end of a batch, of a wave or of a
//! shrink, growth, an eviction. See [`wait`](crate::block::wait).
//!
//! A waiting request must not announce to the queue: it is the head, and would wake itself forever.
//! It [leaves its wake guard to the queue](WakeGuard::leave_to_queue) and signals the next head
//! when it leaves.

pub(in crate::block) trait Announce {
    /// Announces to waiting requests that free frames may have become available.
    fn announce(&self);
}

/// Proof that an announcement follows; dropping it announces.
#[must_use = "dropping it announces: keep it until the frames are where a search finds them"]
pub(in crate::block) struct WakeGuard<'a, A: Announce>(&'a A);

impl<'a, A: Announce> WakeGuard<'a, A> {
    #[inline]
    pub(in crate::block) fn new(announcer: &'a A) -> Self {
        Self(announcer)
    }

    /// Ends the wake guard without an announcement: the caller has a place in the queue, and
    /// signals it.
    #[inline]
    pub(in crate::block) fn leave_to_queue(self) {
        std::mem::forget(self);
    }
}

impl<A: Announce> Drop for WakeGuard<'_, A> {
    #[inline]
    fn drop(&mut self) {
        self.0.announce();
    }
}

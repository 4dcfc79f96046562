//! Wake guard: the right to take free frames out of reach of searches, and the duty to announce
//! them. A search in between may find nothing, and its request go to sleep. Each such step
//! therefore requires a [`WakeGuard`]. Dropping it announces, also when the step panics:
//!
//! | step | its wake guard is |
//! |---|---|
//! | [`SharedRetireList::reclaim`](super::SharedRetireList::reclaim), `for_each` | a parameter |
//! | `Local::surrender`: the contents of a thread cache | a parameter |
//! | `Reserve::sift` | a parameter |
//! | `Core::gather`, `take_back`, `take_reserved`, `evict_run` | a parameter |
//! | `Core::allocate_into`, `check_servable`, `give_back`, `trim`, `audit`, `reclaim_retired`, `vacate_reserve`, `Shrinking::collect`, `CacheHandle` | made there |
//!
//! Steps that only make frames available [announce](crate::block::wait) by a call. A waiting
//! request is the head, and an announcement would wake itself forever. It [leaves its wake guard to
//! the queue](WakeGuard::leave_to_queue) and signals the next head when it leaves.

pub(in crate::block) trait Announce {
    fn announce(&self);
}

#[must_use = "dropping it announces: keep it until the frames are where a search finds them"]
pub(in crate::block) struct WakeGuard<'a, A: Announce>(&'a A);

impl<'a, A: Announce> WakeGuard<'a, A> {
    #[inline]
    pub(in crate::block) fn new(announcer: &'a A) -> Self {
        Self(announcer)
    }

    /// Ends the guard without announcing: the caller has a place in the queue, and signals it.
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

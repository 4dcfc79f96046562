//! Free frames in a thread's hands: the right to take them there, and the duty to announce them.
//!
//! Some steps take free frames out of the places that a search looks at, and put them back later: a chain of
//! [frames in the shared limbo](crate::block::shared_limbo) that is sifted, another thread's thread cache that is emptied into the bitmaps, a reserve that is
//! looked through. A request that searches in between finds nothing, and may fall asleep. So every such step takes a
//! [`Custody`] as proof that an announcement follows, and dropping the custody is that announcement, also when the step
//! panics:
//!
//! | step | its custody is |
//! |---|---|
//! | [`SharedLimbo::reclaim`](crate::block::shared_limbo::SharedLimbo::reclaim), `for_each` | a parameter |
//! | `Local::surrender`: what a thread cache keeps | a parameter |
//! | `Reserve::sift` | a parameter |
//! | `Core::gather`, `take_back`, `take_reserved`, `evict_run` | a parameter |
//! | `Core::allocate_at`, `give_back`, `trim`, `audit`, `reclaim_shared_limbo`, `vacate_reserve`, `Shrinking::collect`, `CacheHandle` | made there |
//!
//! (What only makes frames available, and hides none, announces by name: the end of a batch, of a wave, of a shrink, growth, an
//! eviction. See [`waiters`](crate::block::waiters).)
//!
//! One caller must not announce to the line: a request that waits is itself the first in line, and would wake itself
//! for ever. It hands its custody [to the line](Custody::leave_to_line) and signals the next one when it leaves.

/// Tells waiting requests that free frames may have come back.
pub(in crate::block) trait Announce {
    /// See the [module](self).
    fn announce(&self);
}

/// See the [module](self).
#[must_use = "dropping it announces: keep it until the frames are where a search finds them"]
pub(in crate::block) struct Custody<'a, A: Announce>(&'a A);

impl<'a, A: Announce> Custody<'a, A> {
    #[inline]
    pub(in crate::block) fn new(announcer: &'a A) -> Self {
        Self(announcer)
    }

    /// Ends the custody without an announcement: the caller has a place in line, and signals the line itself.
    #[inline]
    pub(in crate::block) fn leave_to_line(self) {
        std::mem::forget(self);
    }
}

impl<A: Announce> Drop for Custody<'_, A> {
    #[inline]
    fn drop(&mut self) {
        self.0.announce();
    }
}

//! Free frames in a thread's hands: the right to take them there, and the duty to announce them.
//!
//! Some steps take free frames out of the places that a search looks at, and put them back later: a chain of
//! [frames in the shared limbo](super::shared_limbo) that is sifted, another thread's thread cache that is emptied into the bitmaps, a reserve that is
//! looked through. A request that searches in between finds nothing, and may fall asleep. So every such step takes a
//! [`Custody`] as proof that an announcement follows, and dropping the custody is that announcement, also when the step
//! panics:
//!
//! | step | its custody is |
//! |---|---|
//! | [`SharedLimbo::reclaim`](super::shared_limbo::SharedLimbo::reclaim), `for_each` | a parameter |
//! | `Local::surrender`: what a thread cache keeps | a parameter |
//! | `Reserve::sift` | a parameter |
//! | `Core::gather`, `take_back`, `take_reserved`, `evict_run` | a parameter |
//! | `Core::allocate_at`, `give_back`, `trim`, `audit`, `reclaim_shared_limbo`, `vacate_reserve`, `Shrinking::collect`, `CacheHandle` | made there |
//!
//! (What only makes frames available, and hides none, announces by name: the end of a batch, of a wave, of a shrink, growth, an
//! eviction. See [`waiters`](super::waiters).)
//!
//! One caller must not announce to the line: a request that waits is itself the first in line, and would wake itself
//! for ever. It hands its custody [to the line](Custody::leave_to_line) and signals the next one when it leaves.

use super::blocks::Core;

/// See the [module](self).
#[must_use = "dropping it announces: keep it until the frames are where a search finds them"]
pub(super) struct Custody<'a>(&'a Core);

impl Core {
    /// The right to take free frames in hand, until it is dropped, which announces them.
    #[inline]
    pub(super) fn custody(&self) -> Custody<'_> {
        Custody(self)
    }
}

impl Custody<'_> {
    /// Ends it without an announcement: the caller has a place in line, and tells the line itself.
    #[inline]
    pub(super) fn leave_to_line(self) {
        std::mem::forget(self);
    }
}

impl Drop for Custody<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.announce();
    }
}

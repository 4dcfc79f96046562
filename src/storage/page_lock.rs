//! Locked pages of a reservation: a device's driver keeps them in place, so that the device accesses
//! the frames itself.
//!
//! ```text
//! none ──lock──> locked(frames) ──retire: the storage shrinks, or has more frames──> none
//!   └──refused──> refused(frames) ───────────────────same────────────────────────────^
//! ```
//!
//! Invariants:
//! - locked pages are those that this process sees. Pages return to the system only after the number
//!   of usable frames was lowered and the lock was retired, in this order: a copy that began before
//!   uses other frames, no copy begins with it, and the next lock has fewer frames;
//! - a copy holds the lock while the device may access the frames. The last owner unlocks the pages;
//! - a lock owns the reservation. While a driver may know the addresses, no other mapping gets them.
#![cfg_attr(
    not(all(feature = "cuda", not(kvpool_loom))),
    allow(dead_code, reason = "only a device's backend locks pages")
)]

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Locked pages; dropping the last owner unlocks them.
pub(crate) type PageLock = Arc<dyn Any + Send + Sync>;

/// Page-aligned address ranges to lock, and the owner of their memory.
pub(crate) struct Pages {
    pub(crate) ranges: Vec<Range<usize>>,
    pub(crate) memory: Arc<dyn Any + Send + Sync>,
}

/// The lock of a storage's pages; see the [module](self).
#[derive(Default)]
pub(super) struct PageLocks(Mutex<State>);

#[derive(Default)]
struct State {
    slot: Slot,
    /// A retired lock, which copies may still hold: until its end the pages cannot be locked again.
    retired: Option<Weak<dyn Any + Send + Sync>>,
}

#[derive(Default)]
enum Slot {
    #[default]
    None,
    Locked {
        frames: usize,
        lock: PageLock,
    },
    Refused {
        frames: usize,
    },
}

impl State {
    fn retire(&mut self) {
        if let Slot::Locked { lock, .. } = std::mem::take(&mut self.slot) {
            self.retired = Some(Arc::downgrade(&lock));
        }
    }
}

impl PageLocks {
    /// Returns the lock of all usable frames, and makes it if necessary for their number.
    ///
    /// `None` if the pages cannot be locked, or another thread is locking them: a copy then takes
    /// another way, and does not wait.
    pub(super) fn get(
        &self,
        frames: impl FnOnce() -> usize,
        make: impl FnOnce(usize) -> Option<PageLock>,
    ) -> Option<PageLock> {
        let mut state = self.0.try_lock().ok()?;
        // Counted here: a shrink counts down before it retires, so that no lock has pages that it
        // returns.
        let frames = frames();
        match &state.slot {
            Slot::Locked { frames: locked, lock } if *locked >= frames => return Some(lock.clone()),
            Slot::Refused { frames: refused } if *refused >= frames => return None,
            _ => state.retire(),
        }
        if state.retired.as_ref().is_some_and(|lock| lock.strong_count() > 0) {
            return None;
        }
        let lock = make(frames);
        state.slot = match &lock {
            Some(lock) => Slot::Locked { frames, lock: lock.clone() },
            None => Slot::Refused { frames },
        };
        lock
    }

    /// Retires the lock, so that pages can be returned to the system. Waits for a thread that locks
    /// the pages.
    pub(super) fn retire(&self) {
        // A panicking driver call has locked nothing.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retire();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(_: usize) -> Option<PageLock> {
        Some(Arc::new(()))
    }

    #[test]
    fn pages_are_locked_once_and_again_for_more_frames() {
        let locks = PageLocks::default();
        let first = locks.get(|| 4, lock).unwrap();
        assert!(Arc::ptr_eq(&first, &locks.get(|| 4, |_| unreachable!()).unwrap()));
        assert!(Arc::ptr_eq(&first, &locks.get(|| 3, |_| unreachable!()).unwrap()));
        // A copy in progress still has the lock of fewer frames.
        assert!(locks.get(|| 5, |_| unreachable!()).is_none());
        assert!(locks.get(|| 4, |_| unreachable!()).is_none());
        drop(first);
        assert!(locks.get(|| 5, lock).is_some());
    }

    #[test]
    fn a_refusal_holds_until_the_frames_change() {
        let locks = PageLocks::default();
        assert!(locks.get(|| 4, |_| None).is_none());
        assert!(locks.get(|| 4, |_| unreachable!()).is_none());
        assert!(locks.get(|| 5, lock).is_some());
        locks.retire();
        assert!(locks.get(|| 4, |_| None).is_none());
        locks.retire();
        assert!(locks.get(|| 4, lock).is_some());
    }

    #[test]
    fn a_lock_has_the_frames_that_a_retirement_left() {
        let locks = PageLocks::default();
        // The number falls between the call and the count, as in a shrink beside it.
        let usable = std::cell::Cell::new(100);
        let mut made = 0;
        let count = || {
            assert!(locks.0.try_lock().is_err(), "no retirement goes by while frames are counted");
            usable.replace(50)
        };
        assert!(
            locks
                .get(count, |frames| {
                    made = frames;
                    lock(frames)
                })
                .is_some()
        );
        locks.retire();
        assert_eq!(made, 100);
        assert!(
            locks
                .get(
                    || usable.get(),
                    |frames| {
                        made = frames;
                        lock(frames)
                    }
                )
                .is_some()
        );
        assert_eq!(made, 50);
    }

    #[test]
    fn nobody_waits_for_a_thread_that_locks() {
        let locks = PageLocks::default();
        let made = locks.get(
            || 1,
            |_| {
                assert!(locks.get(|| 1, |_| unreachable!()).is_none());
                lock(1)
            },
        );
        assert!(made.is_some());
    }
}

//! Locked pages of a reservation, which a device's driver keeps in place so that the device can
//! access the frames directly.
//!
//! ```text
//! none ──lock──> locked(frames) ──retire: the storage shrinks, or has more frames──> none
//!   ├──refused──> refused(frames) ──────────────────same────────────────────────────^
//!   └──refused for now──> refused(frames, until) ───same, or the time has come──────^
//! ```
//!
//! A temporary refusal (the driver or the system has too little memory) holds for [`PAUSE`],
//! doubled after each further one, up to [`PAUSE_MAX`]: locking may take long before it fails.
//!
//! Invariants:
//! - locked pages are those that this process sees. Pages return to the system only after the
//!   number of usable frames was lowered and then the lock retired: a copy that began before uses
//!   other frames, no copy begins with it, and the next lock has fewer frames;
//! - a copy holds the lock while the device may access the frames. The last owner unlocks the
//!   pages;
//! - pages are locked again only when the retired lock is *gone*, not when its last owner begins to
//!   drop it: until then the driver would report them as locked;
//! - a lock owns the reservation, so no other mapping gets addresses that a driver may know.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_secs(1);

const PAUSE_MAX: Duration = Duration::from_secs(64);

/// Locked pages of a [`HostStorage`](super::HostStorage); dropping the last clone unlocks them.
#[derive(Clone)]
pub struct PageLock(Arc<Locked>);

/// A lock with a witness that outlives it: fields are dropped in order.
struct Locked {
    lock: Box<dyn Any + Send + Sync>,
    witness: Arc<()>,
}

impl PageLock {
    /// Returns the lock that the caller's function made; `None` if it has another type.
    pub fn lock<L: Any>(&self) -> Option<&L> {
        (*self.0.lock).downcast_ref()
    }
}

impl fmt::Debug for PageLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageLock").finish_non_exhaustive()
    }
}

/// Reason why pages were not locked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// Retrying fails until the number of frames changes.
    Final,
    /// May succeed later.
    ForNow,
    /// This caller cannot lock any pages; another one may.
    OfCaller,
}

/// Page-aligned address ranges to lock, and the owner of their memory.
#[derive(Debug)]
pub struct Pages {
    /// Addresses of whole pages.
    pub ranges: Vec<Range<usize>>,
    /// Keeps the addresses reserved.
    pub memory: Arc<dyn Any + Send + Sync>,
}

#[derive(Default)]
pub(super) struct PageLocks(Mutex<State>);

#[derive(Default)]
struct State {
    slot: Slot,
    /// Witness of a retired lock, which copies may still hold.
    retired: Option<Weak<()>>,
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
        /// Time of the next attempt, and the pause before it.
        again: Option<(Instant, Duration)>,
    },
}

impl State {
    fn retire(&mut self) {
        if let Slot::Locked { lock, .. } = std::mem::take(&mut self.slot) {
            self.retired = Some(Arc::downgrade(&lock.0.witness));
        }
    }
}

impl PageLocks {
    /// Returns the lock of all usable frames, and creates it if necessary. `None` if the pages
    /// cannot be locked, or another thread is locking them: a copy then uses another path.
    pub(super) fn get<L: Any + Send + Sync>(
        &self,
        now: Instant,
        frames: impl FnOnce() -> usize,
        make: impl FnOnce(usize) -> Result<L, Refusal>,
    ) -> Option<PageLock> {
        let mut state = match self.0.try_lock() {
            Ok(state) => state,
            // A panic while locking changes nothing.
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        // Counted here: a shrink lowers it before retiring the lock, so no lock has returned pages.
        let frames = frames();
        let mut pause = PAUSE;
        match &state.slot {
            Slot::Locked { frames: locked, lock } if *locked >= frames => return Some(lock.clone()),
            Slot::Refused { frames: refused, again } if *refused >= frames => match again {
                Some((at, before)) if *at <= now => pause = (2 * *before).min(PAUSE_MAX),
                _ => return None,
            },
            _ => state.retire(),
        }
        if state.retired.as_ref().is_some_and(|witness| witness.strong_count() > 0) {
            return None;
        }
        let made = make(frames);
        let refused = |again| Slot::Refused { frames, again };
        state.slot = match made {
            Ok(lock) => {
                let lock = PageLock(Arc::new(Locked { lock: Box::new(lock), witness: Arc::new(()) }));
                Slot::Locked { frames, lock }
            }
            Err(Refusal::Final) => refused(None),
            Err(Refusal::ForNow) => refused(Some((now + pause, pause))),
            Err(Refusal::OfCaller) => Slot::None,
        };
        if let Slot::Locked { lock, .. } = &state.slot { Some(lock.clone()) } else { None }
    }

    /// Retires the lock, so that pages can be returned. Waits for a thread that is locking them.
    pub(super) fn retire(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retire();
    }
}

#[cfg(test)]
mod tests;

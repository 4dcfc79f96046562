//! State of the wait queue. The protocol is in [`wait`](crate::block::wait).

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::{PoisonError, TryLockError};
use std::task::Waker;
use std::time::{Duration, Instant};

use crate::ids::Priority;
use crate::sync::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Mutex, MutexGuard, Ordering::*};

const TURN_PATIENCE: Duration = Duration::from_millis(100);

pub(in crate::block) struct Waiters {
    pub(in crate::block) queue: Mutex<WaitQueue>,
    pub(in crate::block) pending: AtomicBool,
    pub(in crate::block) count: AtomicUsize,
    /// The highest priority in the queue, plus one; 0 if empty. Written under the lock.
    pub(in crate::block) highest: AtomicU8,
    /// Number of blocks that the head requests. Written under the lock.
    pub(in crate::block) asked: AtomicUsize,
    /// Patience in nanoseconds; all ones: unlimited.
    pub(in crate::block) patience: AtomicU64,
}

impl Default for Waiters {
    fn default() -> Self {
        Self {
            queue: Mutex::default(),
            pending: AtomicBool::new(false),
            count: AtomicUsize::new(0),
            highest: AtomicU8::new(0),
            asked: AtomicUsize::new(0),
            patience: AtomicU64::new(TURN_PATIENCE.as_nanos() as u64),
        }
    }
}

pub(in crate::block) type Key = (Reverse<Priority>, Class, u64);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Class {
    Growth,
    Admission,
}

pub(in crate::block) struct QueuePlace {
    pub(in crate::block) asked: usize,
    pub(in crate::block) entered: Instant,
    /// `None` if the future was woken, or does not sleep yet.
    pub(in crate::block) waker: Option<Waker>,
    pub(in crate::block) absent: Option<Absence>,
}

#[derive(Clone, Copy)]
pub(in crate::block) struct Absence {
    pub(in crate::block) since: Instant,
    pub(in crate::block) allowed: Duration,
}

impl Absence {
    pub(in crate::block) fn is_too_long(&self) -> bool {
        if cfg!(any(kvpool_loom, kvpool_loom_coarse)) {
            // A model has no clock: the period ends at once, or never.
            return self.allowed.is_zero();
        }
        self.since.elapsed() >= self.allowed
    }
}

#[derive(Default)]
pub(in crate::block) struct WaitQueue {
    pub(in crate::block) places: BTreeMap<Key, QueuePlace>,
    pub(in crate::block) passed: BTreeMap<Key, QueuePlace>,
    pub(in crate::block) entries: u64,
    pub(in crate::block) signal: bool,
}

impl WaitQueue {
    pub(in crate::block) fn is_head(&self, key: Key) -> bool {
        self.places.first_key_value().is_some_and(|(&head, _)| head == key)
    }

    pub(in crate::block) fn len(&self) -> usize {
        self.places.len() + self.passed.len()
    }

    /// Returns whether a request waits that comes first by priority and is not absent for too long.
    pub(in crate::block) fn is_behind(&self, comes_first: impl Fn(Priority) -> bool) -> bool {
        let ahead = self.places.iter().take_while(|((Reverse(other), ..), _)| comes_first(*other));
        ahead.into_iter().any(|(_, place)| !place.absent.is_some_and(|absence| absence.is_too_long()))
    }

    /// Signals the head to search and returns its waker. Passes over a head absent for too long.
    #[must_use = "a head that has a reason to try must be woken"]
    pub(in crate::block) fn signal(&mut self, patience: Duration) -> Option<Waker> {
        if std::mem::replace(&mut self.signal, true) {
            let _ = self.pass_over();
        }
        self.wake_head(patience)
    }

    /// Passes over signalled heads that are absent too long. Returns whether there is a new head.
    #[must_use = "a head that has a reason to try must be woken"]
    pub(in crate::block) fn pass_over(&mut self) -> bool {
        let mut passed = false;
        while self.places.len() > 1 {
            let Some(head) = self.places.first_entry() else { break };
            if !head.get().absent.is_some_and(|absence| absence.is_too_long()) {
                break;
            }
            let (key, place) = head.remove_entry();
            self.passed.insert(key, place);
            // Also passes on a signal that the old head took without searching.
            (passed, self.signal) = (true, true);
        }
        passed
    }

    #[must_use = "a head that has a reason to try must be woken"]
    pub(in crate::block) fn wake_head(&mut self, patience: Duration) -> Option<Waker> {
        let mut head = self.places.first_entry()?;
        let place = head.get_mut();
        // Without a waker it was woken already, or does not sleep yet and will see the signal.
        let waker = place.waker.take()?;
        place.absent = Some(Absence { since: Instant::now(), allowed: patience });
        Some(waker)
    }

    /// Records a poll: restores a place that was passed over, and signals it if it is the head.
    pub(in crate::block) fn is_polled(&mut self, key: Key) {
        if let Some(place) = self.passed.remove(&key) {
            self.places.insert(key, place);
            // The blocks it was woken for went to other requests, which may have left some.
            self.signal |= self.is_head(key);
        }
        if let Some(place) = self.places.get_mut(&key) {
            place.absent = None;
        }
    }

    pub(in crate::block) fn remove(&mut self, key: Key) -> Option<QueuePlace> {
        self.places.remove(&key).or_else(|| self.passed.remove(&key))
    }
}

impl Waiters {
    pub(in crate::block) fn lock(&self) -> MutexGuard<'_, WaitQueue> {
        // Never poisoned: wakers run without the lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::block) fn try_lock(&self) -> Option<MutexGuard<'_, WaitQueue>> {
        if cfg!(kvpool_loom) {
            // loom explores contention with a lock holder only if both also access another object.
            self.count.load(Relaxed);
        }
        match self.queue.try_lock() {
            Ok(queue) => Some(queue),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Publishes what is read without the lock. Must be called before unlocking.
    pub(in crate::block) fn publish(&self, queue: &WaitQueue) {
        // Relaxed: a thread that knows of a request in the queue sees that it entered.
        self.count.store(queue.len(), Relaxed);
        let head = queue.places.first_key_value();
        let highest = head.map_or(0, |(&(Reverse(priority), ..), _)| priority as u8 + 1);
        self.highest.store(highest, Relaxed);
        self.asked.store(head.map_or(0, |(_, place)| place.asked), Relaxed);
    }

    /// Returns the highest priority in the queue, excluding requests that were passed over.
    pub(in crate::block) fn highest(&self) -> Option<Priority> {
        // Relaxed: see `publish`.
        let highest = self.highest.load(Relaxed);
        [Priority::Normal, Priority::High, Priority::Urgent]
            .into_iter()
            .find(|&priority| priority as u8 + 1 == highest)
    }

    pub(in crate::block) fn count(&self) -> usize {
        // Relaxed: a statistic.
        self.count.load(Relaxed)
    }
}

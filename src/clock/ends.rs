//! Tasks that wait for the end of batches.
//!
//! | where | what | meaning |
//! |---|---|---|
//! | the clock's word | `end awaited` | the list is not empty: each end checks it |
//! | the list, under its lock | entries | each waiting task's waker, and the batches that it waits for |
//! | [`Ends`] | `pending` | a batch ended, and the list has not been checked since |
//!
//! ```text
//! wait:   lock;  enter the list;  word |= end awaited;  have they ended? leave the list, go;  unlock;  look;  sleep
//! end:    slot := 0;  word -= END;  end awaited? pending := 1;  look
//! look:   fence;  pending? and lock free? => pending := 0;  take the entries whose batches have ended;
//!         list empty => word &= !end awaited;  unlock;  wake these;  look again
//! leave:  lock;  leave the list;  list empty => word &= !end awaited;  unlock;  look
//! ```
//!
//! # No task sleeps past the end of its batches
//!
//! A task sleeps only if it found a batch in flight after its bit was set. That batch changes the
//! word when it ends. If that change comes after the bit in the word's order, the end sees the bit
//! and looks; otherwise the task sees the slot empty. The bit is cleared under the lock, while the
//! list is empty. An end that finds the lock taken leaves `pending` to the holder, which looks
//! after unlocking: by their fences, one sees the other. A task that waits up to a ticket and sees
//! a batch beginning wakes itself and looks again.
//!
//! While tasks wait, each end reads at most three slots per task, or all for a task that waits up
//! to a ticket. Model: `loom-tests/tests/settled.rs`.

use std::sync::{PoisonError, TryLockError};
use std::task::{Context, Poll, Waker};

use crate::sync::{AtomicBool, Mutex, Ordering::*, fence};

use super::batch_set::{BatchSet, SetState};

pub(super) trait Awaited {
    fn state(&self, batches: &BatchSet) -> SetState;

    /// Sets the bit. Slots read afterwards show every batch that ended without seeing it.
    fn set_end_awaited(&self);

    fn clear_end_awaited(&self);
}

/// A task's place in the list, if it has one.
#[derive(Debug, Default)]
pub struct EndPlace(Option<u64>);

#[derive(Default)]
pub(super) struct Ends {
    list: Mutex<List>,
    pending: AtomicBool,
}

#[derive(Default)]
struct List {
    entries: Vec<Entry>,
    created: u64,
}

struct Entry {
    key: u64,
    batches: BatchSet,
    waker: Waker,
}

impl List {
    fn remove(&mut self, key: u64) -> Option<Entry> {
        let place = self.entries.iter().position(|entry| entry.key == key)?;
        Some(self.entries.swap_remove(place))
    }
}

impl Ends {
    pub(super) fn poll(
        &self,
        clock: &impl Awaited,
        batches: &BatchSet,
        place: &mut EndPlace,
        context: &mut Context<'_>,
    ) -> Poll<()> {
        if clock.state(batches) == SetState::Ended {
            self.leave(clock, place);
            return Poll::Ready(());
        }
        let waker = context.waker().clone();
        // Dropped after the lock is released: wakers are user code.
        let (state, _gone) = self.with_list(clock, |list| {
            let key = *place.0.get_or_insert_with(|| {
                list.created += 1;
                list.created
            });
            let before = list.remove(key);
            list.entries.push(Entry { key, batches: *batches, waker });
            clock.set_end_awaited();
            let state = clock.state(batches);
            let own = if let SetState::InFlight(_) = state { None } else { list.remove(key) };
            (state, (before, own))
        });
        match state {
            SetState::Ended => Poll::Ready(()),
            SetState::InFlight(_) => Poll::Pending,
            SetState::Beginning(_) => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        }
    }

    pub(super) fn leave(&self, clock: &impl Awaited, place: &mut EndPlace) {
        if let Some(key) = place.0.take() {
            let _gone = self.with_list(clock, |list| list.remove(key));
        }
    }

    /// Wakes the tasks whose batches have ended, after the end of a batch.
    #[cold]
    #[inline(never)]
    pub(super) fn notify(&self, clock: &impl Awaited) {
        // Release: pairs with the Acquire in `look`, so that this batch's slot is seen empty. A
        // swap continues the release sequence of other ends.
        self.pending.swap(true, Release);
        self.look(clock);
    }

    pub(super) fn len(&self) -> usize {
        self.list.lock().unwrap_or_else(PoisonError::into_inner).entries.len()
    }

    fn look(&self, clock: &impl Awaited) {
        loop {
            // Orders `pending` and the lock on both sides: one sees the other.
            fence(SeqCst);
            if !self.pending.load(Relaxed) {
                return;
            }
            let mut list = match self.list.try_lock() {
                Ok(list) => list,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                // The holder of the lock looks after unlocking.
                Err(TryLockError::WouldBlock) => return,
            };
            let mut woken = Vec::new();
            if self.pending.swap(false, Acquire) {
                // A task that sees a batch beginning looks again itself.
                let is_due =
                    |entry: &mut Entry| !matches!(clock.state(&entry.batches), SetState::InFlight(_));
                woken.extend(list.entries.extract_if(.., is_due).map(|entry| entry.waker));
            }
            Self::rest(clock, &list);
            drop(list);
            woken.into_iter().for_each(crate::sync::wake);
        }
    }

    fn rest(clock: &impl Awaited, list: &List) {
        if list.entries.is_empty() {
            clock.clear_end_awaited();
        }
    }

    fn with_list<R>(&self, clock: &impl Awaited, f: impl FnOnce(&mut List) -> R) -> R {
        // Nothing panics under the lock: wakers are cloned, called and dropped outside.
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let result = f(&mut list);
        Self::rest(clock, &list);
        drop(list);
        self.look(clock);
        result
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use std::sync::Arc;
    use std::task::Wake;

    use super::*;
    use crate::clock::{BatchRef, Clock};
    use crate::sync::AtomicUsize;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    fn poll(clock: &Clock, batches: &BatchSet, place: &mut EndPlace, count: &Arc<Count>) -> Poll<()> {
        let waker = Waker::from(count.clone());
        clock.poll_ended(batches, place, &mut Context::from_waker(&waker))
    }

    #[test]
    fn the_last_of_the_batches_wakes() {
        let (clock, count) = (Clock::default(), Arc::new(Count::default()));
        let (a, b, other) = (clock.begin(), clock.begin(), clock.begin());
        let (mut set, mut place) = (BatchSet::default(), EndPlace::default());
        assert!(poll(&clock, &set, &mut place, &count).is_ready(), "no batch");
        clock.note(&mut set, a.batch(), &mut BatchRef::default());
        clock.note(&mut set, b.batch(), &mut BatchRef::default());
        for _ in 0..2 {
            assert!(poll(&clock, &set, &mut place, &count).is_pending());
            assert_eq!(clock.waiting_for_ends(), 1);
        }
        let _ = clock.end(other);
        let _ = clock.end(b);
        assert_eq!(count.0.load(Relaxed), 0);
        assert_eq!(clock.state(&set), SetState::InFlight(a.batch()));
        let _ = clock.end(a);
        assert_eq!((count.0.load(Relaxed), clock.waiting_for_ends()), (1, 0));
        assert!(!clock.read().is_end_awaited());
        assert!(poll(&clock, &set, &mut place, &count).is_ready());
    }

    #[test]
    fn a_task_that_left_is_not_woken() {
        let (clock, count) = (Clock::default(), Arc::new(Count::default()));
        let batch = clock.begin();
        let (mut set, mut place) = (BatchSet::default(), EndPlace::default());
        set.add_up_to(batch.ticket());
        assert!(poll(&clock, &set, &mut place, &count).is_pending());
        assert!(clock.read().is_end_awaited());
        clock.leave_ends(&mut place);
        assert!(!clock.read().is_end_awaited());
        let _ = clock.end(batch);
        assert_eq!(count.0.load(Relaxed), 0);
    }

    #[test]
    fn all_up_to_a_ticket() {
        let (clock, count) = (Clock::default(), Arc::new(Count::default()));
        let (a, b, c) = (clock.begin(), clock.begin(), clock.begin());
        let (mut set, mut place) = (BatchSet::default(), EndPlace::default());
        set.add_up_to(b.ticket());
        assert!(poll(&clock, &set, &mut place, &count).is_pending());
        let _ = clock.end(b);
        assert_eq!(count.0.load(Relaxed), 0);
        let _ = clock.end(a);
        assert_eq!(count.0.load(Relaxed), 1);
        assert!(poll(&clock, &set, &mut place, &count).is_ready());
        let _ = clock.end(c);
    }
}

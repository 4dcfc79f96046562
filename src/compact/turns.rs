//! The right to move blocks: compactor runs and resizes take turns, in order of arrival.
//!
//! ```text
//! poll_held   not the holder: in the queue, in order of numbers
//!             the holder is absent for too long: its turn ends, and what it left is dropped
//!             the right is free: given to the first in the queue, which is woken
//! attend      records the polls of a holder's work: between two polls, the holder is absent
//! end         of a turn: the right is given to the first in the queue
//! ```
//!
//! | field | meaning |
//! |---|---|
//! | `holder` | the turn that has the right, taken or only given |
//! | `holder.unpolled` | since when the holder has not been polled; `None` while it is |
//! | `holder.copies` | copies of its moves in progress |
//! | `holder.left` | what the holder left while it is not polled: an open shrink |
//! | `waiting` | the turns in the queue, by number |
//!
//! Invariants:
//!
//! - No turn waits while the right is free.
//! - A holder is passed over only if, for longer than the patience, it has not been polled and no
//!   copy of its moves was in progress. It therefore has the right between two awaits, and checks
//!   it after each ([`Turn::is_held`], [`Turn::resume`]).
//! - What it left is returned to it or dropped, once, and before the next turn has the right.
//!
//! A turn that was passed over keeps its number: when polled, it is first in the queue. One lock
//! protects all fields, for a few instructions; wakers, and what was left, are dropped outside of
//! it, because they may run any code. Model: `loom-tests/tests/turns.rs`.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::block::Shrinking;
use crate::error::{TurnHolder, TurnTask};
use crate::sync::{Mutex, MutexGuard, wake};

/// The turns of one pool. A holder may leave a `T` with its turn while it is not polled.
#[derive(Debug)]
pub struct Turns<T = Shrinking>(Mutex<WaitQueue<T>>);

#[derive(Debug)]
struct WaitQueue<T> {
    newest: u64,
    holder: Option<Holder<T>>,
    waiting: BTreeMap<u64, (TurnTask, Waker)>,
}

#[derive(Debug)]
struct Holder<T> {
    number: u64,
    task: TurnTask,
    since: Instant,
    unpolled: Option<Instant>,
    copies: usize,
    left: Option<T>,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self(Mutex::new(WaitQueue { newest: 0, holder: None, waiting: BTreeMap::new() }))
    }
}

impl<T> Turns<T> {
    /// Returns a turn that passes over holders absent longer than `patience` while it waits.
    pub fn turn(self: &Arc<Self>, task: TurnTask, patience: Duration) -> Turn<T> {
        let mut queue = self.lock();
        queue.newest += 1;
        Turn { turns: self.clone(), number: queue.newest, task, patience }
    }

    /// Passes over a holder that is absent for longer than `patience`.
    pub fn look_after(&self, patience: Duration) {
        let mut queue = self.lock();
        let Some(absent) = queue.holder.as_mut().filter(|holder| holder.is_absent(patience)) else { return };
        // No turn has the right until what was left is dropped: the next one may open a shrink.
        (absent.number, absent.unpolled) = (0, None);
        let left = absent.left.take();
        drop(queue);
        drop(left);
        self.end(0);
    }

    fn end(&self, number: u64) {
        let mut queue = self.lock();
        queue.holder.take_if(|holder| holder.number == number);
        let next = queue.give();
        drop(queue);
        next.into_iter().for_each(wake);
    }

    /// Returns the task that has the right.
    pub fn holder(&self) -> Option<TurnHolder> {
        self.lock().holder.as_ref().map(|holder| {
            let unpolled = holder.unpolled.filter(|_| holder.copies == 0).map(|since| since.elapsed());
            TurnHolder::new(holder.task, holder.since.elapsed(), unpolled)
        })
    }

    fn lock(&self) -> MutexGuard<'_, WaitQueue<T>> {
        // No code panics while this lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> WaitQueue<T> {
    fn held_by(&mut self, number: u64) -> Option<&mut Holder<T>> {
        self.holder.as_mut().filter(|holder| holder.number == number)
    }

    fn give(&mut self) -> Option<Waker> {
        if self.holder.is_some() {
            return None;
        }
        let (number, (task, waker)) = self.waiting.pop_first()?;
        let now = Instant::now();
        self.holder = Some(Holder { number, task, since: now, unpolled: Some(now), copies: 0, left: None });
        Some(waker)
    }
}

impl<T> Holder<T> {
    fn is_absent(&self, patience: Duration) -> bool {
        // A model has no clock: the patience is over at once, or never.
        let is_over = |since: Instant| {
            if cfg!(any(kvpool_loom, kvpool_loom_coarse)) {
                patience.is_zero()
            } else {
                since.elapsed() >= patience
            }
        };
        self.copies == 0 && self.unpolled.is_some_and(is_over)
    }
}

/// The right to move blocks, or a place in the queue for it. Dropping it passes the right on.
#[derive(Debug)]
pub struct Turn<T = Shrinking> {
    turns: Arc<Turns<T>>,
    number: u64,
    task: TurnTask,
    patience: Duration,
}

impl<T> Turn<T> {
    /// Waits in the queue, unless this turn has the right.
    pub fn poll_held(&self, context: &mut Context<'_>) -> Poll<()> {
        if !self.is_held() {
            self.turns.look_after(self.patience);
        }
        let waker = context.waker().clone();
        let mut queue = self.turns.lock();
        // Wakers are dropped after the lock is released.
        let _old = match queue.held_by(self.number) {
            Some(_) => None,
            None => queue.waiting.insert(self.number, (self.task, waker)),
        };
        // If the right is free, no other turn waits.
        let _own = queue.give();
        let is_held = queue.held_by(self.number).map(|holder| holder.unpolled = None).is_some();
        drop(queue);
        if is_held { Poll::Ready(()) } else { Poll::Pending }
    }

    /// Returns whether this turn has the right, and was not passed over.
    pub fn is_held(&self) -> bool {
        self.turns.lock().held_by(self.number).is_some()
    }

    /// Does the work of this turn, and records when it is polled. What was left is dropped with it.
    pub async fn attend<F: Future>(&self, work: F) -> F::Output {
        let _left = Left(self);
        let mut work = pin!(work);
        poll_fn(|context| {
            self.note(None);
            let outcome = work.as_mut().poll(context);
            self.note(Some(Instant::now()));
            outcome
        })
        .await
    }

    fn note(&self, unpolled: Option<Instant>) {
        if let Some(holder) = self.turns.lock().held_by(self.number) {
            holder.unpolled = unpolled;
        }
    }

    /// Leaves a value with the turn until it is resumed or passed over; drops it if it already was.
    pub fn leave(&self, left: T) {
        let mut left = Some(left);
        if let Some(holder) = self.turns.lock().held_by(self.number) {
            std::mem::swap(&mut holder.left, &mut left);
        }
    }

    /// Returns the value that was left, unless the turn was passed over.
    pub fn resume(&self) -> Option<T> {
        self.turns.lock().held_by(self.number)?.left.take()
    }

    /// Returns a share for a copy: while it exists, the turn is not passed over and does not end.
    pub fn share(self: &Arc<Self>) -> Share<T> {
        if let Some(holder) = self.turns.lock().held_by(self.number) {
            holder.copies += 1;
        }
        Share(self.clone())
    }
}

/// Drops what a turn's work left, when the work ends: a copy may hold the turn for longer.
struct Left<'a, T>(&'a Turn<T>);

impl<T> Drop for Left<'_, T> {
    fn drop(&mut self) {
        drop(self.0.resume());
    }
}

impl<T> Drop for Turn<T> {
    fn drop(&mut self) {
        // Dropped after the lock is released.
        let _waiting = self.turns.lock().waiting.remove(&self.number);
        self.turns.end(self.number);
    }
}

/// The share that a copy has in a turn.
#[derive(Debug)]
pub struct Share<T = Shrinking>(Arc<Turn<T>>);

impl<T> Drop for Share<T> {
    fn drop(&mut self) {
        let turn = &self.0;
        if let Some(holder) = turn.turns.lock().held_by(turn.number) {
            holder.copies = holder.copies.saturating_sub(1);
            holder.unpolled = holder.unpolled.map(|_| Instant::now());
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use std::task::Wake;

    use super::*;
    use crate::sync::{AtomicUsize, Ordering};

    const LONG: Duration = Duration::from_secs(1_000);

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn turn(turns: &Arc<Turns<&'static str>>, patience: Duration) -> Arc<Turn<&'static str>> {
        Arc::new(turns.turn(TurnTask::Resize, patience))
    }

    fn is_held(turn: &Turn<&'static str>, wakes: &Arc<Wakes>) -> bool {
        turn.poll_held(&mut Context::from_waker(&wakes.clone().into())).is_ready()
    }

    #[test]
    fn turns_come_in_order_of_arrival() {
        let turns = Arc::<Turns<_>>::default();
        let wakes: [Arc<Wakes>; 3] = Default::default();
        let [a, b, c] = [(); 3].map(|()| turn(&turns, LONG));
        assert!(is_held(&a, &wakes[0]), "the right is free");
        assert!(!is_held(&b, &wakes[1]) && !is_held(&c, &wakes[2]));
        assert!(!is_held(&b, &wakes[0]));
        drop(a);
        assert_eq!(wakes.each_ref().map(|wakes| wakes.0.load(Ordering::Relaxed)), [1, 0, 0]);
        assert!(!is_held(&c, &wakes[2]), "it is the second's turn");
        assert!(!is_held(&turn(&turns, LONG), &wakes[2]), "a newcomer does not overtake");
        assert!(is_held(&b, &wakes[1]));
        drop(b);
        assert_eq!(wakes[2].0.load(Ordering::Relaxed), 1);
        assert!(is_held(&c, &wakes[2]));
        drop(c);
        assert!(turns.holder().is_none());
    }

    #[test]
    fn a_dropped_turn_is_passed_on() {
        let turns = Arc::<Turns<_>>::default();
        let wakes = Arc::<Wakes>::default();
        let [a, b, c, d] = [(); 4].map(|()| turn(&turns, LONG));
        assert!(is_held(&a, &wakes));
        assert!([&b, &c, &d].into_iter().all(|turn| !is_held(turn, &wakes)));
        // In the queue; and with a right that it has not taken.
        drop(c);
        drop(a);
        drop(b);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        assert!(is_held(&d, &wakes));
        drop(d);
        assert!(turns.lock().holder.is_none() && turns.lock().waiting.is_empty());
    }

    #[test]
    fn an_absent_holder_is_passed_over_once_its_copies_are_over() {
        let turns = Arc::<Turns<_>>::default();
        let wakes = Arc::<Wakes>::default();
        let (a, b) = (turn(&turns, Duration::ZERO), turn(&turns, Duration::ZERO));
        let mut share = None;
        let mut work = Box::pin(a.attend(async {
            assert!(is_held(&a, &wakes) && a.resume().is_none());
            a.leave("left");
            assert!(!is_held(&b, &wakes), "it is being polled");
            share = Some(a.share());
            std::future::pending::<()>().await
        }));
        assert!(work.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert!(!is_held(&b, &wakes), "a copy is under way");
        assert_eq!(turns.holder().unwrap().unpolled(), None);
        drop(work);
        drop(share);
        assert!(turns.holder().unwrap().unpolled().is_some());
        assert!(is_held(&b, &wakes));
        a.leave("late");
        assert!(!a.is_held() && a.resume().is_none() && b.resume().is_none());
        // When polled, it is first in the queue again.
        let c = turn(&turns, LONG);
        assert!(!is_held(&c, &wakes) && !is_held(&a, &wakes));
        drop(b);
        assert!(is_held(&a, &wakes) && !is_held(&c, &wakes));
    }
}

//! The right to move blocks: compactor runs and resizes take it in turns, in order of arrival.
//!
//! ```text
//! take    free: taken.  Otherwise: to the end of the line
//! end     of a turn, or of a request that has it and did not take it:
//!         the line is empty: free.  Otherwise: given to the first in line, which is woken
//! ```
//!
//! | field | meaning |
//! |---|---|
//! | `is_taken` | a [`Turn`] exists, or the right is given |
//! | `given` | request that the right was given to, until that is polled or dropped |
//! | `newest` | number of the newest request |
//! | `waiting` | other requests, in order of their numbers |
//!
//! Invariant: no request waits while the right is free. All fields are behind one lock, held for a
//! few instructions; wakers are called and dropped outside of it, because they may run any code.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll, Waker};

use crate::sync::{Mutex, MutexGuard, wake};

/// The turns of one pool.
#[derive(Debug, Default)]
pub struct Turns(Mutex<Line>);

#[derive(Debug, Default)]
struct Line {
    is_taken: bool,
    given: Option<u64>,
    newest: u64,
    waiting: VecDeque<(u64, Waker)>,
}

impl Turns {
    /// Waits for a turn. The request joins the line at its first poll, and leaves it when dropped.
    pub fn take(self: &Arc<Self>) -> NextTurn {
        NextTurn { turns: self.clone(), number: None }
    }

    fn lock(&self) -> MutexGuard<'_, Line> {
        // No code panics while this lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pass_on(&self) {
        let next = {
            let mut line = self.lock();
            let next = line.waiting.pop_front();
            line.given = next.as_ref().map(|&(number, _)| number);
            line.is_taken = next.is_some();
            next
        };
        if let Some((_, waker)) = next {
            wake(waker);
        }
    }
}

/// The right to move blocks, until it is dropped.
#[derive(Debug)]
pub struct Turn(Arc<Turns>);

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.pass_on();
    }
}

/// A request for a [`Turn`].
#[derive(Debug)]
#[must_use = "futures do nothing unless they are polled"]
pub struct NextTurn {
    turns: Arc<Turns>,
    /// `None` before the first poll, and once the request has its turn.
    number: Option<u64>,
}

impl Future for NextTurn {
    type Output = Turn;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Turn> {
        // Both wakers are dropped after the lock is released.
        let mut waker = context.waker().clone();
        let this = &mut *self;
        let mut line = this.turns.lock();
        match this.number {
            None if !line.is_taken => line.is_taken = true,
            None => {
                line.newest += 1;
                this.number = Some(line.newest);
                let number = line.newest;
                line.waiting.push_back((number, waker));
                return Poll::Pending;
            }
            Some(number) if line.given == Some(number) => {
                line.given = None;
                this.number = None;
            }
            Some(number) => {
                if let Some((_, old)) = line.waiting.iter_mut().find(|(waits, _)| *waits == number) {
                    std::mem::swap(old, &mut waker);
                }
                return Poll::Pending;
            }
        }
        drop(line);
        Poll::Ready(Turn(this.turns.clone()))
    }
}

impl Drop for NextTurn {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut line = self.turns.lock();
        let at = line.waiting.iter().position(|&(waits, _)| waits == number);
        let is_given = line.given == Some(number);
        // Dropped after the lock is released.
        let _waiting = at.and_then(|at| line.waiting.remove(at));
        drop(line);
        if is_given {
            self.turns.pass_on();
        }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use std::pin::pin;
    use std::task::Wake;

    use super::*;
    use crate::sync::{AtomicUsize, Ordering};

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll(next: Pin<&mut NextTurn>, wakes: &Arc<Wakes>) -> Option<Turn> {
        match next.poll(&mut Context::from_waker(&wakes.clone().into())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[test]
    fn turns_come_in_order_of_arrival() {
        let turns = Arc::<Turns>::default();
        let wakes: [Arc<Wakes>; 3] = Default::default();
        let (mut a, mut b, mut c) = (pin!(turns.take()), pin!(turns.take()), pin!(turns.take()));
        let first = poll(a.as_mut(), &wakes[0]).expect("the right is free");
        assert!(poll(b.as_mut(), &wakes[1]).is_none() && poll(c.as_mut(), &wakes[2]).is_none());
        // Polled again by another task.
        assert!(poll(b.as_mut(), &wakes[0]).is_none());
        drop(first);
        assert_eq!(wakes.each_ref().map(|wakes| wakes.0.load(Ordering::Relaxed)), [1, 0, 0]);
        assert!(poll(c.as_mut(), &wakes[2]).is_none(), "it is the second's turn");
        assert!(poll(pin!(turns.take()), &wakes[2]).is_none(), "a newcomer does not overtake");
        let second = poll(b.as_mut(), &wakes[1]).expect("given");
        drop(second);
        assert_eq!(wakes[2].0.load(Ordering::Relaxed), 1);
        drop(poll(c.as_mut(), &wakes[2]).expect("given"));
        assert!(!turns.lock().is_taken);
    }

    #[test]
    fn a_dropped_request_passes_its_turn_on() {
        let turns = Arc::<Turns>::default();
        let wakes = Arc::<Wakes>::default();
        let first = poll(pin!(turns.take()), &wakes).expect("the right is free");
        let (mut b, mut c) = (Box::pin(turns.take()), Box::pin(turns.take()));
        let mut d = Box::pin(turns.take());
        assert!([&mut b, &mut c, &mut d].into_iter().all(|next| poll(next.as_mut(), &wakes).is_none()));
        // In line; and with a turn that it has not taken.
        drop(c);
        drop(first);
        drop(b);
        assert_eq!(wakes.0.load(Ordering::Relaxed), 2);
        drop(poll(d.as_mut(), &wakes).expect("given"));
        assert!(!turns.lock().is_taken && turns.lock().waiting.is_empty());
    }
}

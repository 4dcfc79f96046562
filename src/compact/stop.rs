//! The signal that stops a background task.

use std::future::poll_fn;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use crate::sync::wake;

/// A signal that is given once, and that one task waits for.
#[derive(Debug, Default)]
pub(super) struct Stop(Mutex<Signal>);

#[derive(Debug, Default)]
struct Signal {
    is_given: bool,
    /// Of the task that waits for it.
    waker: Option<Waker>,
}

impl Stop {
    fn lock(&self) -> MutexGuard<'_, Signal> {
        // No code panics while this lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the signal.
    pub(super) fn give(&self) {
        let waker = {
            let mut signal = self.lock();
            signal.is_given = true;
            signal.waker.take()
        };
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    pub(super) fn is_given(&self) -> bool {
        self.lock().is_given
    }

    /// Waits for the signal.
    pub(super) async fn given(&self) {
        let given = poll_fn(|context| {
            // The old waker is dropped after the lock is released.
            let mut waker = Some(context.waker().clone());
            let mut signal = self.lock();
            if signal.is_given {
                return Poll::Ready(());
            }
            std::mem::swap(&mut signal.waker, &mut waker);
            Poll::Pending
        });
        given.await;
    }
}

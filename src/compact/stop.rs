use std::future::poll_fn;
use std::task::Poll;

use crate::sync::{AtomicBool, AtomicWaker, Ordering::*, wake};

/// A signal that stops a background task: it is given once, and one task waits for it.
///
/// The task stores its waker and then reads the flag; the giver sets the flag and then takes the
/// waker. Both change the waker's word, so that the second one sees the first one's flag or waker.
/// Model: `loom-tests/tests/turns.rs`.
pub struct Stop {
    is_given: AtomicBool,
    waker: AtomicWaker,
}

impl Default for Stop {
    fn default() -> Self {
        Self { is_given: AtomicBool::new(false), waker: AtomicWaker::new() }
    }
}

impl Stop {
    /// Gives the signal.
    pub fn give(&self) {
        // Relaxed: the change of the waker's word publishes it.
        self.is_given.store(true, Relaxed);
        self.waker.take().into_iter().for_each(wake);
    }

    /// Returns whether the signal was given.
    pub fn is_given(&self) -> bool {
        self.is_given.load(Relaxed)
    }

    /// Waits for the signal.
    pub async fn given(&self) {
        poll_fn(|context| {
            self.waker.register(context.waker());
            if self.is_given() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl std::fmt::Debug for Stop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Stop").field(&self.is_given()).finish()
    }
}

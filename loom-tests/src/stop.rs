//! Stops a thread at a point that the model can reach: in a callback.

use loom::sync::atomic::{AtomicBool, Ordering::*};
use loom::thread::yield_now;

/// State of a stopped thread, and of the thread that waits for it.
#[derive(Default)]
pub struct Stop {
    reached: AtomicBool,
    resumed: AtomicBool,
}

impl Stop {
    /// Stops the calling thread.
    pub fn here(&self) {
        self.reached.store(true, Release);
        while !self.resumed.load(Acquire) {
            yield_now();
        }
    }

    /// Waits until the other thread is stopped.
    pub fn wait(&self) {
        while !self.reached.load(Acquire) {
            yield_now();
        }
    }

    /// Resumes the stopped thread.
    pub fn resume(&self) {
        self.resumed.store(true, Release);
    }
}

//! A thread that is stopped at a place that the model reaches: a callback.

use loom::sync::atomic::{AtomicBool, Ordering::*};
use loom::thread::yield_now;

/// What a stopped thread waits for.
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

    /// Lets it go on.
    pub fn resume(&self) {
        self.resumed.store(true, Release);
    }
}

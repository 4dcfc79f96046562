//! Threads that start together.

use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

/// Runs `work` on `threads` threads, each with a result of `prepare`, all started by one barrier.
/// Returns the time of the slowest, preparation excluded.
pub fn together<T>(
    threads: usize,
    prepare: impl Fn(usize) -> T + Sync,
    work: impl Fn(usize, &mut T) + Sync,
) -> Duration {
    let barrier = Barrier::new(threads);
    let run = &|thread: usize| {
        let mut prepared = prepare(thread);
        barrier.wait();
        let start = Instant::now();
        work(thread, &mut prepared);
        start.elapsed()
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a bench thread panicked")).max()
    })
    .unwrap_or_default()
}

/// Waits for another thread: spins, and yields if there are more threads than cores.
#[derive(Default)]
pub struct Backoff(u32);

impl Backoff {
    /// Waits once more.
    #[inline]
    pub fn wait(&mut self) {
        self.0 += 1;
        if self.0.is_multiple_of(128) {
            thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

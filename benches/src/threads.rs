//! Threads that start together, each on a core of its own.

use std::io;
use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Release},
};
use std::sync::{Barrier, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::quiet;

/// The cores on which the process may run.
static CORES: LazyLock<io::Result<Vec<usize>>> = LazyLock::new(|| {
    // A new thread: the calling one may be pinned.
    let cores = thread::Builder::new().spawn(quiet::cores)?.join();
    cores.expect("reading a set of cores does not panic")
});

/// Pins the calling thread, the `thread`th of several that run at once, to one of the cores on
/// which the process may run. Without this, two threads often run on one core, by turns.
///
/// # Errors
///
/// If the system refuses it, or reports no cores.
pub fn pin(thread: usize) -> io::Result<()> {
    let cores = CORES.as_ref().map_err(|error| io::Error::from(error.kind()))?;
    quiet::pin_to(*cores.get(thread % cores.len().max(1)).ok_or(io::ErrorKind::NotFound)?)
}

/// Returns the numbers of threads to compare: the powers of two up to `max` for which each thread
/// has a core, and two threads always.
pub fn counts(max: usize) -> Vec<usize> {
    let cores = CORES.as_ref().map_or(0, Vec::len).max(2);
    (0..).map(|power| 1 << power).take_while(|&count| count <= cores.min(max)).collect()
}

/// Says in one line whether the threads of the benches are pinned, and how long a cache line takes
/// from one to another. That time bounds what shared state costs. On a virtual machine it changes
/// by several times with the place of the virtual cores: compare figures of two threads only at
/// equal times.
pub fn pinning() -> String {
    let cores = CORES.as_ref().map_or(0, Vec::len);
    let pinned = thread::spawn(|| pin(0)).join().expect("pinning does not panic");
    match (pinned, cores) {
        (Ok(()), 1) => {
            "the only core is shared by all threads: figures of several threads mean little".into()
        }
        (Ok(()), _) => format!(
            "threads that run at once are pinned, one to each of {cores} cores; \
             a cache line goes from one to the other in {:.0} ns",
            transfer_ns()
        ),
        (Err(error), _) => format!("threads are NOT pinned, the system refused it: {error}"),
    }
}

/// Returns the time that a cache line takes from one core to another: the least of some tries.
fn transfer_ns() -> f64 {
    const HOPS: u32 = 1_000;
    let try_once = |_| {
        let turn = AtomicU32::new(0);
        let time = together(
            2,
            |_| (),
            |thread, ()| {
                for hop in (thread as u32..HOPS).step_by(2) {
                    let mut backoff = Backoff::default();
                    while turn.load(Acquire) != hop {
                        backoff.wait();
                    }
                    turn.store(hop + 1, Release);
                }
            },
        );
        time.as_nanos() as f64 / f64::from(HOPS)
    };
    (0..20).map(try_once).fold(f64::INFINITY, f64::min)
}

/// Runs `work` on `threads` threads, each with a result of `prepare`, all started by one barrier
/// and each [pinned](pin) if the system allows it. Returns the time of the slowest, preparation
/// excluded.
pub fn together<T>(
    threads: usize,
    prepare: impl Fn(usize) -> T + Sync,
    work: impl Fn(usize, &mut T) + Sync,
) -> Duration {
    let barrier = Barrier::new(threads);
    let run = &|thread: usize| {
        // The benches print whether it is refused.
        let _ = pin(thread);
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

//! Tools to test code that uses a pool: a model checker, and the end of a test.
//!
//! A scheduler that calls the pool from several threads has races of its own: a sequence preempted while it decodes, a
//! block counted twice, a wake-up lost. [loom](https://docs.rs/loom) runs a small piece of such code, a *model*, under
//! every interleaving of its threads, and with every value that a relaxed load may return. The pool takes part: built
//! with two `cfg`s it runs on loom's atomics, so that a model explores the races of the pool together with yours.
//!
//! # A model in a crate of your own
//!
//! `Cargo.toml` needs the pool, and the two `cfg`s if unknown ones are warned of:
//!
//! ```toml
//! [dependencies]
//! kvpool = { path = "../kvpool" }
//!
//! [lints.rust]
//! unexpected_cfgs = { level = "warn", check-cfg = ["cfg(kvpool_loom)"] }
//! ```
//!
//! The code under test takes its threads, locks and atomics from [`thread`] and [`sync`]: those of the standard library,
//! or, in a model, loom's. A scheduler of two workers over four blocks, complete:
//!
//! ```
//! use kvpool::error::AllocError;
//! use kvpool::pool::{AllocRequest, Pool};
//! use kvpool::storage::KvLayout;
//! use kvpool::testing::{self, sync::Arc, sync::atomic::{AtomicUsize, Ordering}, thread};
//!
//! /// Serves a request of so many blocks, and one more to decode into. Gives all back if the pool is exhausted.
//! fn serve(pool: &Pool, prompt: usize, finished: &AtomicUsize) {
//!     let leases: Result<Vec<_>, AllocError> =
//!         [prompt, 1].into_iter().map(|blocks| pool.allocate(AllocRequest::new(blocks))).collect();
//!     if leases.is_ok() {
//!         finished.fetch_add(1, Ordering::Relaxed);
//!     }
//! }
//!
//! testing::check("a scheduler of two workers", || {
//!     let layout = KvLayout::named("tiny").unwrap();
//!     let pool = Pool::builder(layout)
//!         .blocks(4)
//!         .segment_blocks(testing::SEGMENT_BLOCKS)
//!         .without_null_block()
//!         .without_storage()
//!         .magazine_blocks(1)
//!         .build()
//!         .unwrap();
//!     let finished = Arc::new(AtomicUsize::new(0));
//!     let worker = {
//!         let (pool, finished) = (pool.clone(), finished.clone());
//!         thread::spawn(move || serve(&pool, 2, &finished))
//!     };
//!     serve(&pool, 1, &finished);
//!     worker.join().unwrap();
//!     assert!(finished.load(Ordering::Relaxed) >= 1, "both gave up");
//!     testing::wait_for_threads(&pool, 0); // the worker's cache is gone
//!     pool.audit().unwrap();
//!     assert_eq!(pool.free_blocks(), 4);
//! });
//! ```
//!
//! ```sh
//! cargo test                                                                            # a hundred runs on real threads
//! RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom" cargo test --release --target-dir target/loom    # every execution
//! ```
//!
//! # What to know
//!
//! - *Bounds.* loom stops after 1,000 branches unless told otherwise, which one allocation exceeds; [`check`] allows
//!   50,000. It bounds the preemptions of an execution to 2: most bugs need no more, and each one more multiplies the
//!   time. [`Check`] changes both, `LOOM_MAX_PREEMPTIONS` and `LOOM_MAX_BRANCHES` raise them.
//! - *Sizes.* A pool of a model is small, has no storage, and segments of [`SEGMENT_BLOCKS`]. Inside it, words, magazines
//!   and logs are shorter than in a real build, so that four blocks reach the edges. A model has at most five threads.
//! - *Loops.* A thread that waits for another one in a loop must call [`thread::yield_now`] in it: loom runs another
//!   thread then. To await a future, use `loom::future::block_on` or a block on loom's condition variable: a future that
//!   is never woken is a deadlock, which loom reports.
//! - *Stacks.* loom gives a thread of a model a small stack. One that overflows it, as a compaction in a build without
//!   optimization does, is spawned by `thread::Builder` with a larger one; loom counts it in words.
//! - *The end.* Under loom, as with scoped threads, `join` returns before the destructors of a thread's locals have run:
//!   its cached blocks may still be on their way. [`wait_for_threads`] polls until they are back, before an audit.
//! - *Failures.* A model that fails panics in the caller of [`check`], with the message of the first failure, so that
//!   `#[should_panic(expected = "...")]` works. The execution that failed is abandoned where it stands: none of its
//!   destructors run. A panic that the model expects goes through [`catch`].
//! - *What loom does not see*: load buffering, more preemptions than the bound, the difference between `SeqCst` accesses
//!   and acquire-release ones (the pool uses explicit fences), and bytes in storage.

use std::any::Any;
use std::time::{Duration, Instant};

use crate::pool::Pool;
use crate::sync::testing;

/// Threads: `loom::thread` in a model, else `std::thread`.
pub use testing::thread;

/// Locks, atomics and reference counts: `loom::sync` in a model, else `std::sync`.
pub use testing::sync;

/// Cells whose accesses loom checks: `loom::cell` in a model, else `std::cell`.
pub use testing::cell;

/// `loom::future`: executors of a model.
#[cfg(kvpool_loom)]
pub use testing::future;

/// The smallest segment that a pool can have: 4 blocks in a model, else 64.
pub const SEGMENT_BLOCKS: usize = crate::config::FAN;

/// Explores the executions of a model, with the default bounds of [`Check`].
///
/// # Panics
///
/// With the message of the first execution that fails.
pub fn check(name: &str, model: impl Fn() + Send + Sync + 'static) -> Explored {
    Check::new(name).run(model)
}

/// A model, and how far it is to be explored.
#[derive(Clone, Debug)]
#[must_use = "a check explores nothing before it is run"]
pub struct Check {
    name: String,
    preemptions: usize,
    branches: usize,
    runs: u64,
}

/// What was explored without a failure.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Explored {
    /// Executions of the model.
    pub executions: u64,
    /// Preemptions in one execution at most; 0 on real threads, which count none.
    pub preemptions: usize,
    /// Time that it took.
    pub elapsed: Duration,
}

impl Check {
    /// A check with at most 2 preemptions and 50,000 branches in an execution; outside of a model, of 100 runs.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), preemptions: 2, branches: 50_000, runs: 100 }
    }

    /// Sets the preemptions of an execution. `LOOM_MAX_PREEMPTIONS` may ask for more, and never for less.
    pub fn preemptions(mut self, preemptions: usize) -> Self {
        self.preemptions = preemptions;
        self
    }

    /// Sets the branches of an execution. `LOOM_MAX_BRANCHES` may ask for more, and never for less.
    pub fn branches(mut self, branches: usize) -> Self {
        self.branches = branches;
        self
    }

    /// Sets how often the model runs where it is built without loom.
    pub fn runs(mut self, runs: u64) -> Self {
        self.runs = runs;
        self
    }

    /// Explores the model, and prints how many executions that were.
    ///
    /// # Panics
    ///
    /// With the message of the first execution that fails.
    pub fn run(self, model: impl Fn() + Send + Sync + 'static) -> Explored {
        let begin = Instant::now();
        let (executions, preemptions) = self.explore(model);
        let elapsed = begin.elapsed();
        println!(
            "{}: {executions} executions in {elapsed:.1?}, at most {preemptions} preemptions",
            self.name
        );
        Explored { executions, preemptions, elapsed }
    }

    #[cfg(kvpool_loom)]
    fn explore(&self, model: impl Fn() + Send + Sync + 'static) -> (u64, usize) {
        crate::sync::model::explore(self.preemptions, self.branches, model)
    }

    #[cfg(not(kvpool_loom))]
    fn explore(&self, model: impl Fn() + Send + Sync + 'static) -> (u64, usize) {
        (0..self.runs).for_each(|_| model());
        (self.runs, 0)
    }
}

/// Runs `f`, and returns its panic as an error: [`std::panic::catch_unwind`], for a panic that a model expects. Any
/// other panic of a model is a failure of it.
///
/// # Errors
///
/// The payload of the panic.
pub fn catch<R>(f: impl FnOnce() -> R) -> Result<R, Box<dyn Any + Send>> {
    #[cfg(kvpool_loom)]
    return crate::sync::model::catch(f);
    #[cfg(not(kvpool_loom))]
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f))
}

/// Waits until at most `others` threads and handles besides this thread have a cache in the pool: those that have ended
/// have given theirs back. Before an audit, because a thread's destructors may run after the end of its scope, and, in a
/// model, after `join` returned.
///
/// # Panics
///
/// After ten seconds outside of a model: a thread that is counted has not ended.
pub fn wait_for_threads(pool: &Pool, others: usize) {
    let begin = Instant::now();
    // So that this thread is certainly counted.
    drop(pool.blocks().keep_alive());
    while pool.thread_caches() > others.saturating_add(1) {
        assert!(
            cfg!(kvpool_loom) || begin.elapsed() < Duration::from_secs(10),
            "{} threads besides this one have a cache in the pool, {others} were expected",
            pool.thread_caches() - 1
        );
        thread::yield_now();
    }
}

//! Tools for testing code that uses a pool: a model checker, and a wait for the end of threads.
//!
//! A scheduler that calls the pool from several threads has races of its own: a sequence preempted
//! while it decodes, a block counted twice, a lost wake-up. [loom](https://docs.rs/loom) runs a
//! small piece of such code, a *model*, under every interleaving of its threads. A `cfg` decides
//! what it sees of the pool:
//!
//! | built with | a step of a model is | an append beside an admission, 1 preemption |
//! |---|---|---|
//! | `kvpool_loom_coarse` | a call of the pool, or an operation of the scheduler | 4 executions |
//! | `kvpool_loom`, `crossbeam_loom` | an atomic operation of either, with every value that a relaxed load may return | 290,920 executions |
//! | neither | no model: the code runs on real threads, a hundred times | |
//!
//! Use the first build for a scheduler: calls of the pool are linearizable unless documented
//! otherwise, as the pool's own models check. Use the second for code that depends on more than the
//! results of calls, such as an order of memory accesses.
//!
//! # A model in a crate of your own
//!
//! `Cargo.toml` needs the pool, and the `cfg` if the build warns of unknown ones:
//!
//! ```toml
//! [dependencies]
//! kvpool = { path = "../kvpool" }
//!
//! [lints.rust]
//! unexpected_cfgs = { level = "warn", check-cfg = ["cfg(kvpool_loom)", "cfg(kvpool_loom_coarse)"] }
//! ```
//!
//! The code under test imports its threads, locks and atomics from [`thread`] and [`sync`]: loom's
//! in a model, otherwise the standard library's. A scheduler of two workers over four blocks:
//!
//! ```
//! use kvpool::{AllocError, AllocRequest, Pool};
//! use kvpool::storage::KvLayout;
//! use kvpool::testing::{self, sync::Arc, sync::atomic::{AtomicUsize, Ordering}, thread};
//!
//! /// Serves a request of `prompt` blocks, plus one to decode into. Frees all on exhaustion.
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
//!     testing::end_exploring();
//!     testing::wait_for_threads(&pool, 0); // the worker has returned its cache
//!     pool.audit().unwrap();
//!     assert_eq!(pool.free_blocks(), 4);
//! });
//! ```
//!
//! ```sh
//! cargo test                                       # a hundred runs on real threads
//! export CARGO_TARGET_DIR=target/loom
//! RUSTFLAGS="--cfg kvpool_loom_coarse" cargo test --release                  # every order of calls
//! RUSTFLAGS="--cfg kvpool_loom --cfg crossbeam_loom" cargo test --release   # every execution
//! ```
//!
//! # What to know
//!
//! - *Bounds.* loom stops after 1,000 branches by default, which one allocation exceeds; [`check`]
//!   allows 50,000. It limits the preemptions of an execution to 2: most bugs need no more, and
//!   each additional one multiplies the time. [`Check`] changes both; `LOOM_MAX_PREEMPTIONS` and
//!   `LOOM_MAX_BRANCHES` raise them, and `LOOM_MAX_DURATION` stops a model after that many seconds.
//! - *Steps.* In a coarse build a synchronous call is one step, and so is each poll of an awaited
//!   call: everything that precedes it is visible, and no thread runs concurrently. Code that the
//!   pool calls (wakers, copiers, policies) is part of the step and must not block. loom does not
//!   see races that remain if calls are atomic: overlapping calls of two threads, and memory that
//!   only the calls order.
//! - *Sizes.* The pool of a model is small, without storage, and has segments of
//!   [`SEGMENT_BLOCKS`]. With `kvpool_loom`, its words, magazines and logs are shorter than usual,
//!   so that four blocks reach the boundary cases. A model has at most five threads.
//! - *Loops.* A thread that polls for another thread's progress must call [`thread::yield_now`] in
//!   each round: `while pool.free_blocks() == 0 { thread::yield_now() }`. loom then runs the others
//!   first; otherwise it repeats the loop until it reaches the bound of branches. It cannot tell an
//!   endless loop from a long one: prefer to await, with `loom::future::block_on` or by blocking on
//!   loom's condition variable: loom reports a future that is never woken as a deadlock.
//!   [`IntoFuture::into_future`] returns the future of a [`Wait`](crate::Wait).
//! - *Time* does not pass in a model: do not use deadlines.
//! - *Progress.* Every ten seconds a line on the standard error reports the executions so far,
//!   bypassing the test harness's capture.
//! - *Stacks.* loom's threads have a small stack. A thread that overflows it, as a compaction does
//!   in an unoptimized build, must be spawned by `thread::Builder` with a larger one (in words).
//! - *The end.* With `kvpool_loom`, and for scoped threads, `join` returns before the destructors
//!   of the thread's locals have run: the blocks in its magazines may not be back in the pool. Call
//!   [`end_exploring`] and then [`wait_for_threads`] before an audit.
//! - *Failures.* A failing model panics in the caller of [`check`], with the message of the first
//!   failure: `#[should_panic(expected = "...")]` works. The failed execution is abandoned: none of
//!   its destructors run. Use [`catch`] for a panic that the model expects.
//! - *What loom does not see*: load buffering, more preemptions than the bound, the difference
//!   between `SeqCst` and acquire-release accesses (the pool uses fences), and bytes in storage.

use std::any::Any;
use std::time::{Duration, Instant};

use crate::pool::Pool;
use crate::sync::testing;

/// Threads: `loom::thread` in a model, otherwise `std::thread`.
#[doc(no_inline)]
pub use testing::thread;

/// Locks, atomics and reference counts: `loom::sync` in a model, otherwise `std::sync`.
#[doc(no_inline)]
pub use testing::sync;

/// Cells with accesses checked by loom: `loom::cell` in a model, otherwise `std::cell`.
#[doc(no_inline)]
pub use testing::cell;

/// `loom::future`: executors of a model.
#[cfg(any(kvpool_loom, kvpool_loom_coarse))]
pub use testing::future;

/// Smallest segment of a pool: 4 blocks with `kvpool_loom`, otherwise 64.
pub const SEGMENT_BLOCKS: usize = crate::config::FAN;

/// Explores the executions of a model within the default bounds of [`Check`].
///
/// # Panics
/// With the message of the first failing execution.
pub fn check(name: &str, model: impl Fn() + Send + Sync + 'static) -> Explored {
    Check::new(name).run(model)
}

/// Bounds for exploring a model.
#[derive(Clone, Debug)]
#[must_use = "a check explores nothing before it is run"]
pub struct Check {
    name: String,
    preemptions: usize,
    branches: usize,
    runs: u64,
}

/// Extent of an exploration that found no failure.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Explored {
    /// Number of executions.
    pub executions: u64,
    /// Maximum number of preemptions per execution; 0 on real threads, where they are not counted.
    pub preemptions: usize,
    /// Elapsed time.
    pub elapsed: Duration,
}

impl Check {
    /// Creates a check of at most 2 preemptions and 50,000 branches, or of 100 runs without loom.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), preemptions: 2, branches: 50_000, runs: 100 }
    }

    /// Sets the maximum number of preemptions. `LOOM_MAX_PREEMPTIONS` can only raise it.
    pub fn preemptions(mut self, preemptions: usize) -> Self {
        self.preemptions = preemptions;
        self
    }

    /// Sets the maximum number of branches. `LOOM_MAX_BRANCHES` can only raise it.
    pub fn branches(mut self, branches: usize) -> Self {
        self.branches = branches;
        self
    }

    /// Sets the number of runs in a build without loom.
    pub fn runs(mut self, runs: u64) -> Self {
        self.runs = runs;
        self
    }

    /// Explores the model and prints the number of executions.
    ///
    /// # Panics
    /// With the message of the first failing execution.
    pub fn run(self, model: impl Fn() + Send + Sync + 'static) -> Explored {
        let begin = Instant::now();
        let (executions, preemptions) = self.explore(model);
        let elapsed = begin.elapsed();
        let stopped = if is_stopped(elapsed) { "; stopped by LOOM_MAX_DURATION" } else { "" };
        println!(
            "{}: {executions} executions in {elapsed:.1?}, at most {preemptions} preemptions{stopped}",
            self.name
        );
        Explored { executions, preemptions, elapsed }
    }

    #[cfg(any(kvpool_loom, kvpool_loom_coarse))]
    fn explore(&self, model: impl Fn() + Send + Sync + 'static) -> (u64, usize) {
        crate::sync::model::explore(&self.name, self.preemptions, self.branches, model)
    }

    #[cfg(not(any(kvpool_loom, kvpool_loom_coarse)))]
    fn explore(&self, model: impl Fn() + Send + Sync + 'static) -> (u64, usize) {
        (0..self.runs).for_each(|_| model());
        (self.runs, 0)
    }
}

/// Returns whether loom has stopped before it explored everything: it looks between executions.
fn is_stopped(elapsed: Duration) -> bool {
    let most = std::env::var("LOOM_MAX_DURATION").ok().and_then(|seconds| seconds.parse().ok());
    most.is_some_and(|seconds| elapsed >= Duration::from_secs(seconds))
}

/// Runs `f` and returns its panic as an error, as [`std::panic::catch_unwind`] does. For panics
/// that a model expects: any other panic of a model is a failure.
///
/// # Errors
/// The payload of the panic.
pub fn catch<R>(f: impl FnOnce() -> R) -> Result<R, Box<dyn Any + Send>> {
    #[cfg(any(kvpool_loom, kvpool_loom_coarse))]
    return crate::sync::model::catch(f);
    #[cfg(not(any(kvpool_loom, kvpool_loom_coarse)))]
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f))
}

/// Ends the explored part of a model: each execution continues in one order. Only under loom.
///
/// Call it after the last join, before the checks at the end of a model. Exploring each step of the
/// destructors that run after `join` against each step of the checks multiplies the executions. The
/// destructors are still explored against each other, and against all that precedes this call.
pub fn end_exploring() {
    #[cfg(any(kvpool_loom, kvpool_loom_coarse))]
    testing::skip_branch();
}

/// Waits until at most `others` threads besides this one have magazines in the pool. A thread's
/// destructors, which return them, may run after its scope, and, in a model, after `join`.
///
/// # Panics
/// After ten seconds, outside of a model, if too many threads still have a cache.
pub fn wait_for_threads(pool: &Pool, others: usize) {
    let begin = Instant::now();
    // Ensures that this thread is counted.
    drop(pool.blocks().keep_alive());
    while pool.thread_caches() > others.saturating_add(1) {
        assert!(
            cfg!(any(kvpool_loom, kvpool_loom_coarse)) || begin.elapsed() < Duration::from_secs(10),
            "{} threads besides this one have a cache in the pool; at most {others} expected",
            pool.thread_caches() - 1
        );
        thread::yield_now();
    }
}

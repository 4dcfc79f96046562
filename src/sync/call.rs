//! Calls of the pool as single steps of a model, in a build with `--cfg kvpool_loom_coarse`.
//!
//! The pool then runs on the standard library's atomics, as for users. loom neither sees nor
//! interrupts these, and runs all threads of a model on one system thread. Each call is therefore
//! atomic, provided that loom does not switch threads inside:
//!
//! ```text
//! call    change one counter, a step of its own;  stop exploring
//!         (all that the pool does, and the wakers and copiers that it calls)
//! end     explore again
//! ```
//!
//! loom switches threads at its own operations only. Between the two lines it explores no
//! alternative to the running thread, and moves each alternative that a conflict inside requires to
//! the step before. The counter makes any two calls conflict: every order of calls is explored, and
//! a call sees all that precedes it. A call must not block, nor must user code that it calls. Each
//! poll of a future is one call.

#[cfg(not(kvpool_loom_coarse))]
mod imp {
    pub(crate) struct Call;

    #[inline(always)]
    pub(crate) fn call() -> Call {
        Call
    }

    #[inline(always)]
    pub(crate) fn calls<F: Future>(future: F) -> F {
        future
    }
}

#[cfg(kvpool_loom_coarse)]
mod imp {
    use std::cell::Cell;

    use loom::sync::atomic::{AtomicUsize, Ordering::AcqRel};

    loom::lazy_static! {
        static ref CALLS: AtomicUsize = AtomicUsize::new(0);
    }

    thread_local! {
        /// Number of nested calls; `None` outside of an execution.
        static DEPTH: Cell<Option<usize>> = const { Cell::new(None) };
    }

    pub(crate) struct Call(());

    /// Begins a call of the pool; an inner call is part of the outer one's step.
    pub(crate) fn call() -> Call {
        if DEPTH.get() == Some(0) {
            CALLS.fetch_add(1, AcqRel);
            loom::stop_exploring();
        }
        DEPTH.set(DEPTH.get().map(|depth| depth + 1));
        Call(())
    }

    impl Drop for Call {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get().map(|depth| depth - 1));
            if DEPTH.get() == Some(0) {
                loom::explore();
            }
        }
    }

    pub(crate) fn calls<F: Future>(future: F) -> impl Future<Output = F::Output> {
        let mut future = Box::pin(future);
        std::future::poll_fn(move |context| {
            let _call = call();
            future.as_mut().poll(context)
        })
    }

    pub(crate) fn execution(model: impl FnOnce()) {
        DEPTH.set(Some(0));
        model();
        DEPTH.set(None);
    }
}

#[cfg(kvpool_loom_coarse)]
pub(super) use imp::execution;
pub(crate) use imp::{call, calls};

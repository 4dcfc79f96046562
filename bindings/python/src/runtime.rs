//! The extension's tokio runtime, and calls that wait on it.

use std::future::Future;
use std::pin::Pin;
use std::ptr::null_mut;
use std::sync::atomic::{
    AtomicPtr,
    Ordering::{AcqRel, Acquire},
};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3_async_runtimes::TaskLocals;
use pyo3_async_runtimes::generic;
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinError, JoinHandle};

use crate::error::Outcome;
use crate::process::Process;

/// Threads that poll futures. They do little work: copies run on tokio's blocking threads.
const THREADS: usize = 2;

/// Time between two looks at pending signals in a call that waits.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

struct Made {
    process: Process,
    runtime: Runtime,
}

/// The runtime, of this process or of the one that it is a fork of. Never freed: its threads end
/// with the process.
static MADE: AtomicPtr<Made> = AtomicPtr::new(null_mut());

/// Returns the runtime. The first call in each process starts it.
pub fn runtime() -> &'static Runtime {
    // Acquire: pairs with the Release of the exchange below.
    let mut seen = MADE.load(Acquire);
    loop {
        // SAFETY: null, or leaked by the exchange below.
        if let Some(made) = unsafe { seen.as_ref() }.filter(|made| made.process == Process::current()) {
            return &made.runtime;
        }
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(THREADS).thread_name("kvpool-python").enable_all();
        let runtime = builder.build().expect("the system starts two threads");
        let made = Box::into_raw(Box::new(Made { process: Process::current(), runtime }));
        // Release: publishes the runtime. Acquire: of the other thread's, if that was faster.
        match MADE.compare_exchange(seen, made, AcqRel, Acquire) {
            Ok(_) => seen = made,
            Err(other) => {
                // SAFETY: made above, and not published.
                drop(unsafe { Box::from_raw(made) });
                seen = other;
            }
        }
    }
}

/// Waits for a future without the GIL. Ctrl-C and other signals end the wait: the future is dropped.
pub fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> Outcome<T> {
    let mut future = Box::pin(future);
    loop {
        let ready = py.detach(|| {
            runtime().block_on(async { tokio::time::timeout(SIGNALS_EVERY, future.as_mut()).await.ok() })
        });
        match ready {
            Some(value) => return Ok(value),
            None => py.check_signals()?,
        }
    }
}

tokio::task_local! {
    static LOCALS: TaskLocals;
}

/// The runtime, for the bridge to asyncio.
pub struct Bridge;

/// The error of a task.
pub struct Ended(JoinError);

impl generic::JoinError for Ended {
    fn is_panic(&self) -> bool {
        self.0.is_panic()
    }

    fn into_panic(self) -> Box<dyn std::any::Any + Send + 'static> {
        self.0.into_panic()
    }
}

/// A task of the bridge.
pub struct Task(JoinHandle<()>);

impl Future for Task {
    type Output = Result<(), Ended>;

    fn poll(mut self: Pin<&mut Self>, context: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context).map_err(Ended)
    }
}

impl generic::Runtime for Bridge {
    type JoinError = Ended;
    type JoinHandle = Task;

    fn spawn<F: Future<Output = ()> + Send + 'static>(future: F) -> Task {
        Task(runtime().spawn(future))
    }

    fn spawn_blocking<F: FnOnce() + Send + 'static>(f: F) -> Task {
        Task(runtime().spawn_blocking(f))
    }
}

impl generic::ContextExt for Bridge {
    fn scope<F, R>(locals: TaskLocals, future: F) -> Pin<Box<dyn Future<Output = R> + Send>>
    where
        F: Future<Output = R> + Send + 'static,
    {
        Box::pin(LOCALS.scope(locals, future))
    }

    fn get_task_locals() -> Option<TaskLocals> {
        LOCALS.try_with(Clone::clone).ok()
    }
}

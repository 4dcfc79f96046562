//! The extension's tokio runtime, and calls that wait on it.

use std::future::Future;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering::*};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread, ThreadId};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use tokio::runtime::{Builder, Handle, Runtime};

use crate::error::{Outcome, fields, raise};
use crate::process::Process;

/// Threads that poll futures. They do little work: copies run on tokio's blocking threads.
const THREADS: usize = 2;

/// Time that the end of the interpreter gives to copies that are under way.
const PATIENCE: Duration = Duration::from_secs(2);

/// Time between two looks at pending signals in a call that waits.
const SIGNALS_EVERY: Duration = Duration::from_millis(50);

struct Made {
    process: Process,
    handle: Handle,
    /// Taken by the end of the interpreter.
    runtime: Mutex<Option<Runtime>>,
    /// Held by calls of Python from other threads, and then by the end of the interpreter: a thread
    /// must not return to Python after it.
    calls: RwLock<()>,
}

/// The runtime, of this process or of the one that it is a fork of. Never freed: any thread may be
/// using it.
static MADE: AtomicPtr<Made> = AtomicPtr::new(null_mut());

/// The thread that ended the interpreter.
static ENDED_BY: OnceLock<ThreadId> = OnceLock::new();

/// Set when the interpreter ends: no future is polled from then on.
static ENDING: AtomicBool = AtomicBool::new(false);

fn made() -> Outcome<&'static Made> {
    // Acquire: pairs with the Release of the exchange below.
    let mut seen = MADE.load(Acquire);
    loop {
        // SAFETY: null, or leaked by the exchange below.
        if let Some(made) = unsafe { seen.as_ref() }.filter(|made| made.process == Process::current()) {
            return Ok(made);
        }
        let mut builder = Builder::new_multi_thread();
        builder.worker_threads(THREADS).thread_name("kvpool-python").enable_all();
        let runtime = builder.build().map_err(|error| {
            let message = format!("cannot start the threads of the package: {error}");
            raise("KvPoolError", message, fields![kind: "NoThreads"])
        })?;
        let handle = runtime.handle().clone();
        let made = Made {
            process: Process::current(),
            handle,
            runtime: Mutex::new(Some(runtime)),
            calls: RwLock::default(),
        };
        let made = Box::into_raw(Box::new(made));
        // Release: publishes the runtime. Acquire: of the other thread's, if that was faster.
        match MADE.compare_exchange(seen, made, AcqRel, Acquire) {
            Ok(_) => seen = made,
            Err(other) => {
                // SAFETY: made above, and not published.
                let made = unsafe { Box::from_raw(made) };
                let runtime = made.runtime.into_inner().unwrap_or_else(PoisonError::into_inner);
                runtime.into_iter().for_each(Runtime::shutdown_background);
                seen = other;
            }
        }
    }
}

/// Returns the runtime. The first call in each process starts it.
pub fn runtime() -> Outcome<&'static Handle> {
    Ok(&made()?.handle)
}

/// Calls Python from another thread; the end of the interpreter waits for the call. `None`: it has
/// begun.
pub fn call_python<R>(call: impl FnOnce(Python<'_>) -> R) -> Option<R> {
    let made = made().ok()?;
    let _call = made.calls.read().unwrap_or_else(PoisonError::into_inner);
    // Acquire: pairs with the Release of the end, which then waits for the lock.
    if ENDING.load(Acquire) { None } else { Python::try_attach(call) }
}

/// Ends the runtime at the end of the interpreter: a thread that delivered a result later would find
/// none. Futures are dropped where they wait.
#[pyfunction]
fn end_runtime(py: Python<'_>) {
    // SAFETY: null, or leaked by `made`.
    let Some(made) = (unsafe { MADE.load(Acquire).as_ref() }) else { return };
    if made.process != Process::current() {
        return;
    }
    let _ = ENDED_BY.set(thread::current().id());
    // Release: pairs with the Acquire in `wait`, of a thread that a timer of the runtime wakes.
    ENDING.store(true, Release);
    let runtime = made.runtime.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(runtime) = runtime {
        // Without the GIL, for which a thread of the runtime may be waiting.
        py.detach(|| {
            // Not longer: a call may itself wait for the thread that ends the interpreter.
            let until = Instant::now() + PATIENCE;
            while made.calls.try_write().is_err() && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            runtime.shutdown_timeout(PATIENCE);
        });
    }
}

/// Has the runtime ended with the interpreter.
pub fn end_with(py: Python<'_>) -> PyResult<()> {
    let end = wrap_pyfunction!(end_runtime, py)?;
    py.import("atexit")?.call_method1("register", (end,))?;
    Ok(())
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// What a wait without the GIL came to.
enum Waited<T> {
    Ready(T),
    Pending,
    Ended,
}

/// Waits for a future without the GIL. Ctrl-C and other signals end the wait: the future is dropped.
pub fn wait<T: Send>(py: Python<'_>, future: impl Future<Output = T> + Send) -> Outcome<T> {
    let handle = runtime()?;
    let mut future = Box::pin(future);
    loop {
        let ready = py.detach(|| {
            let _runtime = handle.enter();
            let waker = Waker::from(Arc::new(Unpark(thread::current())));
            let mut context = Context::from_waker(&waker);
            let until = Instant::now() + SIGNALS_EVERY;
            loop {
                // Acquire: pairs with the Release of the end.
                while ENDING.load(Acquire) {
                    if ENDED_BY.get() == Some(&thread::current().id()) {
                        // Finalizers that the interpreter runs later.
                        return Waited::Ended;
                    }
                    // A daemon thread, of which Python lets none return.
                    thread::park();
                }
                if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
                    return Waited::Ready(value);
                }
                let rest = until.saturating_duration_since(Instant::now());
                if rest.is_zero() {
                    return Waited::Pending;
                }
                thread::park_timeout(rest);
            }
        });
        match ready {
            Waited::Ready(value) => return Ok(value),
            Waited::Pending => py.check_signals()?,
            Waited::Ended => return Err(raise("Closed", "the interpreter is ending", Vec::new())),
        }
    }
}

//! A call that waits on asyncio.
//!
//! The future of the call, and then its result, stay in a slot:
//!
//! ```text
//! task of the runtime:   poll the slot's future ... store its result ... wake the event loop
//! thread of the loop:    take the result, or, on a cancellation, drop what is in the slot
//! ```
//!
//! So a cancellation has taken effect before the awaiting task sees it, and a result that arrives
//! at the same time is dropped, and not lost. The future of asyncio only wakes the task.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use tokio::task::AbortHandle;

use crate::error::{Failure, Outcome, fields, raise};
use crate::runtime::runtime;

enum Stage<T> {
    Runs(Pin<Box<dyn Future<Output = Outcome<T>> + Send>>),
    Ready(Outcome<T>),
    Over,
}

struct Slot<T>(Mutex<Stage<T>>);

impl<T: Send> Slot<T> {
    fn lock(&self) -> MutexGuard<'_, Stage<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes out what is there. The thread that polls may hold the lock while it waits for the GIL.
    fn empty(&self, py: Python<'_>) -> Stage<T> {
        let mut stage = match self.0.try_lock() {
            Ok(stage) => stage,
            Err(_) => return py.detach(|| std::mem::replace(&mut *self.lock(), Stage::Over)),
        };
        std::mem::replace(&mut *stage, Stage::Over)
    }
}

/// A slot, whatever its result is.
trait Held: Send + Sync {
    /// Takes the result out.
    fn take(&self, py: Python<'_>) -> Outcome<Py<PyAny>>;

    /// Drops the future or the result.
    fn withdraw(&self, py: Python<'_>);
}

impl<T: for<'py> IntoPyObject<'py> + Send> Held for Slot<T> {
    fn take(&self, py: Python<'_>) -> Outcome<Py<PyAny>> {
        match self.empty(py) {
            Stage::Ready(outcome) => Ok(outcome?.into_py_any(py)?),
            Stage::Runs(_) | Stage::Over => {
                Err(PyRuntimeError::new_err("the call was resumed before it had ended").into())
            }
        }
    }

    fn withdraw(&self, py: Python<'_>) {
        let stage = self.empty(py);
        if !matches!(stage, Stage::Over) {
            py.detach(|| {
                // Some futures begin tasks when they are dropped.
                let _runtime = runtime().map(|runtime| runtime.enter());
                drop(stage);
            });
        }
    }
}

/// Polls the future of a slot until it is ready or withdrawn. Dropped with the runtime, it drops
/// the future.
struct Polls<T: Send>(Arc<Slot<T>>);

impl<T: Send> Future for Polls<T> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut stage = self.0.lock();
        let Stage::Runs(future) = &mut *stage else { return Poll::Ready(()) };
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context)));
        *stage = Stage::Ready(match polled {
            Ok(polled) => ready!(polled),
            Err(panic) => Err(panicked(&*panic)),
        });
        Poll::Ready(())
    }
}

impl<T: Send> Drop for Polls<T> {
    fn drop(&mut self) {
        let mut stage = self.0.lock();
        if matches!(&*stage, Stage::Runs(_)) {
            *stage = Stage::Over;
        }
    }
}

fn panicked(panic: &(dyn Any + Send)) -> Failure {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    let message = format!("the call panicked: {}", text.unwrap_or("without a message"));
    raise("KvPoolError", message, fields![kind: "Panicked"])
}

/// Wakes the task that awaits a future, unless the future was cancelled.
#[pyfunction]
fn wake(future: &Bound<'_, PyAny>) -> PyResult<()> {
    if !is_done(future.py(), future.as_unbound())? {
        future.call_method1("set_result", (future.py().None(),))?;
    }
    Ok(())
}

fn wake_soon(py: Python<'_>, event_loop: &Py<PyAny>, future: Py<PyAny>) -> PyResult<()> {
    let wake = wrap_pyfunction!(wake, py)?;
    event_loop.call_method1(py, "call_soon_threadsafe", (wake, future)).map(drop)
}

/// Returns whether a future has its result, or was cancelled.
pub fn is_done(py: Python<'_>, future: &Py<PyAny>) -> PyResult<bool> {
    future.call_method0(py, "done")?.is_truthy(py)
}

/// The wait of one call. Dropping it ends the wait.
pub struct Waiter {
    held: Arc<dyn Held>,
    polling: AbortHandle,
    event_loop: Py<PyAny>,
    /// The future of asyncio, and its iterator.
    waking: Py<PyAny>,
    iterator: Py<PyAny>,
}

impl Waiter {
    /// Begins to wait, on the event loop that runs on this thread.
    pub fn new<T>(py: Python<'_>, future: impl Future<Output = Outcome<T>> + Send + 'static) -> Outcome<Self>
    where
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        let runtime = runtime()?;
        let event_loop = py.import("asyncio")?.call_method0("get_running_loop")?;
        let waking = event_loop.call_method0("create_future")?;
        let iterator = waking.call_method0("__await__")?.unbind();
        let (event_loop, waking) = (event_loop.unbind(), waking.unbind());
        let (of, awaited) = (event_loop.clone_ref(py), waking.clone_ref(py));
        let held = Arc::new(Slot(Mutex::new(Stage::Runs(Box::pin(future)))));
        let polls = Polls(Arc::clone(&held));
        let task = runtime.spawn(async move {
            polls.await;
            // On another thread: this one waits for no GIL. A closed loop has no task to wake.
            let woken = move || Python::attach(|py| wake_soon(py, &of, awaited));
            let _ = tokio::task::spawn_blocking(woken).await;
        });
        Ok(Self { held, polling: task.abort_handle(), event_loop, waking, iterator })
    }

    /// Returns the future of asyncio.
    pub fn waking(&self) -> &Py<PyAny> {
        &self.waking
    }

    /// Returns what the coroutine yields. `StopIteration`: the result is there.
    pub fn next(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.iterator.call_method0(py, "__next__")
    }

    /// Ends the wait. A task that awaits the call, other than the one that ends it, is resumed, and
    /// learns that the call is over.
    pub fn end(self, py: Python<'_>) {
        let (event_loop, waking) = (self.event_loop.clone_ref(py), self.waking.clone_ref(py));
        drop(self);
        if let Ok(false) = is_done(py, &waking) {
            // A closed loop has no task to wake.
            let _ = wake_soon(py, &event_loop, waking);
        }
    }

    /// Returns the result.
    pub fn result(self, py: Python<'_>) -> Outcome<Py<PyAny>> {
        self.held.take(py)
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        // Nothing polls a future that was dropped.
        self.polling.abort();
        Python::attach(|py| self.held.withdraw(py));
    }
}

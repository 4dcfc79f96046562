//! Awaitable calls: coroutines in the sense of asyncio.

use std::future::Future;
use std::mem::ManuallyDrop;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning, PyStopIteration};
use pyo3::prelude::*;

use crate::error::Outcome;
use crate::process::Process;
use crate::runtime::{runtime, wait};
use crate::waiter::{Waiter, is_done};

/// How a call is made: awaited in asyncio, or by a thread that waits for it.
#[derive(Clone, Copy)]
pub struct Caller<'py> {
    pub py: Python<'py>,
    blocks: bool,
}

/// What a call came to when it was made.
pub enum Begun {
    /// It has its result.
    Ready(Py<PyAny>),
    /// It waits.
    Waits(Waiter),
}

impl Caller<'_> {
    /// Polls a future once, and begins to wait for it unless it is ready.
    pub fn start<T>(self, future: impl Future<Output = Outcome<T>> + Send + 'static) -> Outcome<Begun>
    where
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        if self.blocks {
            return self.waits(future);
        }
        let mut future = Box::pin(future);
        let polled = {
            let _runtime = runtime()?.enter();
            future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        };
        match polled {
            Poll::Ready(value) => Ok(Begun::Ready(value?.into_py_any(self.py)?)),
            // The task polls it again, and so replaces the waker.
            Poll::Pending => self.waits(future),
        }
    }

    /// Begins to wait for a future, which a task of the extension's runtime polls. A thread waits
    /// for it here, without the GIL.
    pub fn waits<T>(self, future: impl Future<Output = Outcome<T>> + Send + 'static) -> Outcome<Begun>
    where
        T: for<'py> IntoPyObject<'py> + Send + 'static,
    {
        if self.blocks {
            return Ok(Begun::Ready(wait(self.py, future)??.into_py_any(self.py)?));
        }
        Ok(Begun::Waits(Waiter::new(self.py, future)?))
    }
}

type First = Box<dyn FnOnce(Caller<'_>) -> Outcome<Begun> + Send>;

enum State {
    New(First),
    Waiting(Waiter),
    Done,
}

/// A call to be awaited. Nothing happens before it is awaited; then it is tried at once, and waits
/// only if it must. [`wait`](Self::wait) makes the same call on a thread without asyncio. A call
/// that is dropped before either is a `RuntimeWarning`.
///
/// It has the interface of a coroutine, so that `await`, `asyncio.create_task`, `gather`,
/// `wait_for` and task groups take it.
#[pyclass(frozen, name = "Call", module = "kvpool._kvpool")]
pub struct Call {
    made_in: Process,
    state: ManuallyDrop<Mutex<State>>,
}

impl Call {
    /// Makes a call of the function that tries it, and begins to wait.
    pub fn new(first: impl FnOnce(Caller<'_>) -> Outcome<Begun> + Send + 'static) -> Self {
        let state = ManuallyDrop::new(Mutex::new(State::New(Box::new(first))));
        Self { made_in: Process::current(), state }
    }

    fn replace(&self, state: State) -> State {
        std::mem::replace(&mut *self.state.lock().unwrap_or_else(PoisonError::into_inner), state)
    }

    /// Takes the state, in the process that made the call.
    fn take(&self) -> Outcome<State> {
        self.made_in.check()?;
        Ok(self.replace(State::Done))
    }

    /// Refuses to resume a call that another task awaits: the loop resumes a task when the future
    /// that it yielded is done.
    fn check_awaited(&self, py: Python<'_>) -> PyResult<()> {
        self.made_in.check()?;
        let waking = match &*self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::Waiting(waiter) => waiter.waking().clone_ref(py),
            State::New(_) | State::Done => return Ok(()),
        };
        if is_done(py, &waking)? { Ok(()) } else { Err(awaited()) }
    }

    fn end(&self, py: Python<'_>) -> PyResult<()> {
        if let State::Waiting(waiter) = self.take()? {
            waiter.end(py);
        }
        Ok(())
    }

    /// Yields to the event loop, or ends with the result.
    fn resume(&self, py: Python<'_>, waiter: Waiter) -> PyResult<Py<PyAny>> {
        match waiter.next(py) {
            Ok(yielded) => {
                self.replace(State::Waiting(waiter));
                Ok(yielded)
            }
            Err(end) if end.is_instance_of::<PyStopIteration>(py) => {
                Err(PyStopIteration::new_err((waiter.result(py)?,)))
            }
            Err(error) => Err(error),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        // A fork's copy refers to pools of the parent.
        if self.made_in == Process::current() {
            // SAFETY: taken once, here.
            let state = unsafe { ManuallyDrop::take(&mut self.state) };
            if let State::New(_) = state.into_inner().unwrap_or_else(PoisonError::into_inner) {
                Python::try_attach(warn_unused);
            }
        }
    }
}

#[pymethods]
impl Call {
    fn __await__(slf: PyRef<'_, Self>) -> PyResult<PyRef<'_, Self>> {
        slf.made_in.check()?;
        let refused = match &*slf.state.lock().unwrap_or_else(PoisonError::into_inner) {
            State::New(_) => None,
            State::Waiting(_) => Some(awaited()),
            State::Done => Some(reused()),
        };
        refused.map_or(Ok(slf), Err)
    }

    fn __iter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.check_awaited(py)?;
        match self.take()? {
            State::New(first) => match first(Caller { py, blocks: false })? {
                Begun::Ready(value) => Err(PyStopIteration::new_err((value,))),
                Begun::Waits(waiter) => self.resume(py, waiter),
            },
            State::Waiting(waiter) => self.resume(py, waiter),
            State::Done => Err(reused()),
        }
    }

    /// Makes the call instead of awaiting it: blocks this thread without the GIL until it ends. A
    /// signal ends the wait, like a cancellation. On the thread of an event loop it blocks the
    /// loop: await the call there.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let first = match self.take()? {
            State::New(first) => first,
            other => {
                self.replace(other);
                return Err(reused());
            }
        };
        match first(Caller { py, blocks: true })? {
            Begun::Ready(value) => Ok(value),
            Begun::Waits(_) => unreachable!("a caller that blocks waits in the call"),
        }
    }

    /// Resumes the coroutine.
    #[pyo3(signature = (value, /))]
    fn send(&self, py: Python<'_>, value: Py<PyAny>) -> PyResult<Py<PyAny>> {
        let _ = value;
        self.__next__(py)
    }

    /// Raises an exception inside of the coroutine, for example a cancellation. What it waits for
    /// is dropped first, together with a result that it did not take: blocks are free again when
    /// the task sees the exception.
    #[pyo3(signature = (kind, value=None, traceback=None))]
    fn throw(
        &self,
        py: Python<'_>,
        kind: Py<PyAny>,
        value: Option<Py<PyAny>>,
        traceback: Option<Py<PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let _ = traceback;
        let error = match value {
            Some(value) if !value.is_none(py) => value.into_bound(py),
            _ => kind.into_bound(py),
        };
        self.end(py)?;
        let error = if error.is_callable() { error.call0()? } else { error };
        Err(PyErr::from_value(error))
    }

    /// Ends the coroutine: what it waits for is dropped.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.end(py)
    }
}

/// Warns about a call that was dropped before it was made, unless an exception is being raised.
fn warn_unused(py: Python<'_>) {
    let category = py.get_type::<PyRuntimeWarning>();
    if !PyErr::occurred(py)
        && let Err(error) = PyErr::warn(py, &category, c"call was never awaited", 1)
    {
        error.write_unraisable(py, None);
    }
}

fn reused() -> PyErr {
    PyRuntimeError::new_err("cannot reuse already awaited coroutine")
}

fn awaited() -> PyErr {
    PyRuntimeError::new_err("call is being awaited already")
}

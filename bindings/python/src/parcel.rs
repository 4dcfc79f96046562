//! Results of awaited calls that must not be lost: where the call is cancelled while its result is
//! under way, the result goes back to where it came from.

use std::collections::VecDeque;
use std::future::Future;
use std::mem::ManuallyDrop;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::{Either, select};
use pyo3::prelude::*;
use tokio::sync::Notify;

use crate::process::Process;

/// A result under way. Dropping it takes back what the call did.
pub trait Contents: Send + Sync {
    /// Turns it into what the caller gets; from here on the result is the caller's.
    fn deliver(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>>;
}

/// Carries a result to the task that awaits it, which opens it.
#[pyclass(frozen, module = "kvpool._kvpool")]
pub struct Parcel {
    made_in: Process,
    contents: ManuallyDrop<Mutex<Option<Box<dyn Contents>>>>,
}

impl Parcel {
    /// Wraps a result.
    pub fn new(contents: impl Contents + 'static) -> Self {
        let contents: Box<dyn Contents> = Box::new(contents);
        Self { made_in: Process::current(), contents: ManuallyDrop::new(Mutex::new(Some(contents))) }
    }

    /// Returns the result, if it was not taken before.
    pub fn open(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.made_in.check()?;
        let contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner).take();
        contents.map_or_else(|| Ok(py.None()), |contents| contents.deliver(py))
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        // What the parent of a fork did is the parent's to take back.
        if self.made_in == Process::current() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.contents) }
        }
    }
}

/// Values that came back, before those that are still to be received.
pub struct Returned<T> {
    values: Mutex<VecDeque<T>>,
    /// One of those that wait to receive is notified of each.
    notify: Notify,
}

impl<T> Default for Returned<T> {
    fn default() -> Self {
        Self { values: Mutex::default(), notify: Notify::new() }
    }
}

impl<T> Returned<T> {
    /// Takes the oldest value that came back.
    pub fn take(&self) -> Option<T> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    fn put(&self, value: T) {
        self.values.lock().unwrap_or_else(PoisonError::into_inner).push_back(value);
        self.notify.notify_one();
    }

    /// Receives by `next`, unless a value came back or comes back meanwhile.
    pub async fn or_next<F: Future<Output = Option<T>>>(&self, next: impl Fn() -> F) -> Option<T> {
        loop {
            // Made before the look: a value that comes back between the two has notified it.
            let returned = pin!(self.notify.notified());
            if let Some(value) = self.take() {
                return Some(value);
            }
            match select(returned, pin!(next())).await {
                Either::Left(_) => {}
                Either::Right((Some(value), _)) => return Some(value),
                // The last one may have come back at the same time.
                Either::Right((None, _)) => return self.take(),
            }
        }
    }
}

/// A received value. Dropping it puts it back.
pub struct Received<T> {
    value: Option<T>,
    returned: Arc<Returned<T>>,
}

impl<T> Received<T> {
    /// Wraps a value that was received.
    pub fn new(value: T, returned: &Arc<Returned<T>>) -> Self {
        Self { value: Some(value), returned: Arc::clone(returned) }
    }
}

impl<T> Contents for Received<T>
where
    T: Send + Sync + for<'py> IntoPyObject<'py>,
{
    fn deliver(mut self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        match self.value.take() {
            Some(value) => pyo3::IntoPyObjectExt::into_py_any(value, py),
            None => Ok(py.None()),
        }
    }
}

impl<T> Drop for Received<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.returned.put(value);
        }
    }
}

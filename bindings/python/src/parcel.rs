//! Results of awaited calls that must not be lost: where the call is cancelled while its result is
//! under way, the result goes back to where it came from.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;

/// A result under way. Dropping it takes back what the call did.
pub trait Contents: Send + Sync {
    /// Turns it into what the caller gets; from here on the result is the caller's.
    fn deliver(self: Box<Self>, py: Python<'_>) -> PyResult<Py<PyAny>>;
}

/// Carries a result to the task that awaits it, which opens it.
#[pyclass(frozen, module = "kvpool._kvpool")]
pub struct Parcel(Mutex<Option<Box<dyn Contents>>>);

impl Parcel {
    /// Wraps a result.
    pub fn new(contents: impl Contents + 'static) -> Self {
        Self(Mutex::new(Some(Box::new(contents))))
    }

    /// Returns the result, if it was not taken before.
    pub fn open(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let contents = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        contents.map_or_else(|| Ok(py.None()), |contents| contents.deliver(py))
    }
}

/// Values that came back, before those that are still to be received.
pub type Returned<T> = Arc<Mutex<VecDeque<T>>>;

/// A received value. Dropping it puts it back.
pub struct Received<T> {
    value: Option<T>,
    returned: Returned<T>,
}

impl<T> Received<T> {
    /// Wraps a value that was received.
    pub fn new(value: T, returned: &Returned<T>) -> Self {
        Self { value: Some(value), returned: Arc::clone(returned) }
    }
}

/// Takes the oldest value that came back.
pub fn take_back<T>(returned: &Returned<T>) -> Option<T> {
    returned.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
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
            self.returned.lock().unwrap_or_else(PoisonError::into_inner).push_back(value);
        }
    }
}

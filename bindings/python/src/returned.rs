//! Received values that must not be lost: if the call is cancelled that received one, the value
//! goes back to where it came from.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::{Either, select};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use tokio::sync::Notify;

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

/// From here on the value is the caller's.
impl<'py, T: IntoPyObject<'py>> IntoPyObject<'py> for Received<T> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(mut self, py: Python<'py>) -> PyResult<Self::Output> {
        self.value.take().into_bound_py_any(py)
    }
}

impl<T> Drop for Received<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.returned.put(value);
        }
    }
}

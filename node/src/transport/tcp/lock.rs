//! Mutexes of the transport.

use std::sync::{Mutex, PoisonError};

/// Locks a mutex whose data are consistent at any point where a holder may panic.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

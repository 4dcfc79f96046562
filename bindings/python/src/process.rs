//! Use after `fork()`: a child process has the parent's objects, but neither its threads nor the
//! right to its memory.

use std::mem::ManuallyDrop;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::error::{Failure, fields, raise};

/// Process id of this process, as of the module's import or of the last fork. A load instead of a
/// system call, because every call reads it.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Starts to follow forks. Called when the module is initialized.
pub fn follow_forks() {
    static ONCE: Once = Once::new();
    extern "C" fn in_child() {
        PROCESS.store(std::process::id(), Relaxed);
    }
    ONCE.call_once(|| {
        PROCESS.store(std::process::id(), Relaxed);
        // SAFETY: the handler makes one system call and one atomic store: safe after a fork.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

/// The process that made an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Process(u32);

impl Process {
    /// Returns the current process.
    pub fn current() -> Self {
        // Relaxed: the handler stores before the child has a second thread.
        Self(PROCESS.load(Relaxed))
    }

    /// Refuses an object of another process.
    #[inline]
    pub fn check(self) -> Result<(), Failure> {
        if self == Self::current() { Ok(()) } else { Err(self.forked()) }
    }

    #[cold]
    fn forked(self) -> Failure {
        let now = Self::current();
        let message = format!(
            "this object was made in process {}, and process {} is a fork of it: make pools after the fork, or \
             start processes by `spawn`",
            self.0, now.0
        );
        raise("Forked", message, fields![made_in: self.0, used_in: now.0])
    }
}

/// A value that is dropped only in the process that made it.
pub struct Own<T> {
    made_in: Process,
    value: ManuallyDrop<T>,
}

impl<T> Own<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self { made_in: Process::current(), value: ManuallyDrop::new(value) }
    }
}

impl<T> Own<T> {
    /// Returns the value.
    pub fn get(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Own<T> {
    fn drop(&mut self) {
        if self.made_in == Process::current() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}

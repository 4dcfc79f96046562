//! Scoped threads that have ended at the end of the scope, including their destructors.
//!
//! [`std::thread::scope`] returns when its threads' closures have returned: their thread-locals may
//! be destroyed after that. A thread's cache in a pool is such a thread-local, so that an audit
//! after the scope may run while it is being emptied. An explicit `join` waits for the thread
//! itself; [`scope`] joins each thread.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};

/// Spawner of threads that may borrow from outside of the scope, as in [`std::thread::scope`].
pub struct Threads<'scope, 'env: 'scope> {
    scope: &'scope Scope<'scope, 'env>,
    joins: Mutex<Vec<Box<dyn FnOnce() + Send + 'scope>>>,
}

/// A thread to join; otherwise the scope joins it.
pub struct Thread<'scope, T>(Shared<'scope, T>);

type Shared<'scope, T> = Arc<Mutex<Option<ScopedJoinHandle<'scope, T>>>>;

/// Acts as [`std::thread::scope`], but when it returns, every thread and all its destructors have
/// ended.
///
/// # Panics
///
/// With the panic of a thread that was not joined, if there is one.
pub fn scope<'env, T>(f: impl for<'scope> FnOnce(&Threads<'scope, 'env>) -> T) -> T {
    thread::scope(|scope| {
        let threads = Threads { scope, joins: Mutex::default() };
        let result = f(&threads);
        let joins = threads.joins.into_inner().unwrap_or_else(PoisonError::into_inner);
        joins.into_iter().for_each(|join| join());
        result
    })
}

impl<'scope> Threads<'scope, '_> {
    /// Starts a thread.
    pub fn spawn<T: Send + 'scope>(&self, f: impl FnOnce() -> T + Send + 'scope) -> Thread<'scope, T> {
        let shared: Shared<'scope, T> = Arc::new(Mutex::new(Some(self.scope.spawn(f))));
        let left = shared.clone();
        let join = move || {
            if let Some(thread) = take(&left)
                && let Err(panic) = thread.join()
            {
                std::panic::resume_unwind(panic);
            }
        };
        self.joins.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(join));
        Thread(shared)
    }
}

fn take<'scope, T>(shared: &Shared<'scope, T>) -> Option<ScopedJoinHandle<'scope, T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl<T> Thread<'_, T> {
    /// Waits until the thread has ended, and returns its result.
    ///
    /// # Errors
    ///
    /// The panic.
    ///
    /// # Panics
    ///
    /// Never: only this method takes the thread, or the scope after it.
    pub fn join(self) -> thread::Result<T> {
        take(&self.0).expect("the scope joins only later").join()
    }

    /// Returns whether the thread's closure has returned.
    pub fn is_finished(&self) -> bool {
        let shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shared.as_ref().is_none_or(ScopedJoinHandle::is_finished)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::time::Duration;

    struct Slow(Arc<AtomicUsize>);

    impl Drop for Slow {
        fn drop(&mut self) {
            thread::sleep(Duration::from_millis(20));
            self.0.fetch_add(1, Relaxed);
        }
    }

    thread_local! {
        static SLOW: RefCell<Option<Slow>> = const { RefCell::new(None) };
    }

    #[test]
    fn destructors_have_run_when_the_scope_ends() {
        let ended = Arc::new(AtomicUsize::new(0));
        scope(|threads| {
            let first = threads.spawn(|| SLOW.set(Some(Slow(ended.clone()))));
            threads.spawn(|| SLOW.set(Some(Slow(ended.clone()))));
            first.join().unwrap();
            assert!(ended.load(Relaxed) >= 1);
        });
        assert_eq!(ended.load(Relaxed), 2);
    }

    #[test]
    fn a_panic_goes_to_the_opener_of_the_scope() {
        let panicked = std::panic::catch_unwind(|| {
            scope(|threads| {
                threads.spawn(|| std::panic::resume_unwind(Box::new("on purpose")));
            });
        });
        assert_eq!(panicked.unwrap_err().downcast_ref(), Some(&"on purpose"));
    }
}

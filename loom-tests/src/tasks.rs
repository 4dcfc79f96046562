//! Futures in a model. A future that sleeps until it is woken, and a free that wakes no request,
//! are a deadlock, which the checker reports.

use std::future::Future;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Wake, Waker};

use loom::sync::{Condvar, Mutex};
use loom::thread::yield_now;

/// A waker that records whether its future was woken.
#[derive(Default)]
pub struct Bell {
    rung: Mutex<bool>,
    rings: Condvar,
}

impl Bell {
    /// Waits until the future is woken, without polling it.
    pub fn wait(&self) {
        while !*self.rung.lock().unwrap() {
            yield_now();
        }
    }
}

impl Wake for Bell {
    fn wake(self: std::sync::Arc<Self>) {
        *self.rung.lock().unwrap() = true;
        self.rings.notify_one();
    }
}

/// Polls until the future is ready, and sleeps in between until it is woken.
pub fn block_on<T>(future: impl IntoFuture<Output = T>) -> T {
    let mut future = pin!(future.into_future());
    let bell = std::sync::Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return result;
        }
        let mut rung = bell.rung.lock().unwrap();
        let woke_itself = *rung;
        while !*rung {
            rung = bell.rings.wait(rung).unwrap();
        }
        *rung = false;
        drop(rung);
        if woke_itself {
            // The progress of another thread may be needed first.
            yield_now();
        }
    }
}

/// Polls until the future sleeps: it was polled, and has not been woken since. The bell reports
/// this.
///
/// # Panics
///
/// If the future is ready instead.
pub fn lull<T>(mut future: Pin<&mut impl Future<Output = T>>) -> std::sync::Arc<Bell> {
    let bell = std::sync::Arc::new(Bell::default());
    let waker = Waker::from(bell.clone());
    loop {
        assert!(future.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "nothing is free");
        if !std::mem::take(&mut *bell.rung.lock().unwrap()) {
            return bell;
        }
        yield_now();
    }
}

/// Returns a future on the heap. The stack of a model has no room for two futures of the pool, in a
/// build with little optimization.
pub fn boxed<F: Future>(make: impl FnOnce() -> F) -> Pin<Box<F>> {
    Box::pin(make())
}

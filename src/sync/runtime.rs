//! Time, threads for blocking work, and tasks. The only file that names tokio.
//!
//! | | in a tokio runtime, with the feature `tokio` | elsewhere |
//! |---|---|---|
//! | [`now`] | tokio's clock, which tests can pause | the system's |
//! | [`sleep_until`], [`timeout_at`] | the runtime's timer | one timer thread of the process |
//! | [`run_blocking`] | a thread for blocking work | the calling thread |
//! | [`spawn`] | a task of the runtime | fails |
//!
//! The thread that first polls a wait decides which timer it uses. tokio cannot be asked whether a
//! runtime's timer is enabled: a wait without one panics. Under loom a timed wait does not end.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

#[cfg(feature = "tokio")]
use tokio::runtime::Handle;

pub(crate) type Sleep = Pin<Box<dyn Future<Output = ()> + Send + Sync>>;

/// Returns the current time, by the clock that this thread's waits use.
pub(crate) fn now() -> Instant {
    #[cfg(feature = "tokio")]
    return tokio::time::Instant::now().into_std();
    #[cfg(not(feature = "tokio"))]
    Instant::now()
}

/// Returns the end of a pause: in 30 years if it is beyond the range of the clock.
pub(crate) fn after(pause: Duration) -> Instant {
    let now = now();
    now.checked_add(pause).unwrap_or_else(|| now + Duration::from_secs(30 * 365 * 86_400))
}

/// Waits until a moment, by the clock of [`now`]. Must be called by the task that waits. Panics in
/// a tokio runtime whose timer is disabled.
pub(crate) fn sleep_until(at: Instant) -> Sleep {
    if cfg!(any(kvpool_loom, kvpool_loom_coarse)) {
        return Box::pin(std::future::pending());
    }
    #[cfg(feature = "tokio")]
    if Handle::try_current().is_ok() {
        return Box::pin(tokio::time::sleep_until(at.into()));
    }
    Box::pin(futures_timer::Delay::new(at.saturating_duration_since(Instant::now())))
}

/// Polls a future at least once, and until a deadline. Returns `None` if the deadline passes first.
/// Panics if it has to wait in a tokio runtime whose timer is disabled.
pub(crate) async fn timeout_at<F: Future>(deadline: Instant, future: F) -> Option<F::Output> {
    let (mut future, mut sleep) = (pin!(future), None);
    let either = poll_fn(|context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Some(output));
        }
        let sleep = sleep.get_or_insert_with(|| sleep_until(deadline));
        sleep.as_mut().poll(context).map(|()| None)
    });
    either.await
}

pub(crate) async fn yield_now() {
    let mut has_yielded = false;
    let once = poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    });
    once.await;
}

pub(crate) fn run_blocking(work: impl FnOnce() + Send + 'static) {
    #[cfg(feature = "tokio")]
    if let Ok(runtime) = Handle::try_current() {
        drop(runtime.spawn_blocking(work));
        return;
    }
    work();
}

/// A background task, which continues when this is dropped.
#[derive(Debug)]
pub(crate) struct Task(
    #[cfg(feature = "tokio")] tokio::task::JoinHandle<()>,
    #[cfg(not(feature = "tokio"))] std::convert::Infallible,
);

pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) -> Option<Task> {
    #[cfg(feature = "tokio")]
    return Handle::try_current().ok().map(|runtime| Task(runtime.spawn(task)));
    #[cfg(not(feature = "tokio"))]
    {
        drop(task);
        None
    }
}

impl Task {
    /// Waits for the end of the task, also after a shutdown of its runtime. Panics if the task did.
    pub(crate) async fn ended(self) {
        #[cfg(feature = "tokio")]
        if let Err(error) = self.0.await
            && error.is_panic()
        {
            std::panic::resume_unwind(error.into_panic());
        }
        #[cfg(not(feature = "tokio"))]
        match self.0 {}
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use std::future::{pending, ready};

    use super::*;

    const SHORT: Duration = Duration::from_millis(20);

    async fn waits_end() {
        let begin = now();
        assert_eq!(timeout_at(begin, ready(7)).await, Some(7), "polled once");
        assert_eq!(timeout_at(begin + SHORT, pending::<()>()).await, None);
        assert!(now() >= begin + SHORT);
        sleep_until(begin + 2 * SHORT).await;
        assert!(now() >= begin + 2 * SHORT);
        let mut polls = 0;
        let late = async {
            yield_now().await;
            polls += 1;
        };
        assert_eq!(timeout_at(begin + 1000 * SHORT, late).await, Some(()));
        assert_eq!(polls, 1);
    }

    #[test]
    fn waits_end_without_a_runtime() {
        pollster::block_on(waits_end());
        assert!(spawn(waits_end()).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn waits_follow_a_paused_clock() {
        waits_end().await;
        let (begin, real) = (now(), Instant::now());
        if cfg!(feature = "tokio") {
            sleep_until(begin + Duration::from_secs(3600)).await;
            assert!(now() >= begin + Duration::from_secs(3600) && real.elapsed() < Duration::from_secs(60));
        }
    }

    #[tokio::test]
    async fn blocking_work_leaves_the_task_if_it_can() {
        let (tell, told) = futures_channel::oneshot::channel();
        run_blocking(move || tell.send(std::thread::current().id()).unwrap());
        let is_elsewhere = told.await.unwrap() != std::thread::current().id();
        assert_eq!(is_elsewhere, cfg!(feature = "tokio"));
    }
}

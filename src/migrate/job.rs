//! The thread on which a transfer runs, and the effect of dropping its future.

use futures_channel::oneshot;

use crate::error::TransferError;
use crate::sync::{caught, runtime};

pub(super) type IsAbandoned<'a> = &'a dyn Fn() -> bool;

/// Runs blocking work: on a thread for it in a tokio runtime, unless it `is_short`; elsewhere in
/// the polling thread. If the future is dropped, the work's state and result are dropped where it
/// ends. Fails with [`TransferError::Dropped`] if the work panicked or the runtime stopped first.
pub(super) async fn run<T: Send + 'static>(
    is_short: bool,
    work: impl FnOnce(IsAbandoned<'_>) -> Result<T, TransferError> + Send + 'static,
) -> Result<T, TransferError> {
    let (tell, told) = oneshot::channel();
    let job = move || {
        // A user's storage may panic. Unwinding releases what the work held.
        let outcome = caught(|| work(&|| tell.is_canceled()));
        // If the receiver is gone, the result is dropped here.
        let _ = outcome.map(|outcome| tell.send(outcome));
    };
    if is_short {
        job()
    } else {
        runtime::run_blocking(job)
    }
    told.await.unwrap_or(Err(TransferError::Dropped))
}

//! On which thread a transfer is done, and what becomes of it if nobody waits for it any more.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::error::TransferError;

/// Says whether whoever waited for the job has gone.
pub(super) type IsAbandoned<'a> = &'a dyn Fn() -> bool;

/// Does blocking work: on a tokio runtime on a thread for such, unless it `is_short`; elsewhere here and now. What the work
/// owns and returns is dropped where it ends, if nobody waits for it any more.
///
/// # Errors
///
/// What the work returns; [`TransferError::Dropped`] if it panicked, or the runtime stopped before it began.
pub(super) async fn done<T: Send + 'static>(
    is_short: bool,
    work: impl FnOnce(IsAbandoned<'_>) -> Result<T, TransferError> + Send + 'static,
) -> Result<T, TransferError> {
    let (tell, told) = oneshot::channel();
    let job = move || {
        // A storage may be a user's. What the work held is given back by the unwinding.
        let outcome = catch_unwind(AssertUnwindSafe(|| work(&|| tell.is_closed())));
        // Perhaps nobody waits for it, and it is dropped here.
        let _ = outcome.map(|outcome| tell.send(outcome));
    };
    match Handle::try_current() {
        Ok(runtime) if !is_short => drop(runtime.spawn_blocking(job)),
        _ => job(),
    }
    told.await.unwrap_or(Err(TransferError::Dropped))
}

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;

use crate::protocol::Text;

/// Runs work that may panic: a storage may be user code. After a panic, what the work borrows is
/// only returned or dropped.
pub(super) fn caught<T>(work: impl FnOnce() -> T) -> Result<T, Text> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let reason = reason(&*panic);
        if let Err(again) = catch_unwind(AssertUnwindSafe(|| drop(panic))) {
            std::mem::forget(again);
        }
        reason
    })
}

pub(super) async fn caught_async<T>(work: impl Future<Output = T>) -> Result<T, Text> {
    let mut work = pin!(work);
    poll_fn(|cx| match caught(|| work.as_mut().poll(cx)) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => std::task::Poll::Ready(Err(panic)),
    })
    .await
}

fn reason(panic: &(dyn Any + Send)) -> Text {
    let words = panic.downcast_ref::<&str>().copied();
    let words = words.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    Text::new(format!("a panic: {}", words.unwrap_or("without words")))
}

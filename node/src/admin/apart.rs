use tokio::task::spawn_blocking;

use super::problem::AdminError;

/// Runs work that takes milliseconds for a large pool on a blocking thread.
pub(super) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, AdminError> {
    spawn_blocking(work).await.map_err(|error| AdminError::Failed(error.to_string()))
}

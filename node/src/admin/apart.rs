//! Work that takes a while, elsewhere than on the threads of the runtime.

use tokio::task::spawn_blocking;

use super::problem::AdminError;

/// Does what takes milliseconds for a large pool elsewhere than on the threads of the runtime.
pub(super) async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, AdminError> {
    spawn_blocking(work).await.map_err(|error| AdminError::Failed(error.to_string()))
}

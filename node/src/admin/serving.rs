use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::access::AdminAccess;
use super::interface::Admin;
use super::server::AdminServer;
use crate::settings::AdminUrl;

/// Time for responses in progress when the patience of the node is used up.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// An admin interface that is served by a task.
pub(crate) struct Serving {
    pub(crate) access: AdminAccess,
    address: AdminUrl,
    /// Time for requests in progress, once shutdown has begun.
    ending: watch::Sender<Option<Duration>>,
    task: JoinHandle<()>,
}

impl Serving {
    pub(crate) fn start(server: AdminServer, admin: Arc<dyn Admin>) -> Self {
        let (ending, mut ended) = watch::channel(None);
        let (access, address) = (server.access(), server.address().clone());
        let task = tokio::spawn(async move {
            let end = async {
                // Fails only if the node is gone; then this task ends too.
                let _ = ended.wait_for(Option::is_some).await;
            };
            // Longer than any patience: `end` below has the deadline.
            if let Err(error) = server.run(admin, end, Duration::MAX).await {
                tracing::warn!(%error, "the admin interface could not be served");
            }
        });
        Self { access, address, ending, task }
    }

    pub(crate) fn address(&self) -> &AdminUrl {
        &self.address
    }

    /// Ends the server, with some time for requests in progress.
    pub(crate) async fn end(&self, patience: Duration) {
        let patience = patience.max(LAST_ANSWERS);
        self.ending.send_replace(Some(patience));
        let is_over = async || {
            while !self.task.is_finished() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        if timeout(patience, is_over()).await.is_err() {
            self.task.abort();
            is_over().await;
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.task.abort();
    }
}

use std::sync::Arc;
use std::time::Duration;

use kvpool::FramePool;
use parking_lot::Mutex;

use super::error::{ServiceError, of};
use super::prepared::Prepared;
use super::reload::{Applied, Reread};
use crate::admin::{Admin, PoolAdmin, Reporters, Serving};
use crate::settings::AdminUrl;

/// A pool of frames with an admin interface. Dropping it ends the interface at once.
pub struct ServedFrames {
    admin: Arc<PoolAdmin>,
    serving: Option<Serving>,
    applied: Mutex<Applied>,
}

impl Prepared {
    /// Serves a pool of frames on the current tokio runtime. The settings are those of
    /// [`load_for_frames`](crate::settings::Sources::load_for_frames).
    pub fn serve_frames(self, pool: FramePool, reporters: Reporters) -> ServedFrames {
        let Self { settings, credentials, admin: server, .. } = self;
        let admin = Arc::new(PoolAdmin::new(&settings.name, pool).reporters(reporters));
        let serving = server.map(|server| Serving::start(server, admin.clone()));
        ServedFrames { admin, serving, applied: Mutex::new(Applied::new(settings, credentials)) }
    }
}

impl ServedFrames {
    /// Returns what the admin interface answers, with or without one.
    pub fn admin(&self) -> Arc<dyn Admin> {
        self.admin.clone()
    }

    /// Returns the address of the admin interface, if there is one.
    pub fn admin_address(&self) -> Option<&AdminUrl> {
        self.serving.as_ref().map(Serving::address)
    }

    /// Returns the name.
    pub fn name(&self) -> String {
        self.applied.lock().first.name.clone()
    }

    /// Returns the time that the settings give to requests at the end.
    pub fn drain(&self) -> Duration {
        self.applied.lock().first.drain
    }

    /// Serves another pool from now on, for an engine that made its pool anew.
    pub fn set_pool(&self, pool: FramePool) {
        self.admin.set_pool(pool);
    }

    /// Applies certificates and tokens completely or not at all, for new requests. Returns the
    /// changes as text, with those of other settings, which need a restart.
    ///
    /// # Errors
    /// [`ServiceError::Setting`] if the address would be unprotected.
    pub fn apply(&self, reread: Reread) -> Result<String, ServiceError> {
        let mut applied = self.applied.lock();
        if let Some(serving) = &self.serving {
            serving.access.replace(reread.credentials.admin.clone()).map_err(of("admin"))?;
        }
        Ok(applied.replace(reread))
    }

    /// Ends the interface, with some time for requests in progress. Then its port is free.
    pub async fn end(&self, patience: Duration) {
        self.admin.drain();
        if let Some(serving) = &self.serving {
            serving.end(patience).await;
        }
    }
}

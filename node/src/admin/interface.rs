//! What an admin interface acts on.

use std::pin::Pin;

use super::api::{
    AuditOutcome, DefragOutcome, Health, MigrateOrder, MigrationList, MigrationRecord, ResizeOrder,
    ResizeOutcome, StatsReport,
};
use super::problem::AdminError;

/// The future of an answer.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, AdminError>> + Send + 'a>>;

/// A pool or a node behind an admin interface.
///
/// The futures may be dropped at any point, which leaves nothing half done. They run on a tokio
/// runtime with a timer.
pub trait Admin: Send + Sync + 'static {
    /// Returns the state.
    fn health(&self) -> Health;

    /// Returns the statistics.
    ///
    /// # Errors
    ///
    /// [`AdminError::Unavailable`] if the node has ended.
    fn stats(&self) -> Answer<'_, StatsReport>;

    /// Returns the migrations under way, and the latest ones that ended.
    ///
    /// # Errors
    ///
    /// [`AdminError::Unavailable`] if the node has ended.
    fn migrations(&self) -> Answer<'_, MigrationList>;

    /// Compacts the pool.
    ///
    /// # Errors
    ///
    /// [`AdminError::Failed`], with the work done before the failure.
    fn defragment(&self) -> Answer<'_, DefragOutcome>;

    /// Changes the size of the pool.
    ///
    /// # Errors
    ///
    /// [`AdminError::Conflict`] if the pool cannot have this size now; it keeps its size.
    fn resize(&self, order: ResizeOrder) -> Answer<'_, ResizeOutcome>;

    /// Begins to migrate a sequence to another node. Does not wait for its end.
    ///
    /// # Errors
    ///
    /// [`AdminError::NotFound`] for an unknown sequence or peer; [`AdminError::Conflict`] if the
    /// sequence is not offered, or is migrated already; [`AdminError::Unsupported`] without peers.
    fn migrate(&self, order: MigrateOrder) -> Answer<'_, MigrationRecord>;

    /// Recounts every frame of the pool.
    ///
    /// # Errors
    ///
    /// [`AdminError::Conflict`] if the pool was never at rest. A contradiction is no error, but an
    /// outcome.
    fn audit(&self) -> Answer<'_, AuditOutcome>;
}

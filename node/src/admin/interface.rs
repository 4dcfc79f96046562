use std::pin::Pin;

use kvpool::compact::Snapshot;

use super::api::{
    AuditOutcome, DefragOutcome, EndedOrder, EndedOutcome, Health, MigrateOrder, MigrationList,
    MigrationRecord, ResizeOrder, ResizeOutcome, StatsReport,
};
use super::problem::AdminError;
use crate::hints::{HintsAnswer, HintsEnvelope};

use super::views::{OwnersReport, Readiness, TrimOrder, TrimOutcome};
use crate::metrics::Scrape;
use crate::topology::{PeerLink, TopologyReport};

/// The future of an answer.
pub type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, AdminError>> + Send + 'a>>;

/// A pool or a node behind an admin interface.
///
/// The futures are cancel safe. They run on a tokio runtime with a timer.
pub trait Admin: Send + Sync + 'static {
    /// Returns the state.
    fn health(&self) -> Health;

    /// Returns whether the node should get requests.
    fn ready(&self) -> Readiness;

    /// Returns the statistics.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`] if the node has ended.
    fn stats(&self) -> Answer<'_, StatsReport>;

    /// Returns the migrations in progress, and the latest ended ones.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`] if the node has ended; [`AdminError::Unsupported`] for a pool
    /// without sequences.
    fn migrations(&self) -> Answer<'_, MigrationList>;

    /// Returns the state of every frame.
    ///
    /// # Errors
    /// [`AdminError::Failed`].
    fn snapshot(&self) -> Answer<'_, Snapshot>;

    /// Returns the state of every frame, with the sequences of its blocks.
    ///
    /// # Errors
    /// [`AdminError::Failed`]; [`AdminError::Unsupported`] for a pool without sequences.
    fn sequences(&self) -> Answer<'_, Snapshot> {
        self.snapshot()
    }

    /// Returns the owners with the most blocks, at most `limit` of them.
    ///
    /// # Errors
    /// [`AdminError::Failed`].
    fn owners(&self, limit: usize) -> Answer<'_, OwnersReport>;

    /// Returns the links to peers; none for a pool alone.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`] if the node has ended.
    fn peers(&self) -> Answer<'_, Vec<PeerLink>>;

    /// Returns the machine, the paths between its parts, and the links to peers.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`] if the node has ended.
    fn topology(&self) -> Answer<'_, TopologyReport>;

    /// Returns the values of all metrics.
    ///
    /// # Errors
    /// [`AdminError::Failed`].
    fn scrape(&self) -> Answer<'_, Scrape>;

    /// Returns the free blocks in magazines to the pool, and evicts cached blocks beyond those to
    /// keep. The memory stays the pool's: a [resize](Self::resize) returns it to the system.
    ///
    /// # Errors
    /// [`AdminError::Unavailable`] if the node is ending; [`AdminError::Unsupported`] for evictions
    /// from a pool of frames.
    fn trim(&self, order: TrimOrder) -> Answer<'_, TrimOutcome>;

    /// Carries out hints about the future use of cached blocks.
    ///
    /// # Errors
    /// [`AdminError::Invalid`] for an envelope of another version, or with too many actions;
    /// [`AdminError::Unavailable`] if the node is ending; [`AdminError::Unsupported`] for a pool of
    /// frames. An action that cannot be carried out is an outcome, not an error.
    fn hints(&self, envelope: HintsEnvelope) -> Answer<'_, HintsAnswer>;

    /// Compacts the pool.
    ///
    /// # Errors
    /// [`AdminError::Failed`], with the work done before the failure; [`AdminError::Unsupported`]
    /// for a pool of frames, whose bytes its engine moves.
    fn defragment(&self) -> Answer<'_, DefragOutcome>;

    /// Changes the size of the pool.
    ///
    /// # Errors
    /// [`AdminError::Conflict`] if the pool cannot have this size now; it keeps its size.
    /// [`AdminError::Unsupported`] for a pool of frames.
    fn resize(&self, order: ResizeOrder) -> Answer<'_, ResizeOutcome>;

    /// Begins to migrate a sequence to another node, without waiting for its end.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] for an unknown sequence or peer; [`AdminError::Conflict`] if the
    /// sequence is not offered, or is already migrating; [`AdminError::Unsupported`] without peers.
    fn migrate(&self, order: MigrateOrder) -> Answer<'_, MigrationRecord>;

    /// Declares that the process of a peer has ended, so that sequences in doubt become this node's
    /// own again.
    ///
    /// # Errors
    /// [`AdminError::NotFound`] for an unknown peer; [`AdminError::Conflict`] for one that has a
    /// link; [`AdminError::Unsupported`] without peers; [`AdminError::Unavailable`] if the node has
    /// ended.
    fn declare_ended(&self, order: EndedOrder) -> Answer<'_, EndedOutcome>;

    /// Recounts every frame of the pool. Contradictions are an outcome, not an error.
    ///
    /// # Errors
    /// [`AdminError::Conflict`] if the pool was never idle.
    fn audit(&self) -> Answer<'_, AuditOutcome>;
}

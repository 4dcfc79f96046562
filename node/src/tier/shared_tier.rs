//! The trait of all tiers.

use std::pin::Pin;
use std::time::Instant;

use super::counters::TierCounters;
use super::key::TierKey;
use super::outcome::Outcome;
use super::value::{TierValue, ValueError};
use crate::admin::Failures;

/// Future of a call: one outcome per key, in order.
pub type TierFuture = Pin<Box<dyn Future<Output = Vec<Outcome>> + Send>>;

/// Memory for one value.
///
/// The tier owns it from the call on, and drops it as soon as no byte can be written any more, which may
/// be long after the call has returned. What keeps the memory from being reused belongs to it: of a
/// frame, the [hold](kvpool::transport::Hold) of its piece.
pub trait Landing: Send {
    /// Verifies a value, and writes its block into the memory. Called at most once, on a thread of the
    /// tier.
    ///
    /// # Errors
    ///
    /// [`ValueError`]; what the memory then has is meaningless.
    fn land(&mut self, value: &[u8]) -> Result<(), ValueError>;
}

/// A value to be read.
pub struct TierRead {
    /// Its name.
    pub key: TierKey,
    /// Size of the value in bytes: [`value_bytes`](super::value_bytes) of the block.
    pub bytes: usize,
    /// Where its block goes.
    pub memory: Box<dyn Landing>,
}

/// A cluster-wide tier of cached blocks, by hash.
///
/// It is not trusted: a hit is a value that was verified, and everything else is a miss to the caller.
/// Each call returns by its deadline. Dropping its future ends the call; what the store does not know
/// of yet is taken back. The futures need a tokio runtime with a timer.
pub trait SharedTier: Send + Sync {
    /// Returns a short name for reports.
    fn name(&self) -> &'static str;

    /// Asks for each key whether a get is worth a try: [`Outcome::Hit`] or [`Outcome::Miss`].
    fn exists(&self, keys: Vec<TierKey>, deadline: Instant) -> TierFuture;

    /// Stores values: [`Outcome::Stored`]. A value is dropped if the queue is full.
    fn put(&self, values: Vec<TierValue>, deadline: Instant) -> TierFuture;

    /// Reads values: [`Outcome::Hit`] or [`Outcome::Miss`].
    ///
    /// The memory of a hit was dropped before the future is ready.
    fn get(&self, reads: Vec<TierRead>, deadline: Instant) -> TierFuture;

    /// Returns counts since the tier began, and its state.
    fn counters(&self) -> TierCounters;

    /// Returns what failed, if the tier notes it.
    fn failures(&self) -> Option<Failures> {
        None
    }

    /// Takes no further calls. Returns at once; calls under way end.
    fn close(&self);
}

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kvpool::prefix::{BlockHash, Origin};
use kvpool::storage::Storage;
use kvpool::transfer::Export;
use kvpool::{Pool, Run, TransferError};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use super::super::error::TierError;
use super::super::key::{Fingerprint, TierKey};
use super::super::outcome::Outcome;
use super::super::read::Landing;
use super::super::shared_tier::SharedTier;
use super::super::value::{TierValue, ValueError, origins_of, verify};
use super::settings::TieredSettings;

/// Blocks per batch of puts.
pub(super) const PUTS_AT_ONCE: usize = 32;

/// Prefetches for hints that may wait for their turn.
pub(super) const PREFETCHES_MAX: usize = 64;

/// What one operation with a tier did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct TierReport {
    /// After a bring-back, the leading blocks of the prefix that are now cached here; after an
    /// offload, the blocks that left the cache.
    pub cached_blocks: usize,
    /// Blocks whose bytes moved.
    pub moved_blocks: usize,
    /// Their packed bytes.
    pub bytes: u64,
    /// Blocks that were not put because the tier claimed to have them.
    pub present_blocks: usize,
    /// Blocks that failed for any reason.
    pub failed_blocks: usize,
    /// Blocks without an answer by the deadline.
    pub overdue_blocks: usize,
    /// Duration of the operation.
    pub took: Duration,
}

impl TierReport {
    pub(super) fn note(&mut self, outcomes: &[Outcome]) {
        let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|outcome| is(outcome)).count();
        self.failed_blocks += count(|outcome| matches!(outcome, Outcome::Failed(_)));
        self.overdue_blocks += count(|outcome| matches!(outcome, Outcome::InFlight));
    }
}

/// Counters of a pool's use of its tier.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TieredCounters {
    /// Prefixes that were looked up, of a hint's prefetch each piece.
    pub asked: u64,
    /// Blocks that were brought back.
    pub fetched_blocks: u64,
    /// Packed bytes of these.
    pub fetched_bytes: u64,
    /// Blocks that were put.
    pub stored_blocks: u64,
    /// Packed bytes of these.
    pub stored_bytes: u64,
    /// Blocks not put because the tier claimed to have them.
    pub present_blocks: u64,
    /// Blocks not put because too many waited.
    pub dropped_blocks: u64,
    /// Number of times that events of the cache were lost, and its blocks listed again.
    pub resyncs: u64,
}

pub(in super::super) struct Link {
    pub(super) pool: Pool,
    pub(super) storage: Arc<dyn Storage>,
    pub(in super::super) tier: Arc<SharedTier>,
    pub(super) settings: TieredSettings,
    counters: Mutex<TieredCounters>,
    pub(super) packed_bytes: usize,
    fingerprint: Fingerprint,
    /// Places of hints' prefetches, and the turn of one of them.
    pub(super) line: Arc<Semaphore>,
    pub(super) turn: tokio::sync::Mutex<()>,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("tier", &self.tier.name()).finish_non_exhaustive()
    }
}

impl Link {
    pub(super) fn new(
        pool: Pool,
        tier: Arc<SharedTier>,
        settings: TieredSettings,
    ) -> Result<Self, TierError> {
        let fingerprint = Fingerprint::of(&pool, &settings.namespace)?;
        let storage = pool.storage().cloned().ok_or(TransferError::NoStorage { pool: pool.tag() })?;
        let packed_bytes = storage.layout().packed_bytes();
        let (counters, turn) = (Mutex::default(), tokio::sync::Mutex::default());
        let line = Arc::new(Semaphore::new(PREFETCHES_MAX));
        Ok(Self { pool, storage, tier, settings, counters, packed_bytes, fingerprint, line, turn })
    }

    pub(super) fn key(&self, hash: BlockHash) -> TierKey {
        TierKey { fingerprint: self.fingerprint, hash }
    }

    pub(super) fn keys(&self, hashes: &[BlockHash]) -> Vec<TierKey> {
        hashes.iter().map(|&hash| self.key(hash)).collect()
    }

    pub(super) fn value(
        &self,
        export: &Export,
        place: usize,
        hash: BlockHash,
    ) -> Result<TierValue, TransferError> {
        let piece = export.piece(&[place as u32])?;
        TierValue::new(self.key(hash), export.origins(place), self.packed_bytes, |bytes| {
            // SAFETY: no thread writes the block, which stays in its frame while the piece lives.
            unsafe { self.storage.pack(&piece.runs, bytes) }.map_err(TransferError::Storage)
        })
    }

    /// Puts values, and counts those stored. Returns the outcomes.
    pub(super) async fn put(&self, values: Vec<TierValue>, deadline: Instant) -> Vec<Outcome> {
        let outcomes = self.tier.put(values, deadline).await;
        let stored = outcomes.iter().filter(|outcome| **outcome == Outcome::Stored).count();
        self.count(|counters| counters.stored_blocks += stored as u64);
        outcomes
    }

    pub(super) fn count<T>(&self, change: impl FnOnce(&mut TieredCounters) -> T) -> T {
        change(&mut self.counters.lock())
    }

    pub(in super::super) fn read_counters(&self) -> TieredCounters {
        let counters = self.count(|counters| *counters);
        TieredCounters {
            fetched_bytes: counters.fetched_blocks * self.packed_bytes as u64,
            stored_bytes: counters.stored_blocks * self.packed_bytes as u64,
            ..counters
        }
    }
}

pub(super) struct FrameLanding {
    pub(super) key: TierKey,
    pub(super) packed_bytes: usize,
    pub(super) storage: Arc<dyn Storage>,
    pub(super) runs: Vec<Run>,
    pub(super) _hold: kvpool::transport::Hold,
    pub(super) pool: Pool,
    /// Receives where the block was computed.
    pub(super) origins: Arc<OnceLock<Vec<Origin>>>,
}

impl Landing for FrameLanding {
    fn land(&mut self, value: &[u8]) -> Result<(), ValueError> {
        let packed = verify(&self.key, self.packed_bytes, value)?;
        let origins = origins_of(value);
        if !self.pool.prefix_cache().is_some_and(|cache| cache.accepts(&origins)) {
            return Err(ValueError::Stale);
        }
        let _ = self.origins.set(origins);
        // SAFETY: of a piece of an import, whose hold lives: no other thread accesses the frame.
        unsafe { self.storage.unpack(&self.runs, packed) }.map_err(ValueError::Storage)
    }
}

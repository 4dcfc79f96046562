use std::sync::Arc;
use std::time::{Duration, Instant};

use kvpool::TransferError;
use kvpool::prefix::BlockHash;
use kvpool::transfer::Export;

use super::super::outcome::Outcome;
use super::super::settings::after;
use super::super::value::TierValue;
use super::link::{Link, PUTS_AT_ONCE, TierReport};

/// Polling interval of the pool.
const INTERVAL: Duration = Duration::from_millis(50);

/// Interval while blocks move.
const SOON: Duration = Duration::from_millis(1);

/// Longest pause after a failure.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Packs the blocks at these places on blocking threads. Returns the export too.
async fn pack(
    link: &Arc<Link>,
    export: Export,
    blocks: Vec<(usize, BlockHash)>,
) -> Result<(Export, Vec<TierValue>), TransferError> {
    let link = link.clone();
    let packed = tokio::task::spawn_blocking(move || {
        let values: Result<Vec<_>, _> =
            blocks.into_iter().map(|(place, hash)| link.value(&export, place, hash)).collect();
        values.map(|values| (export, values))
    });
    packed.await.unwrap_or(Err(TransferError::Dropped))
}

impl Link {
    /// Moves up to `blocks_max` evictable blocks, in eviction order. Those that the tier has, or
    /// claims to have, are evicted here; the others return to the cache. It works in batches,
    /// because blocks of a batch in progress cannot be evicted, and their values take up memory.
    /// Ends at a batch of which no block leaves.
    pub(super) async fn offload(
        self: &Arc<Self>,
        blocks_max: usize,
        deadline: Instant,
    ) -> Result<TierReport, TransferError> {
        let (began, mut report) = (Instant::now(), TierReport::default());
        let mut left = blocks_max.min(self.pool.total_blocks());
        loop {
            let (batch, leaving_blocks) = self.offload_batch(left.min(PUTS_AT_ONCE), deadline).await?;
            report.cached_blocks += batch.cached_blocks;
            report.moved_blocks += batch.moved_blocks;
            report.present_blocks += batch.present_blocks;
            report.bytes += batch.bytes;
            // Blocks that stay are in the next batch again.
            (report.failed_blocks, report.overdue_blocks) = (batch.failed_blocks, batch.overdue_blocks);
            left -= batch.cached_blocks;
            // Blocks whose eviction is delayed would be selected twice.
            if left == 0 || batch.cached_blocks == 0 || leaving_blocks > 0 {
                report.took = began.elapsed();
                return Ok(report);
            }
        }
    }

    /// Moves up to `blocks_max` blocks in one batch. Also returns the number of blocks whose
    /// eviction is delayed by a batch in flight.
    async fn offload_batch(
        self: &Arc<Self>,
        blocks_max: usize,
        deadline: Instant,
    ) -> Result<(TierReport, usize), TransferError> {
        let mut report = TierReport::default();
        let export = self.pool.export_cached(blocks_max)?;
        let hashes = export.hashes();
        let claimed = self.tier.exists(self.keys(&hashes), deadline).await;
        report.note(&claimed);
        let is_missing = |(place, hash): (usize, &BlockHash)| {
            (claimed.get(place) == Some(&Outcome::Miss)).then_some((place, *hash))
        };
        let missing: Vec<_> = hashes.iter().enumerate().filter_map(is_missing).collect();
        let mut leaving: Vec<u32> = (0..)
            .zip(&claimed)
            .take(hashes.len())
            .filter(|(_, claimed)| **claimed == Outcome::Hit)
            .map(|(at, _)| at)
            .collect();
        report.present_blocks = leaving.len();
        self.count(|counters| counters.present_blocks += leaving.len() as u64);
        let places: Vec<usize> = missing.iter().map(|(place, _)| *place).collect();
        let (mut export, values) = pack(self, export, missing).await?;
        let outcomes = if values.is_empty() { Vec::new() } else { self.put(values, deadline).await };
        report.note(&outcomes);
        // A store that declines a block will not have it: so it is evicted, as without a tier.
        let leaves = |outcome: &Outcome| matches!(outcome, Outcome::Stored | Outcome::Declined);
        let left = places.iter().zip(&outcomes).filter(|(_, outcome)| leaves(outcome));
        leaving.extend(left.map(|(place, _)| *place as u32));
        report.moved_blocks = outcomes.iter().filter(|outcome| **outcome == Outcome::Stored).count();
        report.bytes = (report.moved_blocks * self.packed_bytes) as u64;
        leaving.sort_unstable();
        export.retain(&leaving)?;
        let finished = export.finish();
        report.cached_blocks = finished.evicted_blocks + finished.leaving_blocks;
        Ok((report, finished.leaving_blocks))
    }

    /// Moves blocks while few are free. Never returns.
    pub(super) async fn offload_on_eviction(self: Arc<Self>) {
        let keep_free = self.settings.keep_free.unwrap_or(self.pool.total_blocks() / 16);
        let (mut pause, mut failure_pause) = (INTERVAL, INTERVAL);
        loop {
            tokio::time::sleep(pause).await;
            pause = INTERVAL;
            let free = self.pool.free_blocks();
            if free >= keep_free || self.pool.stats().evictable == 0 {
                continue;
            }
            let (blocks, deadline) =
                ((keep_free - free).min(PUTS_AT_ONCE), after(Instant::now(), self.settings.put_limit));
            match self.offload(blocks, deadline).await {
                Ok(report) if report.cached_blocks > 0 => (pause, failure_pause) = (SOON, INTERVAL),
                result => {
                    tracing::debug!(tier = self.tier.name(), ?result, "cached blocks stay");
                    failure_pause = (failure_pause * 2).min(PAUSE_MAX);
                    pause = failure_pause;
                }
            }
        }
    }
}

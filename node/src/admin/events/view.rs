use std::collections::HashMap;
use std::time::SystemTime;

use kvpool::{Latency, LatencyHistogram, Metrics};
use kvpool_map::Cells;

use super::super::apart::apart;
use super::super::api::{MigrationList, MigrationRecord, MigrationSide};
use super::super::interface::Admin;
use super::super::problem::AdminError;
use super::notice::{Notice, SequenceSummary, StatsSummary};

/// Most cells of the map: about as many as a screen shows.
pub(in super::super) const CELLS_MAX: usize = 4096;

pub(super) struct View {
    pub(super) summary: StatsSummary,
    /// For the times of the next period.
    metrics: Metrics,
    cells: Cells,
    migrations: Vec<MigrationRecord>,
}

impl View {
    /// Reads the state, and the times since the previous view.
    pub(super) async fn of(admin: &dyn Admin, before: Option<&Self>) -> Result<Self, AdminError> {
        let stats = admin.stats().await?;
        let snapshot = admin.snapshot().await?;
        let (migrations, peers) = match &stats.of_sequences {
            Some(_) => (admin.migrations().await?.migrations, admin.peers().await?),
            None => Default::default(),
        };
        let (metrics, gauges) = (stats.metrics, stats.fragmentation);
        let before = before.map(|view| &view.metrics.latencies);
        let (now, at) = (&metrics.latencies, &metrics.stats);
        let both = |of: fn(&kvpool::Latencies) -> &LatencyHistogram| (of(now), before.map(of));
        let transfers = metrics.migrations.unwrap_or_default();
        let of_sequences = stats.of_sequences.map(|stats| SequenceSummary {
            block_bytes: stats.block_bytes,
            sequences: stats.sequences,
            compaction: stats.compaction,
            mean_sequence_run: stats.sequence_runs.mean_run,
            sequence_runs: stats.sequence_runs,
            allocation: since([both(|latencies| &latencies.allocate), both(|latencies| &latencies.append)]),
            query_tokens: metrics.query_tokens,
            hit_tokens: metrics.hit_tokens,
            transferred_blocks: transfers.blocks,
            transferred_bytes: transfers.bytes,
            migrations_running: migrations.iter().filter(|record| !record.has_ended()).count(),
            peers_up: peers.iter().filter(|peer| peer.is_up).count(),
            peers: peers.len(),
        });
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let summary = StatsSummary {
            node: stats.node,
            time_ms: time.as_millis() as u64,
            uptime_s: stats.uptime_s,
            of_sequences,
            total: at.total,
            used: at.used,
            free: at.free,
            evictable: at.evictable,
            retired: at.retired,
            reserved: at.reserved,
            held: at.held,
            waiting: at.waiting,
            batches_in_flight: at.batches_in_flight,
            oldest_batch_s: at.oldest_batch.as_ref().map(|batch| batch.age().as_secs_f64()),
            fragmentation: gauges.rate,
            available_fragmentation: stats.available_fragmentation,
            longest_free_run: gauges.longest_run,
            wait: since([both(|latencies| &latencies.wait)]),
            allocations: metrics.allocations.requests,
            allocated_blocks: metrics.allocations.blocks,
            refusals: metrics.refusals.total(),
            evicted_blocks: metrics.evictions.total(),
            moved_blocks: metrics.moves.moved_blocks,
        };
        let cells = apart(move || Cells::of(&snapshot, CELLS_MAX)).await?;
        Ok(Self { summary, metrics, cells, migrations })
    }

    pub(super) fn whole(&self) -> Vec<Notice> {
        let migrations = || Notice::Migrations(MigrationList { migrations: self.migrations.clone() });
        let migrations = self.summary.of_sequences.is_some().then(migrations);
        let stats = Notice::Stats(Box::new(self.summary.clone()));
        [stats, Notice::Map(self.cells.clone())].into_iter().chain(migrations).collect()
    }

    pub(super) fn since(&self, before: &Self) -> Vec<Notice> {
        let mut notices = vec![Notice::Stats(Box::new(self.summary.clone()))];
        match before.cells.changes(&self.cells) {
            Some(runs) if runs.changes.is_empty() => {}
            // Many small changes are longer than the complete map.
            Some(runs)
                if runs.changes.iter().map(|(_, cells)| cells.len() + 12).sum::<usize>()
                    < self.cells.cells.len() =>
            {
                notices.push(Notice::MapChanges(runs));
            }
            _ => notices.push(Notice::Map(self.cells.clone())),
        }
        let key = |record: &MigrationRecord| (record.id.clone(), record.side == MigrationSide::Source);
        let known: HashMap<_, _> = before.migrations.iter().map(|record| (key(record), record)).collect();
        let is_other = |record: &&MigrationRecord| known.get(&key(record)) != Some(record);
        let migrations: Vec<_> = self.migrations.iter().filter(is_other).cloned().collect();
        if !migrations.is_empty() {
            notices.push(Notice::Migrations(MigrationList { migrations }));
        }
        notices
    }
}

/// Returns the times of some kinds of operations since an earlier reading.
fn since<'a>(
    kinds: impl IntoIterator<Item = (&'a LatencyHistogram, Option<&'a LatencyHistogram>)>,
) -> Latency {
    let mut since = LatencyHistogram::default();
    for (now, before) in kinds {
        let counted = |end: u64| {
            let buckets = before.iter().flat_map(|before| &before.buckets);
            buckets.filter(|bucket| bucket.up_to_ns == end).map(|bucket| bucket.count).sum()
        };
        since.buckets.extend(now.buckets.iter().map(|&bucket| {
            let mut new = bucket;
            new.count = bucket.count.saturating_sub(counted(bucket.up_to_ns));
            new
        }));
    }
    since.buckets.retain(|bucket| bucket.count > 0);
    since.buckets.sort_unstable_by_key(|bucket| bucket.up_to_ns);
    since.quantiles()
}

//! `Stats` and other records of a pool's state.

use kvpool::{
    AuditReport, DefragReport, DefragTotals, Fragmentation, MigrationReport, Preempted, ResizeReport,
    SequenceRuns, Victim,
};
use pyo3::prelude::*;

use crate::record::record;

record! {
    /// Occupancy of a pool, in blocks.
    ///
    /// `free + reserved + retired + held + evictable + used == total`, while no thread is inside a
    /// call.
    Stats {
        /// Blocks in the pool, without the null block.
        total: usize,
        /// Owned blocks.
        used: usize,
        /// Blocks that any allocation can get without evicting.
        free: usize,
        /// Free and evictable blocks.
        available: usize,
        /// Blocks without an owner that the prefix cache keeps until their frames are needed.
        evictable: usize,
        /// Freed blocks that a batch in flight may still read.
        retired: usize,
        /// Free blocks reserved for urgent requests.
        reserved: usize,
        /// Free blocks kept by moves or by a shrink in progress.
        held: usize,
        /// The part of the free blocks that is in threads' caches.
        in_magazines: usize,
        /// Requests that wait in the queue.
        waiting: usize,
        /// The same by priority: normal, high, urgent.
        waiting_by_priority: Vec<usize>,
        /// `used / total`, 0 to 1.
        utilization: f64,
        /// "low", "medium", "high" or "critical".
        pressure: String,
        /// Batches in flight.
        batches_in_flight: u64,
        /// Batches that wrote to a sequence and did not finish.
        batches_abandoned: u64,
        /// Closed sequences whose blocks, counted as used, are cached once batches in flight
        /// finish.
        closing: usize,
        /// Ticket of the oldest batch in flight.
        oldest_batch: Option<u64>,
        /// Lower bound of its age in seconds.
        oldest_batch_seconds: Option<f64>,
        /// The task whose turn it is to move blocks, with its age.
        turn: Option<String>,
        /// Owned blocks whose bytes are being transferred.
        in_transfer: usize,
        /// Owned blocks of transfers that were given up.
        quarantined: usize,
        /// Median of the sampled latencies of allocations, in nanoseconds.
        allocation_ns_p50: u64,
        /// Their 99th percentile, in nanoseconds.
        allocation_ns_p99: u64,
    }
}

impl From<kvpool::Stats> for Stats {
    fn from(stats: kvpool::Stats) -> Self {
        Self {
            total: stats.total,
            used: stats.used,
            free: stats.free,
            available: stats.available,
            evictable: stats.evictable,
            retired: stats.retired,
            reserved: stats.reserved,
            held: stats.held,
            in_magazines: stats.in_magazines,
            waiting: stats.waiting,
            waiting_by_priority: stats.waiting_by_priority.to_vec(),
            utilization: stats.utilization,
            pressure: format!("{:?}", stats.pressure).to_lowercase(),
            batches_in_flight: stats.batches_in_flight,
            batches_abandoned: stats.batches_abandoned,
            closing: stats.closing,
            oldest_batch: stats.oldest_batch.map(|oldest| oldest.ticket.0),
            oldest_batch_seconds: stats.oldest_batch.map(|oldest| oldest.age().as_secs_f64()),
            turn: stats.turn.map(|turn| turn.to_string()),
            in_transfer: stats.in_transfer,
            quarantined: stats.quarantined,
            allocation_ns_p50: stats.latency.p50_ns,
            allocation_ns_p99: stats.latency.p99_ns,
        }
    }
}

#[pymethods]
impl Stats {
    /// A table and a bar, for notebooks.
    pub(crate) fn _repr_html_(&self) -> String {
        let parts = [
            ("used", self.used, "#2563eb"),
            ("evictable", self.evictable, "#93c5fd"),
            ("retired", self.retired, "#fbbf24"),
            ("reserved", self.reserved, "#a78bfa"),
            ("held", self.held, "#9ca3af"),
            ("free", self.free, "#e5e7eb"),
        ];
        let share = |blocks: usize| 100.0 * blocks as f64 / self.total.max(1) as f64;
        let bar: String = parts
            .iter()
            .filter(|(_, blocks, _)| *blocks > 0)
            .map(|(name, blocks, colour)| {
                let width = share(*blocks);
                format!(
                    "<div title=\"{name}: {blocks}\" style=\"width:{width:.2}%;background:{colour}\"></div>"
                )
            })
            .collect();
        let rows: String = parts
            .iter()
            .map(|(name, blocks, _)| {
                format!(
                    "<tr><td>{name}</td><td style=\"text-align:right\">{blocks}</td><td>{:.1} %</td></tr>",
                    share(*blocks)
                )
            })
            .collect();
        format!(
            "<div><b>{} blocks</b>, pressure {}, {} waiting, {} batches in flight<div style=\"display:flex;height:14px;\
             max-width:480px;border:1px solid #9ca3af\">{bar}</div><table>{rows}</table></div>",
            self.total, self.pressure, self.waiting, self.batches_in_flight
        )
    }
}

record! {
    /// Fragmentation of the free frames.
    FragmentationState {
        /// log2 of the length of the runs that count.
        order: u8,
        /// Share of the possible free runs of that length that do not exist, 0 to 1.
        rate: f64,
        /// Share of the free frames outside of such runs, 0 to 1.
        unusable: f64,
        /// Number of free aligned runs of each order.
        free_by_order: Vec<usize>,
        /// Length of the longest free run in frames.
        longest_run: usize,
        /// Mean length of the free runs in frames.
        mean_run: f64,
    }
}

impl From<Fragmentation> for FragmentationState {
    fn from(state: Fragmentation) -> Self {
        Self {
            order: state.order.0,
            rate: state.rate,
            unusable: state.unusable,
            free_by_order: state.free_by_order.to_vec(),
            longest_run: state.longest_run,
            mean_run: state.mean_run,
        }
    }
}

record! {
    /// Runs of adjacent frames in the block tables of the open sequences. 0 without any.
    RunsPerSequence {
        /// Open sequences with blocks.
        sequences: usize,
        /// Mean number of runs of a sequence.
        mean: f64,
        /// Its median.
        p50: usize,
        /// Its 99th percentile.
        p99: usize,
        /// Mean length of the runs in blocks.
        mean_run: f64,
    }
}

impl From<SequenceRuns> for RunsPerSequence {
    fn from(runs: SequenceRuns) -> Self {
        let SequenceRuns { sequences, mean, p50, p99, mean_run, .. } = runs;
        Self { sequences, mean, p50, p99, mean_run }
    }
}

record! {
    /// Result of a compaction.
    DefragmentReport {
        /// Blocks that were moved to another frame.
        moved_blocks: usize,
        /// Their bytes.
        moved_bytes: u64,
        /// Evictable blocks that were dropped from the frames to which blocks moved.
        dropped_blocks: usize,
        /// Planned moves that did not take place.
        given_up: usize,
        /// Groups of moves that were copied together.
        waves: usize,
        /// Time without the wait for other runs.
        seconds: f64,
        /// Fragmentation rate before, 0 to 1.
        fragmentation_before: f64,
        /// Fragmentation rate after, 0 to 1.
        fragmentation_after: f64,
        /// Fragmentation rate of free and evictable frames before, 0 to 1.
        available_fragmentation_before: f64,
        /// Fragmentation rate of free and evictable frames after, 0 to 1.
        available_fragmentation_after: f64,
        /// Increase in the number of runs of free and evictable frames; negative if other threads
        /// took more.
        runs_gained: isize,
        /// Blocks that could not move: unsealed, pinned, or moving.
        fixed_blocks: usize,
        /// Whether blocks were moved and fewer runs are left, because of what others did meanwhile.
        is_worse: bool,
    }
}

impl From<DefragReport> for DefragmentReport {
    fn from(report: DefragReport) -> Self {
        Self {
            moved_blocks: report.moved_blocks,
            moved_bytes: report.moved_bytes,
            dropped_blocks: report.dropped_blocks,
            given_up: report.given_up.total(),
            waves: report.waves,
            seconds: report.time.as_secs_f64(),
            fragmentation_before: report.fragmentation_before,
            fragmentation_after: report.fragmentation_after,
            available_fragmentation_before: report.available_fragmentation_before,
            available_fragmentation_after: report.available_fragmentation_after,
            runs_gained: report.runs_gained,
            fixed_blocks: report.fixed_blocks,
            is_worse: report.is_worse(),
        }
    }
}

record! {
    /// Totals of a background defragmenter.
    DefragmenterTotals {
        /// Runs that moved at least one block.
        runs: usize,
        /// Runs that ended because a copy failed.
        failed: usize,
        /// Inspections of the pool.
        looks: usize,
        /// Blocks that were moved.
        moved_blocks: usize,
        /// Their bytes.
        moved_bytes: u64,
        /// Evictable blocks that were dropped from the frames to which blocks moved.
        dropped_blocks: usize,
        /// Planned moves that did not take place.
        given_up: usize,
        /// Time spent in runs.
        seconds: f64,
    }
}

impl From<DefragTotals> for DefragmenterTotals {
    fn from(totals: DefragTotals) -> Self {
        Self {
            runs: totals.runs,
            failed: totals.failed,
            looks: totals.looks,
            moved_blocks: totals.moved_blocks,
            moved_bytes: totals.moved_bytes,
            dropped_blocks: totals.dropped_blocks,
            given_up: totals.given_up.total(),
            seconds: totals.time.as_secs_f64(),
        }
    }
}

record! {
    /// Result of a resize.
    Resized {
        /// Number of blocks before.
        before: usize,
        /// Number of blocks after.
        after: usize,
        /// Blocks that were moved out of the way.
        moved_blocks: usize,
        /// Total time, including waits.
        seconds: f64,
    }
}

impl From<ResizeReport> for Resized {
    fn from(report: ResizeReport) -> Self {
        Self {
            before: report.from,
            after: report.to,
            moved_blocks: report.moved.moved_blocks,
            seconds: report.time.as_secs_f64(),
        }
    }
}

record! {
    /// Result of a migration.
    Migrated {
        /// Tokens of the sequence.
        tokens: usize,
        /// Blocks that the target had cached already.
        shared_blocks: usize,
        /// Blocks that were copied.
        copied_blocks: usize,
        /// Bytes that were copied.
        copied_bytes: u64,
        /// Runs of frames that were copied: one descriptor each.
        runs: usize,
        /// Time of the copies.
        seconds: f64,
    }
}

impl From<MigrationReport> for Migrated {
    fn from(report: MigrationReport) -> Self {
        Self {
            tokens: report.tokens,
            shared_blocks: report.shared_blocks,
            copied_blocks: report.carried.blocks,
            copied_bytes: report.carried.bytes,
            runs: report.carried.runs,
            seconds: report.carried.took.as_secs_f64(),
        }
    }
}

record! {
    /// An open sequence, and what its end would give back.
    Candidate {
        /// Id of the sequence.
        id: u64,
        /// Its priority.
        priority: String,
        /// Its tokens.
        tokens: usize,
        /// Its blocks, reserved ones included.
        blocks: usize,
        /// Blocks that would be free.
        freed_blocks: usize,
        /// Blocks that would stay in the prefix cache, evictable.
        cached_blocks: usize,
        /// Blocks that others share.
        shared_blocks: usize,
    }
}

impl From<Victim> for Candidate {
    fn from(victim: Victim) -> Self {
        Self {
            id: victim.id.0,
            priority: victim.priority.to_string(),
            tokens: victim.tokens,
            blocks: victim.blocks,
            freed_blocks: victim.freed_blocks,
            cached_blocks: victim.cached_blocks,
            shared_blocks: victim.shared_blocks,
        }
    }
}

record! {
    /// Result of a preemption.
    PreemptReport {
        /// Id of the sequence.
        id: u64,
        /// Blocks that became free.
        freed_blocks: usize,
        /// Blocks that stay in the prefix cache.
        cached_blocks: usize,
        /// Blocks that others share.
        shared_blocks: usize,
        /// Tokens that need not be computed again.
        tokens_kept: usize,
        /// Tokens that must be computed again.
        tokens_lost: usize,
    }
}

impl<S: kvpool::AnySequence> From<&Preempted<S>> for PreemptReport {
    fn from(preempted: &Preempted<S>) -> Self {
        Self {
            id: preempted.id.0,
            freed_blocks: preempted.freed_blocks,
            cached_blocks: preempted.cached_blocks,
            shared_blocks: preempted.shared_blocks,
            tokens_kept: preempted.tokens_kept,
            tokens_lost: preempted.tokens_lost,
        }
    }
}

record! {
    /// What an audit counted, in frames.
    Audit {
        /// All frames, including the null block's.
        total: usize,
        /// Frames that are free in the bitmaps.
        in_bitmap: usize,
        /// Frames that are free in threads' caches.
        in_magazines: usize,
        /// Retired frames.
        retired: usize,
        /// Held frames.
        held: usize,
        /// The part of `held` that is held for good, because it could not be wiped.
        unwiped: usize,
        /// Free frames reserved for urgent requests.
        reserved: usize,
        /// Frames of evictable blocks.
        evictable: usize,
        /// Frames of owned blocks.
        owned: usize,
        /// References on owned blocks.
        references: u64,
    }
}

impl From<AuditReport> for Audit {
    fn from(report: AuditReport) -> Self {
        Self {
            total: report.total,
            in_bitmap: report.in_bitmap,
            in_magazines: report.in_magazines,
            retired: report.retired,
            held: report.held,
            unwiped: report.unwiped,
            reserved: report.reserved,
            evictable: report.evictable,
            owned: report.owned,
            references: report.references,
        }
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Stats>()?;
    module.add_class::<FragmentationState>()?;
    module.add_class::<DefragmentReport>()?;
    module.add_class::<DefragmenterTotals>()?;
    module.add_class::<Resized>()?;
    module.add_class::<RunsPerSequence>()?;
    module.add_class::<Migrated>()?;
    module.add_class::<Candidate>()?;
    module.add_class::<PreemptReport>()?;
    module.add_class::<Audit>()
}

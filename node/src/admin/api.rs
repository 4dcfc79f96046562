use kvpool::{AuditReport, CompactionState, DefragReport, Fragmentation, Metrics, Pool, SequenceRuns};
use serde::de::Error as _;
use serde::ser::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::served_pool::ServedPool;

/// State of a node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Health {
    /// The state.
    pub state: HealthState,
    /// Name of the node.
    pub node: String,
    /// Version of the program.
    pub version: String,
}

/// Whether a node serves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum HealthState {
    /// It serves.
    Ok,
    /// It is ending, and accepts no new requests.
    Draining,
    /// The device of its pool is lost.
    DeviceLost,
}

/// Statistics of a node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StatsReport {
    /// Name of the node.
    pub node: String,
    /// Version of the program.
    pub version: String,
    /// Seconds since the node started.
    pub uptime_s: u64,
    /// What only a pool with sequences has, in the same object; `None` for a pool of frames.
    #[serde(flatten, deserialize_with = "of_sequences")]
    pub of_sequences: Option<SequenceStats>,
    /// Blocks in the pool, without the null block.
    pub total: usize,
    /// Owned blocks.
    pub used: usize,
    /// `100 * used / total`.
    pub used_percent: f64,
    /// Blocks that can be allocated without evicting.
    pub free: usize,
    /// Cached blocks without an owner, which are evicted as their frames are needed.
    pub evictable: usize,
    /// Fragmentation of the free frames.
    pub fragmentation: Fragmentation,
    /// Fragmentation rate if all evictable blocks were evicted, 0 to 1.
    pub available_fragmentation: f64,
    /// All counters, gauges and histograms of the pool. Those that a pool of frames lacks are
    /// absent in its JSON, and zero when read.
    #[serde(serialize_with = "metrics")]
    pub metrics: Metrics,
    /// Further counters of the node by name, such as those of synthetic traffic.
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub extra: serde_json::Map<String, serde_json::Value>,
}

/// Groups in [`Metrics`], and their fields that a pool of frames lacks: figures about tokens,
/// bytes, transfers and the batches of sequences, and times other than waits.
const NOT_OF_FRAMES: [(&str, &[&str]); 4] = [
    ("", &["query_tokens", "hit_tokens"]),
    ("/stats", &["latency", "batches_abandoned", "closing", "in_transfer", "quarantined", "unwiped"]),
    ("/moves", &["moved_bytes"]),
    ("/latencies", &["sampled_every", "allocate", "append", "admit", "free", "resize"]),
];

fn metrics<S: Serializer>(metrics: &Metrics, serializer: S) -> Result<S::Ok, S::Error> {
    // Only a pool of frames has no transfers.
    if metrics.migrations.is_some() {
        return metrics.serialize(serializer);
    }
    let mut found = serde_json::to_value(metrics).map_err(S::Error::custom)?;
    for (group, fields) in NOT_OF_FRAMES {
        let group = found.pointer_mut(group).and_then(|group| group.as_object_mut());
        let Some(group) = group else { continue };
        fields.iter().for_each(|field| drop(group.remove(*field)));
    }
    found.serialize(serializer)
}

/// Reads what only a pool with sequences has, from the object that it is a part of: `None` without
/// the field `sequences`. What this version cannot read is an error, not a pool of frames.
pub(super) fn of_sequences<'de, D: Deserializer<'de>, T: serde::de::DeserializeOwned>(
    fields: D,
) -> Result<Option<T>, D::Error> {
    let fields = serde_json::Map::deserialize(fields)?;
    let is_there = fields.contains_key("sequences");
    is_there.then(|| T::deserialize(serde_json::Value::Object(fields)).map_err(D::Error::custom)).transpose()
}

/// Statistics that a pool of frames lacks: of bytes, sequences, timed allocations and compaction.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SequenceStats {
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// The layout of a block as text.
    #[serde(default)]
    pub layout: String,
    /// Open sequences.
    pub sequences: usize,
    /// State of the background compaction, absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compaction: Option<CompactionState>,
    /// Runs of frames in the block tables of open sequences: the descriptors of their transfers.
    #[serde(default)]
    pub sequence_runs: SequenceRuns,
    /// Sampled times of allocations, including appends that needed blocks.
    pub allocation: AllocationTimes,
}

/// Sampled times of allocations, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AllocationTimes {
    /// Number of timed allocations; without any, the times are 0.
    pub samples: u64,
    /// Mean.
    pub mean_ns: f64,
    /// 99th percentile: the upper end of its bucket, at most 1/16 too high.
    pub p99_ns: u64,
}

/// Result of a compaction.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DefragOutcome {
    /// Blocks that were moved.
    pub moved_blocks: usize,
    /// Milliseconds from the first look at the pool to the last move.
    pub time_ms: f64,
    /// Fragmentation rate of the free frames before, 0 to 1.
    pub fragmentation_before: f64,
    /// Fragmentation rate of the free frames after, 0 to 1.
    pub fragmentation_after: f64,
    /// The full report of the pool.
    pub report: DefragReport,
    /// Whether free and evictable frames are more fragmented than before.
    #[serde(default)]
    pub is_worse: bool,
}

impl From<DefragReport> for DefragOutcome {
    fn from(report: DefragReport) -> Self {
        Self {
            moved_blocks: report.moved_blocks,
            time_ms: report.time.as_secs_f64() * 1e3,
            fragmentation_before: report.fragmentation_before,
            fragmentation_after: report.fragmentation_after,
            is_worse: report.is_worse(),
            report,
        }
    }
}

/// Order to resize the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResizeOrder {
    /// Number of blocks, without the null block.
    pub blocks: usize,
}

/// Result of a resize.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ResizeOutcome {
    /// Number of blocks before.
    pub from: usize,
    /// Number of blocks after.
    pub to: usize,
    /// Blocks that were moved out of the way.
    pub moved_blocks: usize,
    /// Milliseconds, including waits for other compactions and for batches.
    pub time_ms: f64,
}

/// Order to migrate a sequence to another node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrateOrder {
    /// Id of the sequence.
    pub sequence: u64,
    /// Name of the other node.
    pub to: String,
}

/// Declares that the process of a peer has ended and will not return.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EndedOrder {
    /// Name of the peer.
    pub peer: String,
}

/// Result of the declaration that a peer has ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct EndedOutcome {
    /// Name of the peer.
    pub peer: String,
    /// Ids of the sequences that were in doubt and are this node's own again.
    pub sequences: Vec<u64>,
}

/// The migrations that a node knows.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct MigrationList {
    /// The migrations, newest first.
    pub migrations: Vec<MigrationRecord>,
}

/// A migration, as one of its nodes sees it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MigrationRecord {
    /// Id, the same on both nodes.
    pub id: String,
    /// Kind.
    pub kind: MigrationKind,
    /// This node's side.
    pub side: MigrationSide,
    /// Name of the other node.
    pub peer: String,
    /// Id of the sequence; `None` for cached blocks.
    pub sequence: Option<u64>,
    /// State.
    pub state: MigrationState,
    /// Blocks of the migration.
    pub blocks: usize,
    /// Transport of the bytes; `None` before there are any, or if none were needed.
    pub transport: Option<MigrationTransport>,
    /// Bytes transferred so far; on the target, bytes requested.
    pub bytes: u64,
    /// Runs of frames of the transfers so far: the number of descriptors passed to the transport.
    pub runs: usize,
    /// Milliseconds since the beginning, or from beginning to end.
    pub time_ms: u64,
    /// Why it failed, or for how long it has been in doubt.
    pub reason: Option<String>,
}

/// Kind of a migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MigrationKind {
    /// A sequence, which leaves the source.
    Migrate,
    /// A sequence, which the source keeps.
    Replicate,
    /// Cached blocks, which the source evicts.
    Offload,
    /// Cached blocks, which are fetched.
    BringBack,
}

/// Transport of a migration's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MigrationTransport {
    /// TCP, without encryption.
    Tcp,
    /// TCP with TLS.
    Tls,
    /// A Unix socket.
    Unix,
    /// NIXL.
    Nixl,
}

/// Side of a migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MigrationSide {
    /// Blocks leave this node.
    Source,
    /// Blocks arrive at this node.
    Target,
}

/// State of a migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MigrationState {
    /// The target was asked to reserve blocks.
    Preparing,
    /// Bytes are being transferred.
    Transferring,
    /// The target is comparing checksums.
    Verifying,
    /// The target was sent `Commit`, and is about to answer.
    Committing,
    /// The target was sent `Commit`, and has not answered in time: the source holds the copy.
    InDoubt,
    /// The target owns the blocks.
    Committed,
    /// The source owns the blocks.
    Aborted,
}

impl MigrationRecord {
    /// Returns the preposition between the migration and its peer: `to` or `from`.
    pub const fn way(&self) -> &'static str {
        match self.side {
            MigrationSide::Source => "to",
            MigrationSide::Target => "from",
        }
    }

    /// Returns whether it has ended.
    pub const fn has_ended(&self) -> bool {
        matches!(self.state, MigrationState::Committed | MigrationState::Aborted)
    }
}

/// Result of an audit.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AuditOutcome {
    /// Whether the recount agrees with the counters, and every frame is in one place.
    pub sound: bool,
    /// The contradiction, if any.
    pub finding: Option<String>,
    /// Places of all frames, if the audit is sound.
    pub report: Option<AuditReport>,
}

impl AuditOutcome {
    /// Returns the outcome of an audit without a contradiction.
    pub fn sound(report: AuditReport) -> Self {
        Self { sound: true, finding: None, report: Some(report) }
    }

    /// Returns the outcome of an audit with a contradiction.
    pub fn unsound(finding: impl ToString) -> Self {
        Self { sound: false, finding: Some(finding.to_string()), report: None }
    }
}

impl StatsReport {
    /// Returns the statistics of a pool.
    pub fn of(node: &str, uptime: std::time::Duration, pool: &ServedPool) -> Self {
        let metrics = pool.metrics();
        let stats = &metrics.stats;
        Self {
            node: node.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_s: uptime.as_secs(),
            of_sequences: match pool {
                ServedPool::Pool(pool) => Some(SequenceStats::of(pool, &metrics)),
                ServedPool::Frames(_) => None,
            },
            total: stats.total,
            used: stats.used,
            used_percent: 100.0 * stats.utilization,
            free: stats.free,
            evictable: stats.evictable,
            fragmentation: pool.fragmentation(),
            available_fragmentation: pool.available_fragmentation(),
            metrics,
            extra: serde_json::Map::new(),
        }
    }
}

impl SequenceStats {
    fn of(pool: &Pool, metrics: &Metrics) -> Self {
        let latencies = &metrics.latencies;
        let samples = latencies.allocate.count() + latencies.append.count();
        let sum_ns = latencies.allocate.sum_ns + latencies.append.sum_ns;
        Self {
            block_bytes: pool.layout().bytes_per_block(),
            block_tokens: pool.layout().block_tokens(),
            layout: pool.layout().to_string(),
            sequences: pool.sequence_count(),
            compaction: pool.compaction_state(),
            sequence_runs: pool.sequence_runs(),
            allocation: AllocationTimes {
                samples,
                mean_ns: sum_ns as f64 / samples.max(1) as f64,
                p99_ns: metrics.stats.latency.p99_ns,
            },
        }
    }
}

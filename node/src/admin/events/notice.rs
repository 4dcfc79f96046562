use kvpool::{CompactionState, Latency, SequenceRuns};
use kvpool_map::{CellChanges, Cells};
use serde::{Deserialize, Serialize};

use super::super::api::{MigrationList, of_sequences};

/// An event of a node.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "event", content = "data", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Notice {
    /// Statistics.
    Stats(Box<StatsSummary>),
    /// All cells of the map.
    Map(Cells),
    /// Cells that changed.
    MapChanges(CellChanges),
    /// Migrations that are new or changed; at first, all.
    Migrations(MigrationList),
}

impl Notice {
    /// Returns the name of the event.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Stats(_) => "stats",
            Self::Map(_) => "map",
            Self::MapChanges(_) => "map_changes",
            Self::Migrations(_) => "migrations",
        }
    }

    /// Returns whether this version knows events of this name.
    pub(super) fn is_known(name: &str) -> bool {
        ["stats", "map", "map_changes", "migrations"].contains(&name)
    }
}

/// Summary of a node's statistics. Counters count since the node started.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StatsSummary {
    /// Name of the node.
    pub node: String,
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    /// Seconds since the node started.
    pub uptime_s: u64,
    /// What only a pool with sequences has, in the same object; `None` for a pool of frames.
    #[serde(flatten, deserialize_with = "of_sequences")]
    pub of_sequences: Option<SequenceSummary>,
    /// Blocks in the pool.
    pub total: usize,
    /// Owned blocks.
    pub used: usize,
    /// Blocks that can be allocated without evicting.
    pub free: usize,
    /// Cached blocks without an owner.
    pub evictable: usize,
    /// Freed blocks that a batch in flight may still read.
    pub retired: usize,
    /// Free blocks reserved for urgent requests.
    pub reserved: usize,
    /// Free blocks held by moves or by a shrink in progress.
    pub held: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Batches in flight.
    pub batches_in_flight: u64,
    /// Lower bound of the age of the oldest one in seconds, if any.
    pub oldest_batch_s: Option<f64>,
    /// Fragmentation rate, 0 to 1.
    pub fragmentation: f64,
    /// The same over free and evictable frames.
    pub available_fragmentation: f64,
    /// Length of the longest free run.
    pub longest_free_run: usize,
    /// Waits that ended in the last period.
    pub wait: Latency,
    /// Counter of requests that got blocks.
    pub allocations: u64,
    /// Counter of allocated blocks.
    pub allocated_blocks: u64,
    /// Counter of refused requests.
    pub refusals: u64,
    /// Counter of evicted blocks.
    pub evicted_blocks: u64,
    /// Counter of blocks that compactions moved.
    pub moved_blocks: u64,
}

/// Statistics that a pool of frames lacks: of bytes, sequences, timed allocations and transfers.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SequenceSummary {
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Open sequences.
    pub sequences: usize,
    /// State of the background compaction, absent without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compaction: Option<CompactionState>,
    /// Mean length of the runs of sequences: the `mean_run` of
    /// [`sequence_runs`](Self::sequence_runs).
    pub mean_sequence_run: f64,
    /// Runs of adjacent frames in the block tables of open sequences.
    #[serde(default)]
    pub sequence_runs: SequenceRuns,
    /// Sampled latency of allocations in the last period.
    pub allocation: Latency,
    /// Counter of prompt tokens looked up.
    pub query_tokens: u64,
    /// Counter of those that were cached.
    pub hit_tokens: u64,
    /// Counter of blocks that transfers of this pool copied.
    pub transferred_blocks: u64,
    /// Counter of their bytes.
    pub transferred_bytes: u64,
    /// Migrations in progress.
    pub migrations_running: usize,
    /// Peers with a link.
    pub peers_up: usize,
    /// Known peers.
    pub peers: usize,
}

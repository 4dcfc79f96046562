//! The report of a replay: the figures under stable names, which `--json` prints, and the table that
//! is made from them.

mod table;

use serde::Serialize;

use crate::replay::{CompactionTotals, Durations, Options, Outcome, ReplayPool, Resize, Tally};
use crate::trace::Trace;

pub use table::render;

/// The figures of a replay. The names are those of the JSON; shares are from 0 to 1.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The trace's name.
    pub trace: String,
    /// The layout's name.
    pub layout: String,
    /// Requests of the trace.
    pub requests: u64,
    /// Requests completed.
    pub completed: u64,
    /// Requests rejected because they are larger than the pool.
    pub rejected: u64,
    /// Times that a request was preempted, to start over later.
    pub preempted: u64,
    /// Scheduler threads.
    pub threads: usize,
    /// Seconds of the replay.
    pub wall_s: f64,
    /// Seconds from the first arrival to the last.
    pub trace_s: f64,
    /// `trace_s / wall_s`.
    pub speedup: f64,
    /// Tokens appended and written, also by preempted attempts.
    pub tokens: u64,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a block, over all layers.
    pub block_bytes: u64,
    /// Blocks of the pool at the start.
    pub blocks_total: usize,
    /// Blocks allocated, without those found in the cache.
    pub blocks_allocated: u64,
    /// Blocks of these that were freed.
    pub blocks_freed: u64,
    /// Free blocks that are missing at the end.
    pub blocks_leaked: u64,
    /// Blocks with a wrong byte.
    pub blocks_corrupt: u64,
    /// Tokens read back and compared.
    pub tokens_verified: u64,
    /// Times that the pool refused blocks.
    pub refused: u64,
    /// Prefix reuse; none without a prefix cache.
    pub prefix: Option<Prefix>,
    /// The share of blocks in use.
    pub utilization: Utilization,
    /// The share of free frames outside the free aligned runs of the pool's order.
    pub fragmentation: Fragmentation,
    /// The mean run of consecutive frames in a sequence's table, in blocks.
    pub run_len_mean: f64,
    /// What compaction did; none without compaction.
    pub defrag: Option<CompactionTotals>,
    /// The changes of the pool's size, in order.
    pub resize: Vec<Resize>,
    /// The durations of calls.
    pub latency_ns: Latencies,
    /// `ok`, or the error of the pool's recount.
    pub audit: String,
    /// Other faults.
    pub findings: Vec<String>,
    /// Whether the replay was interrupted, so that some requests are neither completed nor
    /// rejected.
    pub interrupted: bool,
    /// Whether at least one request was completed, nothing lost and nothing corrupt.
    pub sound: bool,
    /// Whether nothing was lost and nothing corrupt.
    #[serde(skip)]
    pub intact: bool,
    /// Whether tokens are read back.
    #[serde(skip)]
    pub verify: bool,
}

/// Prefix reuse. Each request counts at its first admission.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Prefix {
    /// The eviction policy.
    pub policy: String,
    /// Full blocks of prompts.
    pub lookup_blocks: u64,
    /// Leading blocks of each prompt that were cached.
    pub hit_blocks: u64,
    /// `hit_blocks / lookup_blocks`; 0 of nothing.
    pub hit_rate: f64,
    /// Blocks evicted because their frames were needed.
    pub evicted_blocks: u64,
    /// Full blocks of prompts that were admitted again after a preemption.
    pub resumed_lookup_blocks: u64,
    /// Leading blocks of each of these that were cached: mostly the request's own.
    pub resumed_hit_blocks: u64,
}

impl Prefix {
    fn new(policy: String, evicted_blocks: u64, tally: &Tally) -> Self {
        let Tally { lookup_blocks, hit_blocks, resumed_lookup_blocks, resumed_hit_blocks, .. } = *tally;
        let hit_rate = hit_blocks as f64 / lookup_blocks.max(1) as f64;
        Self {
            policy,
            lookup_blocks,
            hit_blocks,
            hit_rate,
            evicted_blocks,
            resumed_lookup_blocks,
            resumed_hit_blocks,
        }
    }
}

/// The share of blocks that belong to sequences, without those that are only cached.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Utilization {
    /// The mean over virtual time.
    pub mean: f64,
    /// The maximum.
    pub peak: f64,
    /// At the first refusal; none without one. Blocks that a step in flight may still read are in
    /// use.
    pub at_first_refusal: Option<f64>,
    /// The same, without blocks that belong to no sequence any more.
    pub owned_at_first_refusal: Option<f64>,
}

/// Shares of the free frames. Frames of cached blocks do not count.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Fragmentation {
    /// The mean over virtual time.
    pub mean: f64,
    /// The maximum.
    pub max: f64,
    /// At the end, with every block free.
    #[serde(rename = "final")]
    pub at_end: f64,
}

/// The durations of calls.
#[derive(Clone, Debug, Serialize)]
pub struct Latencies {
    /// An append that allocates blocks, one or many.
    pub allocate: Durations,
    /// The closing of a sequence, which frees all of its blocks.
    pub free: Durations,
}

impl Report {
    /// Makes the report of a replay.
    pub fn new(trace: &Trace, layout: &str, pool: &ReplayPool, options: &Options, outcome: Outcome) -> Self {
        let requests = trace.requests.len();
        let (sound, intact) = (outcome.is_sound(requests), outcome.is_intact());
        let (shape, tally) = (pool.shape(), outcome.tally);
        let (wall_s, trace_s) = (outcome.wall.as_secs_f64(), trace.span().as_secs_f64());
        let token_bytes = shape.layers * (shape.k_bytes + shape.v_bytes);
        Self {
            trace: trace.name.clone(),
            layout: layout.to_owned(),
            requests: requests as u64,
            completed: tally.completed,
            rejected: tally.rejected,
            preempted: tally.preempted,
            threads: options.threads,
            wall_s,
            trace_s,
            speedup: trace_s / wall_s.max(f64::MIN_POSITIVE),
            tokens: tally.tokens,
            block_tokens: shape.block_tokens,
            block_bytes: (token_bytes * shape.block_tokens) as u64,
            blocks_total: outcome.blocks_total,
            blocks_allocated: tally.blocks_allocated,
            blocks_freed: tally.blocks_freed,
            blocks_leaked: outcome.blocks_leaked as u64,
            blocks_corrupt: tally.corrupt.len() as u64,
            tokens_verified: tally.tokens_verified,
            refused: tally.refused,
            prefix: outcome.prefix.map(|(policy, evicted)| Prefix::new(policy, evicted, &tally)),
            utilization: Utilization {
                mean: tally.utilization.mean(),
                peak: tally.utilization.max,
                at_first_refusal: outcome.first_refusal.map(|(used, _)| used),
                owned_at_first_refusal: outcome.first_refusal.map(|(_, owned)| owned),
            },
            fragmentation: Fragmentation {
                mean: tally.fragmentation.mean(),
                max: tally.fragmentation.max,
                at_end: outcome.fragmentation_final,
            },
            run_len_mean: tally.run_len_mean(),
            defrag: outcome.compaction,
            resize: outcome.resizes,
            latency_ns: Latencies { allocate: tally.allocate, free: tally.free },
            audit: outcome.audit.err().unwrap_or_else(|| "ok".to_owned()),
            findings: tally.findings,
            interrupted: outcome.interrupted,
            sound,
            intact,
            verify: options.verify,
        }
    }
}

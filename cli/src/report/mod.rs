//! What a replay came to: the figures under stable names, which `--json` prints, and the table.

mod table;

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::replay::{CompactionTotals, Outcome, PrefixTotals, Resize, ResizeOutcome, Shape, Tally};

#[cfg(test)]
pub(crate) use table::names;
pub use table::render;

/// What a replay came to. The names are those of the JSON; shares are from 0 to 1.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// Where the requests came from.
    pub trace: String,
    /// The layout's name.
    pub layout: String,
    /// Requests in the replay.
    pub requests: u64,
    /// Requests done.
    pub completed: u64,
    /// Requests that no empty pool could hold.
    pub rejected: u64,
    /// How often a request gave way, to start over later.
    pub preempted: u64,
    /// Scheduler threads.
    pub threads: usize,
    /// Seconds that the replay took.
    pub wall_s: f64,
    /// Seconds from the first arrival to the last.
    pub trace_s: f64,
    /// `trace_s / wall_s`.
    pub speedup: f64,
    /// Tokens appended and written, those of attempts that gave way included.
    pub tokens: u64,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a block, over all layers.
    pub block_bytes: u64,
    /// Blocks of the pool at the start.
    pub blocks_total: usize,
    /// Blocks taken; those that were found in the cache are not among them.
    pub blocks_allocated: u64,
    /// Those of them that were given back.
    pub blocks_freed: u64,
    /// Blocks that the pool is short of at the end.
    pub blocks_leaked: u64,
    /// Blocks in which a byte was not as it was written.
    pub blocks_corrupt: u64,
    /// Tokens read back and compared.
    pub tokens_verified: u64,
    /// How often the pool refused blocks.
    pub refused: u64,
    /// Prefix reuse; none if there was none.
    pub prefix: Option<Prefix>,
    /// The share of blocks in use.
    pub utilization: Utilization,
    /// The share of free frames outside the free aligned runs of the pool's order.
    pub fragmentation: Fragmentation,
    /// The mean run of consecutive frames in a sequence's table, in blocks.
    pub run_len_mean: f64,
    /// What compaction did beside it; none if there was none.
    pub defrag: Option<DefragSum>,
    /// Each change of the pool's size, in order.
    pub resize: Vec<ResizeStep>,
    /// How long a call took.
    pub latency_ns: Latencies,
    /// `ok`, or what the pool's recount found.
    pub audit: String,
    /// What else went wrong.
    pub findings: Vec<String>,
    /// Whether the replay was interrupted, so that some requests are neither completed nor
    /// rejected.
    pub interrupted: bool,
    /// Whether at least one request was completed, nothing lost and nothing corrupt.
    pub sound: bool,
    /// Whether nothing was lost and nothing corrupt.
    #[serde(skip)]
    pub intact: bool,
    /// Whether tokens were to be read back.
    #[serde(skip)]
    pub verify: bool,
}

/// Prefix reuse. Each request counts when it is admitted for the first time.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Prefix {
    /// By which blocks were evicted.
    pub policy: String,
    /// Full blocks of prompts.
    pub lookup_blocks: u64,
    /// Leading ones of each that were cached.
    pub hit_blocks: u64,
    /// `hit_blocks / lookup_blocks`.
    pub hit_rate: f64,
    /// Blocks that were evicted because their frames were needed.
    pub evicted_blocks: u64,
    /// Full blocks of the prompts, and of what had been said, of requests that had given way.
    pub resumed_lookup_blocks: u64,
    /// Leading ones of each that were cached: mostly their own.
    pub resumed_hit_blocks: u64,
}

impl Prefix {
    fn of(totals: &PrefixTotals, tally: &Tally) -> Self {
        Self {
            policy: totals.policy.clone(),
            lookup_blocks: tally.lookup_blocks,
            hit_blocks: tally.hit_blocks,
            hit_rate: share(tally.hit_blocks, tally.lookup_blocks),
            evicted_blocks: totals.evicted_blocks,
            resumed_lookup_blocks: tally.resumed_lookup_blocks,
            resumed_hit_blocks: tally.resumed_hit_blocks,
        }
    }
}

/// The share of some in all; 0 of nothing.
fn share(some: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { some as f64 / all as f64 }
}

/// The share of blocks that belong to sequences. Those that are only cached do not.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Utilization {
    /// Over the virtual time of the replay.
    pub mean: f64,
    /// At most.
    pub peak: f64,
    /// When the pool refused blocks for the first time; none if it never did. Blocks that a step in flight may still
    /// read are in use.
    pub at_first_refusal: Option<f64>,
    /// The same, without the blocks that belong to no sequence any more.
    pub owned_at_first_refusal: Option<f64>,
}

/// Shares of free frames. Those that hold cached blocks are not free in this sense.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Fragmentation {
    /// Over the virtual time of the replay.
    pub mean: f64,
    /// At most.
    pub max: f64,
    /// When every block was free again.
    #[serde(rename = "final")]
    pub at_end: f64,
}

/// Compaction, in all.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct DefragSum {
    /// Times that something was to be done.
    pub runs: u64,
    /// Blocks that were moved.
    pub moved_blocks: u64,
    /// Their bytes.
    pub moved_bytes: u64,
    /// Moves that gave way.
    pub given_up: u64,
    /// Milliseconds that runs took.
    pub time_ms: f64,
    /// Fragmentation before a run, on average.
    pub fragmentation_before: f64,
    /// Fragmentation after a run, on average.
    pub fragmentation_after: f64,
    /// What went wrong.
    pub errors: Vec<String>,
}

impl DefragSum {
    fn of(totals: &CompactionTotals) -> Self {
        Self {
            runs: totals.runs,
            moved_blocks: totals.moved_blocks,
            moved_bytes: totals.moved_bytes,
            given_up: totals.given_up,
            time_ms: totals.time.as_secs_f64() * 1e3,
            fragmentation_before: totals.fragmentation_before,
            fragmentation_after: totals.fragmentation_after,
            errors: totals.errors.clone(),
        }
    }
}

/// A change of the pool's size.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ResizeStep {
    /// Requests settled when it was begun.
    pub at_request: u64,
    /// Blocks before.
    pub from: usize,
    /// Blocks that the pool was to have.
    pub to: usize,
    /// Milliseconds from the first try to the end of the last.
    pub time_ms: f64,
    /// Tries.
    pub attempts: u32,
    /// `done`, or `blocked: ` or `failed: ` and why.
    pub outcome: String,
}

impl ResizeStep {
    fn of(resize: &Resize) -> Self {
        Self {
            at_request: resize.at_request,
            from: resize.from,
            to: resize.to,
            time_ms: resize.time.as_secs_f64() * 1e3,
            attempts: resize.attempts,
            outcome: match &resize.outcome {
                ResizeOutcome::Done => "done".to_owned(),
                ResizeOutcome::Blocked(reason) => format!("blocked: {reason}"),
                ResizeOutcome::Failed(reason) => format!("failed: {reason}"),
            },
        }
    }
}

/// How long calls took, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Latencies {
    /// An append that takes blocks, one or many.
    pub allocate: Latency,
    /// The end of a sequence, which gives all of its blocks back.
    pub free: Latency,
}

/// One call's, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Latency {
    /// Half are faster.
    pub p50: u64,
    /// One of a hundred is slower.
    pub p99: u64,
    /// One of a thousand is slower.
    pub p999: u64,
    /// The slowest.
    pub max: u64,
}

impl Latency {
    fn of(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile);
        Self { p50: at(0.5), p99: at(0.99), p999: at(0.999), max: histogram.max() }
    }
}

/// What was replayed.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// Where the requests came from.
    pub trace: &'a str,
    /// How many.
    pub requests: usize,
    /// From the first arrival to the last.
    pub span: Duration,
    /// The layout's name.
    pub layout: &'a str,
    /// Its shape.
    pub shape: Shape,
    /// Blocks of the pool.
    pub blocks: usize,
    /// Scheduler threads.
    pub threads: usize,
    /// Whether tokens were to be read back.
    pub verify: bool,
}

impl Report {
    /// The report of an outcome.
    pub fn new(subject: &Subject<'_>, outcome: &Outcome) -> Self {
        let Subject { shape, .. } = *subject;
        let tally = &outcome.tally;
        let (wall_s, trace_s) = (outcome.wall.as_secs_f64(), subject.span.as_secs_f64());
        let token_bytes = shape.layers * (shape.k_bytes + shape.v_bytes);
        Self {
            trace: subject.trace.to_owned(),
            layout: subject.layout.to_owned(),
            requests: subject.requests as u64,
            completed: tally.completed,
            rejected: tally.rejected,
            preempted: tally.preempted,
            threads: subject.threads,
            wall_s,
            trace_s,
            speedup: trace_s / wall_s.max(f64::MIN_POSITIVE),
            tokens: tally.tokens,
            block_tokens: shape.block_tokens,
            block_bytes: (token_bytes * shape.block_tokens) as u64,
            blocks_total: subject.blocks,
            blocks_allocated: tally.blocks_allocated,
            blocks_freed: tally.blocks_freed,
            blocks_leaked: outcome.blocks_leaked as u64,
            blocks_corrupt: tally.corrupt.len() as u64,
            tokens_verified: tally.tokens_verified,
            refused: tally.refused,
            prefix: outcome.prefix.as_ref().map(|prefix| Prefix::of(prefix, tally)),
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
            defrag: outcome.compaction.as_ref().map(DefragSum::of),
            resize: outcome.resizes.iter().map(ResizeStep::of).collect(),
            latency_ns: Latencies {
                allocate: Latency::of(&tally.allocate_ns),
                free: Latency::of(&tally.free_ns),
            },
            audit: outcome.audit.clone().err().unwrap_or_else(|| "ok".to_owned()),
            findings: tally.findings.clone(),
            interrupted: outcome.interrupted,
            sound: outcome.is_sound(subject.requests),
            intact: outcome.is_intact(),
            verify: subject.verify,
        }
    }
}

//! The report of a replay: figures under stable names, which `--json` prints, and the table made
//! from them.

mod table;

use serde_json::{Value, json};

use indicatif::HumanCount;
use kvpool::storage::groups::Reach;

use crate::replay::{
    Distribution, Ended, Group, GroupUse, Options, Outcome, ReplayPool, Resize, TableRuns, Tally,
    failed_copies,
};
use crate::trace::Trace;

pub use table::render;

/// The figures of a replay, and the conditions of its exit code.
#[derive(Clone, Debug)]
pub struct Report {
    /// The JSON. Shares are from 0 to 1.
    pub figures: Value,
    /// Whether nothing was lost or corrupt.
    pub intact: bool,
    pub verify: bool,
    /// Whether the table leaves out sections.
    pub is_brief: bool,
}

impl Report {
    /// Returns the report of a replay on a pool with this layout, or of this model.
    pub fn new(
        trace: &Trace,
        (layout, model): (&str, Option<&str>),
        pool: &ReplayPool,
        options: &Options,
        outcome: &Outcome,
    ) -> Self {
        let Outcome { tally, blocks_total, blocks_leaked, fragmentation_final, .. } = outcome;
        let requests = trace.requests.len();
        let span = outcome.sessions.map_or(trace.span(), |_| outcome.virtual_time);
        let (wall_s, trace_s) = (outcome.wall.as_secs_f64(), span.as_secs_f64());
        let block_tokens = pool.shape().block_tokens;
        // The share of the full blocks of prompts that were cached.
        let hit_rate = tally.hit_blocks as f64 / tally.lookup_blocks.max(1) as f64;
        // Each request counts at its first admission; `resumed`: after a preemption.
        let prefix = outcome.prefix.as_ref().map(|(policy, evicted_blocks)| {
            json!({
                "policy": policy,
                "lookup_blocks": tally.lookup_blocks,
                "hit_blocks": tally.hit_blocks,
                "hit_rate": hit_rate,
                "evicted_blocks": evicted_blocks,
                "resumed_lookup_blocks": tally.resumed_lookup_blocks,
                "resumed_hit_blocks": tally.resumed_hit_blocks,
            })
        });
        let defrag = outcome.compaction.as_ref().map(|totals| {
            json!({
                "runs": totals.runs,
                "moved_blocks": totals.moved_blocks,
                "moved_bytes": totals.moved_bytes,
                "dropped_blocks": totals.dropped_blocks,
                "given_up": totals.given_up.total(),
                "time_ms": totals.time.as_secs_f64() * 1e3,
                // Means over the runs.
                "fragmentation_before": totals.fragmentation_before(),
                "fragmentation_after": totals.fragmentation_after(),
                "available_fragmentation_before": totals.available_fragmentation_before(),
                "available_fragmentation_after": totals.available_fragmentation_after(),
                "errors": failed_copies(totals).into_iter().collect::<Vec<_>>(),
            })
        });
        // The same requests in a free list of single blocks; null without one.
        let free_list = outcome.list_added.map(|added| {
            json!({
                "run_len_mean": tally.listed.mean_len(),
                "runs_per_sequence": runs(&tally.listed),
                "hit_rate": prefix.as_ref().map(|_| tally.listed_hits as f64 / tally.lookup_blocks.max(1) as f64),
                // Blocks that the list lacked at its fullest.
                "blocks_added": added,
            })
        });
        let figures = json!({
            "trace": trace.name,
            // One of them is null.
            "layout": model.is_none().then_some(layout),
            "model": model,
            "requests": requests,
            "completed": tally.completed,
            "rejected": tally.rejected,
            "preempted": tally.preempted,
            "threads": options.threads,
            "wall_s": wall_s,
            // User and system time of all threads during `wall_s`; null if the system does not
            // count it.
            "cpu_s": outcome.cpu.map(|time| time.as_secs_f64()),
            "trace_s": trace_s,
            "speedup": trace_s / wall_s.max(f64::MIN_POSITIVE),
            // Appended and written, also by preempted attempts.
            "tokens": tally.tokens,
            // Of open sequences, with cached ones and prompts for which all blocks are reserved.
            "peak_tokens_held": outcome.peak_tokens,
            "tokens_held_at_first_refusal": outcome.first_refusal.map(|refusal| refusal.tokens),
            // The most that a block has in any group.
            "block_tokens": block_tokens,
            "block_bytes": pool.block_bytes(),
            // At the start.
            "blocks_total": blocks_total,
            // Without blocks found in the cache.
            "blocks_allocated": tally.blocks_allocated,
            "blocks_freed": tally.blocks_freed,
            "blocks_leaked": blocks_leaked,
            "blocks_corrupt": tally.corrupt.len(),
            "tokens_verified": tally.tokens_verified,
            "refused": tally.refused,
            // The same as in `prefix`; null without a cache.
            "hit_rate": outcome.prefix.as_ref().map(|_| hit_rate),
            "prefix": prefix,
            // Shares of the blocks that belong to sequences. `mean` is over virtual time. At the
            // first refusal, blocks that a step in flight may still read count, but are not
            // `owned`.
            "utilization": {
                "mean": tally.utilization.mean(),
                "peak": tally.utilization.max,
                "at_first_refusal": outcome.first_refusal.map(|refusal| refusal.used),
                "owned_at_first_refusal": outcome.first_refusal.map(|refusal| refusal.owned),
            },
            // Shares of the free frames outside the free aligned runs of the pool's order. Frames
            // of cached blocks do not count; in the end, every block is free.
            "fragmentation": {
                "mean": tally.fragmentation.mean(),
                "max": tally.fragmentation.max,
                "final": fragmentation_final,
                "reserved_for_growth": tally.reserved_for_growth.mean(),
            },
            // Consecutive frames in a sequence's table, also when it is preempted: all blocks over
            // all runs.
            "run_len_mean": tally.tables.mean_len(),
            // The number of such runs in the table of a completed request: the descriptors that a
            // transfer of the whole sequence needs.
            "runs_per_sequence": runs(&tally.tables),
            // At cuts: kept, and refused for lack of memory; null without states or cache.
            "states": (pool.has_states() && prefix.is_some()).then(|| json!({
                "checkpoints": tally.checkpoints,
                "refused": tally.checkpoints_refused,
            })),
            // Of each group of layers, with --model or --window.
            "groups": pool.groups().iter().zip(&tally.groups).map(group).collect::<Vec<_>>(),
            // In a closed loop, with --sessions; otherwise null.
            "sessions": outcome.sessions.map(|sessions| of_sessions(sessions, options, tally)),
            // The report of the generated agents that follow generated conversations; null if the
            // flags choose the requests or the pool.
            "agents": null,
            "free_list": free_list,
            "defrag": defrag,
            "resize": outcome.resizes.iter().map(resize).collect::<Vec<_>>(),
            // Of an append that allocates blocks, one or many, and of closing a sequence.
            "latency_ns": {
                "allocate": times(&tally.allocate),
                "free": times(&tally.free),
            },
            "audit": outcome.audit.as_ref().err().map_or("ok", String::as_str),
            "findings": tally.findings,
            "interrupted": outcome.interrupted,
            "sound": outcome.is_sound(requests),
        });
        Self { figures, intact: outcome.is_intact(), verify: options.verify, is_brief: false }
    }
}

/// Describes what a sequence keeps, in few words.
pub(crate) fn keeps(reach: Reach) -> String {
    let count = |number| HumanCount(number).to_string();
    match reach {
        Reach::All => "all".to_owned(),
        Reach::Compressed { ratio } => format!("1 in {}", count(ratio)),
        Reach::Window { tokens, sinks: 0 } => format!("window {}", count(tokens)),
        Reach::Window { tokens, sinks } => format!("window {} + {}", count(tokens), count(sinks)),
        Reach::Chunk { tokens } => format!("chunk {}", count(tokens)),
        Reach::State => "state".to_owned(),
        Reach::Ring { tokens } => format!("ring {}", count(tokens)),
        Reach::Draft { ahead } => format!("all, {} ahead", count(ahead)),
        other => format!("{other:?}"),
    }
}

/// Returns the mean and the quantiles of the runs of completed requests.
pub(crate) fn runs(tables: &TableRuns) -> Value {
    let runs = &tables.per_sequence;
    json!({ "mean": runs.mean(), "p50": runs.at(0.5), "p99": runs.at(0.99) })
}

fn of_sessions((all, ended): (usize, Ended), options: &Options, tally: &Tally) -> Value {
    let first_token = &tally.first_token;
    let at_ms = |share| first_token.at(share) as f64 / 1e6;
    json!({
        "at_once": options.sessions.map(|sessions| sessions.at_once),
        // Without subagents, which are parts of a session.
        "sessions": all,
        "completed": ended.sessions,
        "subagents": ended.subagents,
        // Of prompts, at their first admission.
        "prompt_tokens": tally.prompt_tokens,
        // Computed for an earlier prompt or a preempted attempt, and not cached any more.
        "recomputed_tokens": tally.recomputed_tokens,
        // From the arrival to the end of the step with the first token: queueing and prefill, by
        // the cost model.
        "first_token_ms": { "mean": first_token.mean() / 1e6, "p50": at_ms(0.5), "p99": at_ms(0.99) },
        "tells_returns": options.sessions.is_some_and(|sessions| sessions.tells_returns),
    })
}

fn group((group, used): (&Group, &GroupUse)) -> Value {
    json!({
        "keeps": group.keeps.iter().map(|&reach| keeps(reach)).collect::<Vec<_>>().join(" · "),
        "layers": group.layers,
        // Null for a state.
        "block_tokens": group.block_tokens,
        "block_frames": group.lists.len().max(group.state_frames),
        // Frames of open sequences, with those reserved, over virtual time. Shared ones count for
        // each sequence.
        "frames_mean": used.frames.mean(),
        "frames_peak": used.frames.max as u64,
        // Blocks of a frame each, before the end of their sequence.
        "blocks_given_up": used.given_up,
    })
}

fn times(times: &Distribution) -> Value {
    json!({ "p50": times.at(0.5), "p99": times.at(0.99), "p999": times.at(0.999), "max": times.at(1.0) })
}

fn resize(step: &Resize) -> Value {
    json!({
        "at_request": step.at_request,
        "from": step.from,
        "to": step.to,
        "time_ms": step.time_ms,
        "attempts": step.attempts,
        "outcome": step.outcome.as_ref().err().map_or("done".to_owned(), ToString::to_string),
    })
}

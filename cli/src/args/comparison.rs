//! What `kvpool replay` compares.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::ReplayArgs;

/// Comparisons of a replay.
#[derive(Clone, Debug, Args)]
pub struct ComparisonArgs {
    /// Serve the same requests from a free list too, the queue of single blocks that vLLM has, and
    /// report its runs and hits [default: free-list for generated requests, none for a trace
    /// and with --resize-at, --sessions, --model or --window]
    #[arg(long, value_name = "WHAT", value_enum)]
    pub compare: Option<Baseline>,
    /// Print how contiguity depends on use: runs and hits while open sequences hold 30, 50, 65, 80,
    /// 90 and 95 % of the pool, with the prefix cache, without it, and in a free list
    ///
    /// With --model or --window also for each group of layers, and without a free list.
    /// A request begins when the blocks of open sequences fall below that share, whenever it
    /// arrives. Each replay has one scheduler thread, no compaction, and is the same for the same
    /// seed; --threads is the number of replays at a time. Tokens are not read back.
    #[arg(long, conflicts_with_all = [
        "compare", "resize_at", "prefix_cache", "no_verify", "defrag_threshold", "defrag_interval_ms", "no_defrag",
        "sessions",
    ])]
    pub sweep: bool,
    /// Draw the runs of the sweep as SVG
    #[arg(long, value_name = "FILE.svg", requires = "sweep")]
    pub plot: Option<PathBuf>,
}

/// What a replay is compared with.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Baseline {
    /// A free list of single blocks.
    FreeList,
    /// Nothing.
    None,
}

impl ReplayArgs {
    /// Returns whether a free list serves the same requests. It keeps its size and all tokens.
    pub(crate) fn free_list(&self) -> anyhow::Result<bool> {
        match (self.comparison.compare, &self.resize_at) {
            (Some(Baseline::FreeList), Some(_)) => {
                anyhow::bail!("--compare free-list does not follow --resize-at: a free list keeps its size")
            }
            (Some(Baseline::FreeList), _) if self.model.has_groups() => {
                anyhow::bail!(
                    "--compare free-list has one list that keeps all tokens: it does not follow --model and --window"
                )
            }
            (Some(baseline), _) => Ok(baseline == Baseline::FreeList),
            (None, resize_at) => {
                let is_plain =
                    resize_at.is_none() && self.sessions.sessions.is_none() && !self.model.has_groups();
                Ok(self.workload.trace.is_empty() && is_plain)
            }
        }
    }
}

//! What `kvpool replay` compares.

use clap::{Args, ValueEnum};

use super::ReplayArgs;
use crate::commands::CommandError;

/// Comparisons of a replay.
#[derive(Clone, Debug, Args)]
pub struct ComparisonArgs {
    /// Serve the same requests from a free list too, the queue of single blocks that vLLM has, and
    /// report its runs and hits [default: free-list for generated conversations, none for a trace
    /// and with --resize-at]
    #[arg(long, value_name = "WHAT", value_enum)]
    pub compare: Option<Baseline>,
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
    /// Returns whether a free list serves the same requests. It keeps its size.
    pub(crate) fn free_list(&self) -> Result<bool, CommandError> {
        match (self.comparison.compare, &self.resize_at) {
            (Some(Baseline::FreeList), Some(_)) => Err(CommandError::ComparedSizes),
            (Some(baseline), _) => Ok(baseline == Baseline::FreeList),
            (None, resize_at) => Ok(self.workload.trace.is_none() && resize_at.is_none()),
        }
    }
}

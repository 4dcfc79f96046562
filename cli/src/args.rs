//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::trace::{Format, REQUESTS_MAX};

/// The most blocks that can be asked for: as many as a pool can address, one of which is the null block.
const BLOCKS_MAX: u64 = kvpool::ids::FRAMES_MAX as u64 - 1;

/// A lock-free pool for the KV-cache blocks of LLM inference engines.
#[derive(Clone, Debug, Parser)]
#[command(name = "kvpool", version, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Replay a trace through many scheduler threads over one pool, and check every byte
    Replay(ReplayArgs),
}

/// Replay a trace through many scheduler threads over one pool, and check every byte.
///
/// Each thread batches continuously, in virtual time: prompts are loaded in pieces, answers grow token by token,
/// and when the pool is full the request that arrived last gives way and starts over later. Every token's bytes are
/// written through its slot and read back through the block table.
///
/// Exit code: 0 if all is well, 1 if anything was lost or corrupt, 2 for bad usage or input.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// The trace; `-` is the standard input. Without one, conversations are made up from the seed
    #[arg(value_name = "TRACE")]
    pub trace: Option<PathBuf>,
    /// What the trace is written as; auto tells by how it begins
    #[arg(long, value_enum, default_value_t = FormatArg::Auto)]
    pub format: FormatArg,
    /// Blocks of the pool; by default as many that it is full at the busiest moments
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=BLOCKS_MAX))]
    pub blocks: Option<u64>,
    /// Tokens of a block
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub block_tokens: u32,
    /// Scheduler threads; by default one for each core
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Only the first N requests; of made-up conversations, how many [default: all, or 30000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=REQUESTS_MAX as i64))]
    pub requests: Option<u32>,
    /// What conversations are made up from
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// The bytes of a token: `probe` (16 bytes), or a model's own, such as `qwen2.5-7b`
    #[arg(long, value_name = "NAME", default_value = "probe")]
    pub layout: String,
    /// Write every token, and read none back
    #[arg(long)]
    pub no_verify: bool,
    /// Print the report as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `--format`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum FormatArg {
    /// Tell by how it begins
    Auto,
    /// JSON lines: timestamp, input_length, output_length, hash_ids
    Mooncake,
    /// CSV: TIMESTAMP, ContextTokens, GeneratedTokens
    Azure,
}

impl FormatArg {
    /// The format, unless it is to be told by how the trace begins.
    pub const fn format(self) -> Option<Format> {
        match self {
            Self::Auto => None,
            Self::Mooncake => Some(Format::Mooncake),
            Self::Azure => Some(Format::Azure),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn absurd_numbers_are_refused() {
        for bad in [
            ["--blocks", "0"],
            ["--blocks", "134217728"],
            ["--threads", "0"],
            ["--threads", "-1"],
            ["--requests", "0"],
            ["--requests", "10000001"],
            ["--block-tokens", "0"],
            ["--seed", "x"],
            ["--format", "xml"],
        ] {
            assert!(Cli::try_parse_from(["kvpool", "replay"].into_iter().chain(bad)).is_err(), "{bad:?}");
        }
        assert!(Cli::try_parse_from(["kvpool", "replay", "--blocks", "134217727"]).is_ok());
    }
}

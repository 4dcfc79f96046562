use clap::Args;

use super::{GroupingArgs, size, whole};

/// `kvpool layout`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub struct LayoutArgs {
    /// The `config.json` of a model (or its folder), a model such as `Qwen/Qwen2.5-7B`, or numbers
    /// such as layers=32,kv-heads=8,head-dim=128
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Lengths of sequences
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "600,4096,32768,131072", value_parser = whole(1..=1 << 32), allow_negative_numbers = true)]
    pub tokens: Vec<u64>,
    /// Memory for blocks
    #[arg(long, value_name = "SIZE", default_value = "40GiB", value_parser = size::bytes)]
    pub memory: u64,
    /// Groups of its layers.
    #[command(flatten)]
    pub grouping: GroupingArgs,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

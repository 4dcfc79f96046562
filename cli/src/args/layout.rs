use clap::Args;
use kvpool::Dtype;

use super::{size, whole};

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
    /// The type of the elements of K and V [default: the model's]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<Dtype>,
    /// With the layers that draft tokens (multi-token prediction)
    #[arg(long)]
    pub drafts: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

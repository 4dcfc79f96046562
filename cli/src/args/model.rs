//! Models whose layers differ, and windows.

use anyhow::bail;
use clap::Args;
use kvpool::storage::KvLayout;
use kvpool::storage::groups::{DraftLayers, GroupOptions, LayerGroups};
use kvpool::{DeviceId, Dtype, TOKENS_MAX, Window};

use super::{size, whole};
use crate::error::named;
use crate::replay::{Layers, STEP_TOKENS};

/// How the layers of a model are counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Args)]
pub struct GroupingArgs {
    /// The type of the elements of K and V [default: the model's]
    #[arg(long, value_name = "TYPE")]
    pub dtype: Option<Dtype>,
    /// With the layers that draft tokens (multi-token prediction)
    #[arg(long)]
    pub drafts: bool,
}

impl GroupingArgs {
    /// Returns the options of a grouping.
    pub fn options(self) -> GroupOptions {
        let drafts = if self.drafts { DraftLayers::Included } else { DraftLayers::Omitted };
        let mut options = GroupOptions::new().drafts(drafts);
        options.dtype = self.dtype;
        options
    }
}

/// The model of a replay.
#[derive(Clone, PartialEq, Eq, Debug, Default, Args)]
pub struct ModelArgs {
    /// Replay on the pool of a model, whose layers may differ: the `config.json` of a model (or its
    /// folder), or a model such as `Qwen/Qwen2.5-7B`. Blocks are frames of the size that `kvpool
    /// layout` prints, of which a few bytes per token are stored and checked
    #[arg(long, value_name = "CONFIG|NAME", conflicts_with_all = ["layout", "block_tokens", "window"])]
    pub model: Option<String>,
    /// Groups of its layers.
    #[command(flatten)]
    pub grouping: GroupingArgs,
    /// Memory for blocks, such as 4GiB, instead of their number
    #[arg(long, value_name = "SIZE", value_parser = size::bytes, conflicts_with = "blocks")]
    pub memory: Option<u64>,
    /// The attention window of all layers, in tokens: sequences give up the blocks behind it
    #[arg(long, value_name = "N", value_parser = whole(1..=TOKENS_MAX as u64), allow_negative_numbers = true)]
    pub window: Option<u64>,
    /// The number of first tokens that a window keeps (attention sinks) [default: 0]
    #[arg(long, value_name = "N", requires = "window", value_parser = whole(0..=TOKENS_MAX as u64), allow_negative_numbers = true)]
    pub sinks: Option<u64>,
    /// Most tokens of prompts that a thread appends in a step [default: 8192]
    #[arg(long, value_name = "N", value_parser = whole(1..=TOKENS_MAX as u64), allow_negative_numbers = true)]
    pub step_tokens: Option<u64>,
}

impl ModelArgs {
    /// Returns whether sequences have groups of layers.
    pub fn has_groups(&self) -> bool {
        self.model.is_some() || self.window.is_some()
    }

    /// Returns the most tokens of prompts in a step.
    pub fn step_tokens(&self) -> u64 {
        self.step_tokens.unwrap_or(STEP_TOKENS)
    }

    /// Returns the layers of the model: without one, those of `layout`.
    pub fn layers(
        &self,
        device: DeviceId,
        layout: impl FnOnce() -> anyhow::Result<KvLayout>,
    ) -> anyhow::Result<Layers> {
        let Some(name) = &self.model else {
            if self.grouping != GroupingArgs::default() {
                bail!("--dtype and --drafts are of --model, and none is given");
            }
            return Ok(Layers::Alike(layout()?, self.window()?));
        };
        if device != DeviceId::Host {
            bail!("--model stores a few bytes per token in host memory: --device {device} has no effect");
        }
        let model = LayerGroups::described(name, self.grouping.options());
        let layers = Layers::Groups(model.map_err(named(format_args!("--model {name}")))?);
        layers.builder().map(drop).map_err(named(format_args!("--model {name} does not run in a pool")))?;
        Ok(layers)
    }

    fn window(&self) -> anyhow::Result<Option<Window>> {
        let Some(tokens) = self.window else { return Ok(None) };
        let window = Window::new(tokens as usize).map_err(named("--window"))?;
        Ok(Some(window.sinks(self.sinks.unwrap_or(0) as u32)))
    }
}

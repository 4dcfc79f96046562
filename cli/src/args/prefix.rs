//! Reuse of cached prefixes.

use anyhow::bail;
use clap::{Args, ValueEnum};
use kvpool::prefix::policy::PolicyKind;

use super::threshold;
use crate::replay::Eviction;

/// Prefix reuse in a replay.
#[derive(Clone, Copy, PartialEq, Debug, Default, Args)]
pub struct PrefixArgs {
    /// Reuse the cached prefixes of prompts, by the hash_ids of the trace [default: off, unless
    /// --policy is given]
    #[arg(long, value_name = "WHETHER", value_enum)]
    pub prefix_cache: Option<Switch>,
    /// The eviction policy of the prefix cache [default: lru]
    #[arg(long, value_name = "NAME")]
    pub policy: Option<PolicyKind>,
    /// How early evictions may be to free whole units of frames: a share of LRU's order, from 0
    /// (exactly LRU) to 1 [default: 0.05]
    #[arg(long, value_name = "R", value_parser = threshold, allow_negative_numbers = true)]
    pub tolerance: Option<f64>,
}

impl PrefixArgs {
    /// Returns the cache to build, if there is one. A policy without a cache is an error, and so is
    /// a tolerance without LRU.
    pub(crate) fn eviction(self) -> anyhow::Result<Option<Eviction>> {
        let policy = match (self.prefix_cache, self.policy) {
            (Some(Switch::On), policy) => Some(policy.unwrap_or(PolicyKind::Lru)),
            (None, policy) => policy,
            (Some(Switch::Off), None) => None,
            (Some(Switch::Off), Some(policy)) => {
                bail!("--policy {policy} has no effect with --prefix-cache off")
            }
        };
        match (policy, self.tolerance) {
            (policy, Some(_)) if policy != Some(PolicyKind::Lru) => {
                bail!("--tolerance is of LRU, which this command does not use: add --policy lru")
            }
            (policy, tolerance) => Ok(policy.map(|policy| Eviction { policy, tolerance })),
        }
    }
}

/// On or off.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Switch {
    /// With it.
    On,
    /// Without it.
    Off,
}

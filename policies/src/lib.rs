//! Eviction policies for the prefix cache of [`kvpool`], beyond those of the pool itself, and their
//! simulation on traces.
//!
//! A [`Policy`] needs nothing of the pool that is not public. [`PolicyName`] lists the policies of
//! both crates. [`Evictable`] has a policy order the blocks of a cache that is no pool. The module `simulate`, behind the feature of the same name (on by default),
//! measures hit rates on a trace without a pool, beside S3-FIFO, SIEVE and a clairvoyant bound.
//!
//! ```
//! use std::sync::Arc;
//!
//! use kvpool::prefix::PrefixConfig;
//! use kvpool_policies::Foresight;
//!
//! let cache = PrefixConfig::new().policy_of(Arc::new(Foresight::new(10_000)));
//! ```

mod evictable;
mod foresight;
#[cfg(feature = "simulate")]
pub mod simulate;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kvpool::prefix::policy::{Policy, PolicyKind};
use thiserror::Error;

pub use evictable::{Evictable, Position};
pub use foresight::{Foresight, Tuning};

/// A policy by its name: one of the pool, or one of this crate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum PolicyName {
    /// A policy of the pool.
    Pool(PolicyKind),
    /// [`Foresight`].
    Foresight,
}

/// No policy has this name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("no eviction policy is called {name:?}; there are {}", PolicyName::ALL.map(PolicyName::name).join(", "))]
pub struct UnknownPolicy {
    /// The name.
    pub name: String,
}

impl PolicyName {
    /// The pool's default.
    pub const LRU: Self = Self::Pool(PolicyKind::Lru);

    /// All policies.
    pub const ALL: [Self; 3] = [Self::LRU, Self::Pool(PolicyKind::Priority), Self::Foresight];

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pool(kind) => kind.name(),
            Self::Foresight => foresight::NAME,
        }
    }

    /// Builds the policy, for a pool of at most `blocks_max` blocks.
    pub fn build(self, blocks_max: usize) -> Arc<dyn Policy> {
        match self {
            Self::Pool(kind) => kind.build(),
            Self::Foresight => Arc::new(Foresight::new(blocks_max)),
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_found_by_its_name_and_no_other_is() {
        for policy in PolicyName::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(policy.build(100).name(), policy.name());
        }
        let error = "mru".parse::<PolicyName>().unwrap_err().to_string();
        assert_eq!(error, "no eviction policy is called \"mru\"; there are lru, priority, foresight");
    }
}

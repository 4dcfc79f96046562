use thiserror::Error;

use super::Invalid;

/// Reason why a prefix operation failed. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum PrefixError {
    /// A key, a length, or the configuration of the cache is invalid.
    #[error(transparent)]
    Invalid(#[from] Invalid),
    /// The system provided no random bytes for a key.
    #[error("cannot generate a random key: {reason}")]
    NoRandomness {
        /// Reason given by the system.
        reason: String,
    },
    /// The pool was built without a prefix cache.
    #[error("the pool was built without a prefix cache")]
    NoCache,
    /// No full block of the prefix is cached, so there is nothing to pin.
    #[error("no full block of the {tokens} tokens is cached")]
    NotCached {
        /// Number of tokens of the prefix.
        tokens: usize,
    },
    /// The kernel denied `membarrier`, which it granted before; without it, events could be lost.
    #[error("the system refuses membarrier(2), which it granted before")]
    NoFence,
}

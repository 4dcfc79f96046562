//! Errors of the prefix floor.

use thiserror::Error;

/// Reason why a prefix operation failed. Nothing was changed.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum PrefixError {
    /// Blocks of zero tokens have no hashes.
    #[error("blocks of zero tokens have no hashes")]
    ZeroBlockTokens,
    /// A salt, tenant, adapter or extra key is empty, so it would distinguish nothing.
    #[error("the {field} is empty; omit it instead")]
    EmptyKey {
        /// `salt`, `tenant`, `adapter` or `extra key`.
        field: &'static str,
    },
    /// The token range of an extra key is empty or reversed.
    #[error("the extra key's token range {start}..{end} is empty")]
    EmptyRange {
        /// First token of the range.
        start: u64,
        /// Token after the last one of the range.
        end: u64,
    },
    /// An extra key covers tokens that are already hashed: of a chain, those in full blocks; of a
    /// sequence, all that were announced.
    #[error("the extra key begins at token {start}, but the tokens before {hashed} are already hashed")]
    ExtraTooLate {
        /// First token of the extra key's range.
        start: u64,
        /// First token that is not hashed.
        hashed: u64,
    },
    /// An extra key covers tokens that the prompt does not have, or no sequence can have.
    #[error("the extra key covers tokens {start}..{end}, but there are at most {tokens}")]
    ExtraBeyond {
        /// First token of the extra key's range.
        start: u64,
        /// Token after the last one of the range.
        end: u64,
        /// Number of tokens of the prompt, or maximum of a sequence.
        tokens: u64,
    },
    /// A chain cannot be truncated by length to a finished block, because the tokens of finished
    /// blocks are not kept; truncate it by the block's hash.
    #[error("cannot truncate a chain of {tokens} tokens to {asked}; its unfinished block begins at {hashed}")]
    NotInTail {
        /// Number of tokens to keep.
        asked: u64,
        /// Number of tokens in the chain.
        tokens: u64,
        /// First token that is not in a hashed block.
        hashed: u64,
    },
    /// The tokens given for an unfinished block would fill it.
    #[error("{tokens} tokens do not leave a block of {block_tokens} unfinished")]
    TailTooLong {
        /// Number of tokens given.
        tokens: usize,
        /// Number of tokens per block.
        block_tokens: usize,
    },
    /// The end of a prefix's retention is in the past.
    #[error("retention until {until} ms is in the past; the cache's clock is at {now} ms")]
    RetentionPast {
        /// End of the retention, in milliseconds of the cache's clock.
        until: u64,
        /// Current time by that clock.
        now: u64,
    },
    /// A policy has no queues, or more than the cache supports.
    #[error("the policy has {queues} queues; a policy has 1 to {max}")]
    PolicyQueues {
        /// Number of queues of the policy.
        queues: usize,
        /// Maximum number of queues.
        max: usize,
    },
    /// The tolerance of the eviction order is not a share from 0 to 1.
    #[error("an eviction tolerance of {share} is not a share from 0 to 1")]
    Tolerance {
        /// The share given.
        share: f64,
    },
    /// The system provided no random bytes for a key.
    #[error("cannot generate a random key: {reason}")]
    NoRandomness {
        /// Reason given by the system.
        reason: String,
    },
    /// The text is not a block hash: 32 and 16 hexadecimal digits separated by a hyphen.
    #[error("{text:?} is not a block hash (32 and 16 hexadecimal digits separated by a hyphen)")]
    NotAHash {
        /// The invalid text.
        text: String,
    },
    /// The pool was built without a prefix cache.
    #[error("the pool was built without a prefix cache")]
    NoCache,
    /// No full block of a prefix is cached, so there is nothing to pin.
    #[error("no full block of the {tokens} tokens is cached")]
    NotCached {
        /// Number of tokens of the prefix.
        tokens: usize,
    },
    /// The system refused a `membarrier` fence that it granted before; without it, events could be
    /// lost.
    #[error("the system refuses membarrier(2), which it granted before")]
    NoFence,
}

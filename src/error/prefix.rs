//! What the prefix floor refuses.

use thiserror::Error;

/// Why prefix hashing refused. Nothing was changed.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum PrefixError {
    /// Blocks of no tokens cannot be hashed.
    #[error("blocks of zero tokens have no hashes")]
    ZeroBlockTokens,
    /// A salt, tenant, adapter or extra key of no bytes: it would tell nothing apart, though somebody asked for just that.
    #[error("the {field} is empty; leave it out if there is none")]
    EmptyKey {
        /// `salt`, `tenant`, `adapter` or `extra key`.
        field: &'static str,
    },
    /// An extra key for no tokens, or for a range that runs backwards.
    #[error("an extra key for tokens {start}..{end}, which are none")]
    EmptyRange {
        /// First token of the range.
        start: u64,
        /// The token after the last.
        end: u64,
    },
    /// An extra key for tokens whose block is hashed already.
    #[error("an extra key from token {start} on; the tokens before {hashed} are hashed already")]
    ExtraTooLate {
        /// First token of the extra key's range.
        start: u64,
        /// First token that is not in a hashed block.
        hashed: u64,
    },
    /// The tokens of finished blocks are not kept, so that a chain is cut back to one of them only by its hash.
    #[error("asked to cut a chain of {tokens} tokens to {asked}; the unfinished block begins at {hashed}")]
    NotInTail {
        /// The tokens to keep.
        asked: u64,
        /// Tokens that the chain has.
        tokens: u64,
        /// First token that is not in a hashed block.
        hashed: u64,
    },
    /// The tokens of an unfinished block would fill it.
    #[error("{tokens} tokens of an unfinished block of {block_tokens}")]
    TailTooLong {
        /// The tokens that were given.
        tokens: usize,
        /// Tokens that a block holds.
        block_tokens: usize,
    },
    /// A prefix is to be kept until a moment that has passed.
    #[error("asked to keep a prefix until {until} ms; it is {now} ms by the cache's clock")]
    RetentionPast {
        /// Until when, in milliseconds of the cache's clock.
        until: u64,
        /// The time by that clock.
        now: u64,
    },
    /// A policy has queues, and not more than the cache can compare.
    #[error("a policy of {queues} queues: from 1 to {max}")]
    PolicyQueues {
        /// What the policy says.
        queues: usize,
        /// The most.
        max: usize,
    },
    /// The system gave no random bytes for a key.
    #[error("no random key: {reason}")]
    NoRandomness {
        /// What the system said.
        reason: String,
    },
    /// Not the text of a block hash: 32 and 16 hexadecimal digits with a hyphen in between.
    #[error("{text:?} is not a block hash: 32 and 16 hexadecimal digits with a hyphen in between")]
    NotAHash {
        /// The text.
        text: String,
    },
    /// There is a subscriber of the pool's events already.
    #[error("the events have a subscriber, and there is one at a time")]
    Subscribed,
    /// The system refused a fence (`membarrier`) that it granted before, so that nobody knows who would miss what.
    #[error("the system refuses a fence that it granted before")]
    NoFence,
}

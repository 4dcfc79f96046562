//! Hints: what an engine or a router knows about the future use of cached blocks.
//!
//! A pool acts on them if it was built with
//! [`PoolBuilder::hints`](crate::pool::PoolBuilder::hints). Each [`Action`] has an [`Outcome`],
//! which says what was granted. No hint reserves memory: a request that would be refused otherwise
//! evicts retained and pinned blocks too, the ones whose time ends first before others of their
//! class, so no hint can make a pool unusable. For blocks that must not be evicted, there is
//! [`Pool::pin_prefix`](crate::Pool::pin_prefix).
//!
//! ```
//! use std::time::Duration;
//! use kvpool::hints::{Action, Hint, HintLimits, Outcome, Target};
//! use kvpool::prefix::{PrefixConfig, policy::{CachePriority, Millis}};
//! use kvpool::{AdmitRequest, KvLayout, Pool, SequenceId, SessionId, Tokens};
//!
//! let pool = Pool::builder(KvLayout::named("tiny")?).blocks(1_000).prefix_cache(PrefixConfig::new());
//! let pool = pool.hints(HintLimits::new()).build()?;
//! let (session, prompt): (_, Vec<u32>) = (SessionId(3), (0..100).collect());
//! let mut sequence = pool.admit(&AdmitRequest::new(SequenceId(1), &prompt).session(session))?;
//! let mut batch = pool.begin_batch();
//! batch.append(&mut sequence, Tokens::Announced(100))?;
//! batch.finish();
//! drop(sequence);
//!
//! // A tool was called, which takes a minute at most.
//! let until = pool.prefix_cache().expect("a cache").now() + 60_000;
//! let hint = Hint::new(Target::Session(session), Action::Retain { priority: CachePriority::High, until });
//! assert_eq!(pool.hint(&hint), Outcome::Accepted { blocks: 25 }, "this layout has blocks of 4 tokens");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::ops::Range;
use std::time::Duration;

use thiserror::Error;

use crate::ids::{SequenceId, SessionId, TenantId};
use crate::prefix::BlockHash;
use crate::prefix::policy::{CachePriority, Millis};

/// What a hint is about, and what is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hint {
    /// The blocks.
    pub target: Target,
    /// What is asked for.
    pub action: Action,
}

impl Hint {
    /// Creates a hint.
    pub fn new(target: Target, action: Action) -> Self {
        Self { target, action }
    }
}

/// The blocks that a hint is about.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Target {
    /// The blocks of the last request of a session that was closed, and, until the time that the
    /// action names, those of its later requests.
    Session(SessionId),
    /// Cached blocks by their hashes: of one chain, in its order.
    Hashes(Vec<BlockHash>),
    /// The full blocks in a range of positions of an open sequence, when it is closed. A range that
    /// ends at `usize::MAX` includes the answer.
    Tokens(SequenceId, Range<usize>),
}

/// What is asked for. A later hint about the same blocks replaces an earlier one. Times are those
/// of the [cache's clock](crate::prefix::PrefixCache::now).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Action {
    /// Evict them after all others, lower priorities first.
    Retain {
        /// Their priority among retained blocks.
        priority: CachePriority,
        /// Until when.
        until: Millis,
    },
    /// Evict them after all retained ones, within the [budgets](HintLimits). Each block counts once,
    /// for the session for which it was pinned last.
    Pin {
        /// Until when.
        until: Millis,
    },
    /// Evict them before all others.
    Demote,
    /// Bring them back from a tier, if they are not there. A pool alone rejects it; a node with a tier
    /// does it: `kvpool_node::hints`, with [`Pool::session_blocks`](crate::Pool::session_blocks).
    Prefetch {
        /// After which they are of no use.
        deadline: Millis,
    },
    /// The branch has ended: evict them first, except those that others have used, and forget the
    /// session. Named by hashes: except those that several sessions have used.
    Release,
}

/// What became of a hint.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "outcome", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Outcome {
    /// Done.
    Accepted {
        /// Number of blocks in other places of the eviction order now.
        blocks: usize,
    },
    /// Done in part.
    Clipped {
        /// As for [`Accepted`](Self::Accepted), or if there are none, as for [`Deferred`](Self::Deferred).
        blocks: usize,
        /// Until when it was granted.
        until: Millis,
        /// What was not granted.
        limit: Limit,
    },
    /// The blocks have owners: done when they are released, or the sequence is closed.
    Deferred {
        /// Number of those blocks.
        blocks: usize,
    },
    /// Nothing was done.
    Rejected {
        /// Why.
        #[cfg_attr(feature = "serde", serde(flatten))]
        reason: Rejection,
    },
    /// No such session, sequence, or cached block is known.
    Missing,
}

/// A limit that clipped a hint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Limit {
    /// [`HintLimits::longest`].
    Longest,
    /// [`HintLimits::pinned_bytes`]; [`Pool::sessions`](crate::Pool::sessions) says whose they are.
    PinnedBytes,
    /// [`HintLimits::session_bytes`].
    SessionBytes,
    /// [`HintLimits::tenant_bytes`].
    TenantBytes,
}

/// Why a hint was rejected.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(tag = "reason", rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Rejection {
    /// The pool was built without them.
    #[error("the pool takes no hints: it was built without `PoolBuilder::hints`")]
    Disabled,
    /// Its time has passed.
    #[error("it ends at {} ms; the cache's clock is at {} ms", .until.0, .now.0)]
    Ended {
        /// When it would have ended.
        until: Millis,
        /// The time of the cache's clock.
        now: Millis,
    },
    /// The budget of pins is used up.
    #[error(
        "{pinned_bytes} of {limit} bytes are pinned, and a block has {block_bytes}: release or demote some \
         (`Pool::sessions` says whose)"
    )]
    Pinned {
        /// Bytes that are pinned.
        pinned_bytes: u64,
        /// The budget.
        limit: u64,
        /// Bytes of one block.
        block_bytes: u64,
    },
    /// The budget of the tenant to which the blocks belong is used up.
    #[error(
        "{kept_bytes} of {limit} bytes of tenant {tenant} are retained or pinned, and a block has {block_bytes}: \
         release or demote some, or raise `HintLimits::tenant_bytes`"
    )]
    Tenant {
        /// The tenant.
        tenant: TenantId,
        /// Bytes of it that are retained or pinned.
        kept_bytes: u64,
        /// The budget.
        limit: u64,
        /// Bytes of one block.
        block_bytes: u64,
    },
    /// The range has no full block.
    #[error("no full block lies in the tokens {} to {}", .tokens.start, .tokens.end)]
    NoBlock {
        /// The range.
        tokens: Range<usize>,
    },
    /// Blocks are prefetched from a tier, and there is none.
    #[error("there is no tier to prefetch from")]
    NoTier,
    /// The tier has many prefetches to do.
    #[error("{prefetches} prefetches wait for the tier, as many as may: send it again later")]
    Busy {
        /// Prefetches that wait.
        prefetches: usize,
    },
    /// The action and the target do not go together.
    #[error("{why}")]
    Unsupported {
        /// Why not.
        why: &'static str,
    },
}

/// Limits of what hints may ask for. Of more than 4,096 blocks of a budget, up to 3% may count for a
/// while although they were evicted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub struct HintLimits {
    pub(crate) pinned_bytes: Option<u64>,
    pub(crate) session_bytes: Option<u64>,
    pub(crate) tenant_bytes: Option<u64>,
    pub(crate) longest: Duration,
}

impl Default for HintLimits {
    fn default() -> Self {
        Self {
            pinned_bytes: None,
            session_bytes: None,
            tenant_bytes: None,
            longest: Duration::from_secs(3_600),
        }
    }
}

impl HintLimits {
    /// Returns the defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how many bytes may be pinned at a time. Default: a quarter of the pool. Building a pool
    /// fails if it has fewer.
    pub fn pinned_bytes(mut self, bytes: u64) -> Self {
        self.pinned_bytes = Some(bytes);
        self
    }

    /// Sets how many bytes of one session may be retained or pinned. Default: the whole pool.
    pub fn session_bytes(mut self, bytes: u64) -> Self {
        self.session_bytes = Some(bytes);
        self
    }

    /// Sets how many bytes of the blocks of each [tenant](crate::tenants) hints may retain or pin at a
    /// time, so that one cannot push the blocks of others out of the cache. Further blocks of the
    /// tenant keep their places. Default: no limit. Building a pool without tenants fails.
    pub fn tenant_bytes(mut self, bytes: u64) -> Self {
        self.tenant_bytes = Some(bytes);
        self
    }

    /// Sets for how long blocks may be retained or pinned by one hint. Default: one hour.
    pub fn longest(mut self, time: Duration) -> Self {
        self.longest = time;
        self
    }
}

/// A session, as a pool with hints knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct SessionInfo {
    /// Its id.
    pub id: SessionId,
    /// Number of its requests that were closed, here or by a move to another pool.
    pub requests: u64,
    /// Blocks of its last closed request that are cached, in all groups of layers.
    pub cached_blocks: usize,
    /// Bytes of these blocks; a block that several sessions share counts for each.
    pub cached_bytes: u64,
    /// When its last request was closed, on the cache's clock.
    pub last_use: Millis,
    /// When it said that it continues.
    pub returns_at: Option<Millis>,
    /// Until when its blocks are retained or pinned.
    pub retained_until: Option<Millis>,
    /// Bytes that it has pinned until then.
    pub pinned_bytes: u64,
}

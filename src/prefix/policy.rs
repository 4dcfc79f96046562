//! Eviction policies: the order in which evictable blocks are evicted.
//!
//! A policy decides at two points. When a block's last reference is released,
//! [`place`](Policy::place) assigns it a queue and a rank. When a block must be evicted,
//! [`victim`](Policy::victim) sees the head of each queue, a block with approximately the smallest
//! rank, and selects the queue whose head is evicted. A place stays unchanged until the block is
//! reused and released again, so the cost of a decision depends on the number of queues, not of
//! blocks. A policy can order the blocks of a class freely at release, and compare classes freely
//! at eviction, by the age of their heads and by what it has learned from
//! [`looked_up`](Policy::looked_up), called once per request, for hits and misses alike.
//!
//! # Guarantees of the pool
//!
//! - [`Released::order`] increases from release to release and, within one release of a sequence,
//!   from the end of its chain to the beginning. A block's descendants are thus always released
//!   before it: a referenced child keeps its parents referenced.
//! - [`Released::state`] is the block's last [`Place::state`] while it holds the same tokens.
//! - At the end of a [retention](crate::hints), a block is placed by the order of its release, and
//!   nothing else is known of that.
//! - A [`Head`] shows the rank and state of one place. It may be stale, or gone by its eviction.
//!
//! # Obligations of a policy
//!
//! - Calls must not block, nor give the pool hints or ask for its sessions, and may run on any
//!   number of threads at once. Learned state belongs in relaxed atomics; a racy update may only
//!   lose statistics.
//! - No state, context, rank or time may cause a panic.
//! - If any head is given, `victim` returns a queue that has one.
//!
//! Violations cannot corrupt the pool; they only cost hits. A panic is printed and caught, because
//! the caller holds blocks: the block is then placed in the first queue by the order of its
//! release, the victim is taken from the first nonempty queue, and the observation is dropped. A
//! queue number out of range means the last queue.

mod lru;
mod priority;
mod sessions;

use std::fmt;
use std::ops::{Add, Sub};
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

use crate::ids::SessionId;
use crate::sync::caught;

pub use lru::Lru;
pub use priority::PriorityLru;
pub use sessions::Sessions;

/// Maximum number of queues of a policy.
pub const QUEUES_MAX: usize = 16;

/// Milliseconds since an arbitrary origin, the same for all calls to one policy. If it decreases,
/// ages count as zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Millis(pub u64);

impl Sub for Millis {
    type Output = u64;

    fn sub(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Millis {
    type Output = Self;

    fn add(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }
}

/// Retention priority of a request's prefix, relative to other requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(u8)]
pub enum CachePriority {
    /// Evicted before all others: bulk work that is never continued.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Evicted after all others: the system prompt of an important tenant.
    High,
}

impl CachePriority {
    /// All priorities, in eviction order.
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];
}

/// A request's lookup of its prompt.
pub struct Lookup<'a> {
    /// Number of full blocks of the prompt.
    pub blocks: u32,
    /// Number of leading blocks that were cached; the request holds a reference on each.
    pub hits: u32,
    /// [`Place::state`] of the last hit; 0 if there was no hit, or if that block was never placed.
    pub state: u64,
    /// Chained hashes of all full blocks of the prompt, in order, or 64 well-mixed bits of each.
    pub hashes: &'a mut dyn Iterator<Item = u64>,
    /// The session whose last request this one continues.
    pub session: Option<SessionId>,
}

/// The release of the last reference on a block, or the end of its retention.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Released {
    /// Position in the order of all releases; in a sequence, the end of the chain comes first.
    pub order: u64,
    /// The block's hash: the same bits as in [`Lookup::hashes`].
    pub hash: u64,
    /// Number of blocks before it in its chain.
    pub depth: u32,
    /// Number of blocks in the chain of the releasing request; more than `depth`.
    pub chain: u32,
    /// Number of hits since the block was filled. May saturate at any value from 15 up.
    pub hits: u32,
    /// Value that [`looked_up`](Policy::looked_up) returned for the releasing request.
    pub context: u64,
    /// State that [`place`](Policy::place) last stored with the block; initially 0.
    pub state: u64,
    /// Priority requested for the prefix.
    pub priority: CachePriority,
    /// The session of the releasing request.
    pub session: Option<SessionId>,
    /// When that session is expected to continue, if the engine said so.
    pub returns_at: Option<Millis>,
}

/// Queue position of an evictable block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Number of the queue; less than [`queues`](Policy::queues).
    pub queue: u8,
    /// Rank in the queue; smaller ranks are evicted first. Those from 2^63 on are equal.
    pub rank: u64,
    /// Passed back in [`Head`] and in [`Released`].
    pub state: u64,
}

/// The next block to be evicted from a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Its rank.
    pub rank: u64,
    /// Its state.
    pub state: u64,
}

/// Decides the order in which evictable blocks are evicted. The [module](crate::prefix::policy) has
/// the pool's guarantees and an implementation's obligations.
pub trait Policy: Send + Sync + fmt::Debug {
    /// Returns the name by which it is selected.
    fn name(&self) -> &'static str;

    /// Returns the number of queues it uses: 1 to [`QUEUES_MAX`], constant over its lifetime.
    fn queues(&self) -> usize;

    /// Returns whether it needs lookups and the time. If not, neither is passed to it.
    fn learns(&self) -> bool {
        true
    }

    /// Returns whether [`place`](Self::place) always returns queue 0 and the
    /// [order](Released::order) as rank; then it is not called. Constant.
    fn places_by_order(&self) -> bool {
        false
    }

    /// Observes a lookup. Returns the [`Released::context`] of that request's releases.
    fn looked_up(&self, lookup: &mut Lookup<'_>, now: Millis) -> u64 {
        _ = (lookup, now);
        0
    }

    /// Places a block whose last reference was released.
    fn place(&self, released: &Released, now: Millis) -> Place;

    /// Selects the queue whose head is evicted; `None` only if all queues are empty. `heads` has
    /// one entry per queue. One answer evicts up to 64 blocks, if they were released together and
    /// have consecutive or equal ranks.
    fn victim(&self, heads: &[Option<Head>], now: Millis) -> Option<usize>;
}

/// Returns the policy's answer, or `None` if it panics.
pub(super) fn asked<R>(answer: impl FnOnce() -> R) -> Option<R> {
    // Unwind safe: the policy owns its state, and is called again whatever that is.
    caught(answer)
}

/// The built-in policies. [`PrefixConfig::policy_of`](super::PrefixConfig::policy_of) takes others.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum PolicyKind {
    /// [`Lru`].
    #[default]
    Lru,
    /// [`PriorityLru`].
    Priority,
    /// [`Sessions`].
    Sessions,
}

/// No policy has this name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("no eviction policy is called {name:?}; there are {}", PolicyKind::ALL.map(PolicyKind::name).join(", "))]
pub struct UnknownPolicy {
    /// The name that was given.
    pub name: String,
}

impl PolicyKind {
    /// All built-in policies.
    pub const ALL: [Self; 3] = [Self::Lru, Self::Priority, Self::Sessions];

    /// Returns its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => lru::NAME,
            Self::Priority => priority::NAME,
            Self::Sessions => sessions::NAME,
        }
    }

    /// Creates an instance.
    pub fn build(self) -> Arc<dyn Policy> {
        match self {
            Self::Lru => Arc::new(Lru),
            Self::Priority => Arc::new(PriorityLru),
            Self::Sessions => Arc::new(Sessions::default()),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| UnknownPolicy { name: name.to_owned() })
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests;

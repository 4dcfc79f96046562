//! Which evictable block goes first.
//!
//! A policy decides twice. When a block's last reference goes, [`place`](Policy::place) gives it a queue and a rank there.
//! When a block must go, [`victim`](Policy::victim) sees the head of each queue, the block with about the smallest rank, and
//! names a queue; its head goes. Between the two nothing is called: a block's place stays as it is until somebody reuses the
//! block and releases it again. So a decision costs as much as there are queues, however many blocks there are, and what a
//! policy can express is: an order within each class of blocks that is known at release, and any comparison of classes at
//! eviction, by the age of their heads and by what was learned meanwhile.
//!
//! What a policy learns from comes by [`looked_up`](Policy::looked_up), once a request, for hits and misses alike.
//!
//! # What the pool promises
//!
//! - [`Released::order`] rises from release to release and, in one release of a sequence, from the end of its chain to the
//!   beginning. A block's descendants are thus always released before it: a child that is held holds its parents.
//! - [`Released::state`] is the [`Place::state`] of the block's last place, as long as the block holds the same tokens.
//! - A [`Head`] shows a rank and a state that were once of one place. It may be stale, or gone by the time it is evicted.
//!
//! # What a policy promises
//!
//! - No call waits, and each may run on any number of threads at once. What a policy learns lies in relaxed atomics; a racy
//!   update loses a grain of statistics and nothing else. Nothing a policy says can break the pool, only its hit rate.
//! - Every value of a state, context, rank or time is borne: none panics.
//! - Some head given, `victim` names a queue that has one.
//!
//! A policy that breaks this is borne. A call that panics is one without an answer: the panic goes no further than its message,
//! for blocks are in the caller's hands. In its place a block waits by its release's order in the first queue, the victim is
//! in the first queue that has one, and what was to be learned is not. A queue that there is not counts as the last.

mod lru;
mod priority;

use std::fmt;
use std::ops::{Add, Sub};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

pub use lru::Lru;
pub use priority::PriorityLru;

/// The most queues that a policy may have.
pub const QUEUES_MAX: usize = 16;

/// Milliseconds since some moment of the caller's choosing, the same for all calls to one policy. Should not go back; if it
/// does, ages count as zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Millis(pub u64);

impl Sub for Millis {
    type Output = u64;

    /// How long after `earlier`, in milliseconds; zero if it was not.
    fn sub(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<u64> for Millis {
    type Output = Self;

    /// So many milliseconds later.
    fn add(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }
}

/// How much a request's prefix is worth keeping, against those of other requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(u8)]
pub enum CachePriority {
    /// Goes before all others: bulk work that nobody comes back to.
    Low,
    /// As most.
    #[default]
    Normal,
    /// Goes after all others: the system prompt of an important tenant.
    High,
}

impl CachePriority {
    /// All of them, the first to go first.
    pub const ALL: [Self; 3] = [Self::Low, Self::Normal, Self::High];
}

/// A request has looked its prompt up.
pub struct Lookup<'a> {
    /// Full blocks of the prompt.
    pub blocks: u32,
    /// Leading ones that were cached; the request has a reference on each.
    pub hits: u32,
    /// [`Place::state`] of the last of the hits; 0 if there was none, or it was never placed yet.
    pub state: u64,
    /// The chained hashes of all full blocks of the prompt, first block first, or 64 well-mixed bits of each.
    pub hashes: &'a mut dyn Iterator<Item = u64>,
}

/// The last reference on a block has gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Released {
    /// When, in the order of all releases. See the [module](self).
    pub order: u64,
    /// The block's hash, the same bits as [`Lookup::hashes`] has of it.
    pub hash: u64,
    /// Blocks before it in its chain.
    pub depth: u32,
    /// Blocks of the chain of the request that releases it; more than `depth`.
    pub chain: u32,
    /// Times that the block was a hit since it was filled, saturating at any value from 15 up.
    pub hits: u32,
    /// What [`looked_up`](Policy::looked_up) gave to the request that releases it.
    pub context: u64,
    /// What [`place`](Policy::place) kept with the block last time; 0 the first time.
    pub state: u64,
    /// As the request asked for.
    pub priority: CachePriority,
    /// Keep it until then while others can go; as the request asked for.
    pub keep_until: Option<Millis>,
}

/// Where an evictable block waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Below [`queues`](Policy::queues).
    pub queue: u8,
    /// Small ranks go first.
    pub rank: u64,
    /// Comes back in [`Head`] and in [`Released`].
    pub state: u64,
}

/// The block of a queue that would go next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Head {
    /// Its rank.
    pub rank: u64,
    /// Its state.
    pub state: u64,
}

/// Decides which evictable block goes first. See the [module](self).
pub trait Policy: Send + Sync + fmt::Debug {
    /// The name by which it is chosen.
    fn name(&self) -> &'static str;

    /// Queues that it uses: 1 to [`QUEUES_MAX`], always the same number.
    fn queues(&self) -> usize;

    /// Whether it wants to be told of lookups, and of the time. What it is not told, it need not be asked for.
    fn learns(&self) -> bool {
        true
    }

    /// A request has looked its prompt up. Returns what [`Released::context`] is to be for it.
    fn looked_up(&self, lookup: &mut Lookup<'_>, now: Millis) -> u64 {
        _ = (lookup, now);
        0
    }

    /// The last reference on a block has gone: where it waits.
    fn place(&self, released: &Released, now: Millis) -> Place;

    /// A block must go: the queue whose head it is. One head for each queue, `None` where a queue is empty.
    ///
    /// `None` only if all are.
    fn victim(&self, heads: &[Option<Head>], now: Millis) -> Option<usize>;
}

/// What a policy answers, or nothing if it panics.
pub(super) fn asked<R>(answer: impl FnOnce() -> R) -> Option<R> {
    // What a policy has learned is its own, and it is asked again however it comes out of this.
    catch_unwind(AssertUnwindSafe(answer)).ok()
}

/// The policies of this crate, by name. A crate of its own can bring others, for
/// [`PrefixConfig::policy_of`](super::PrefixConfig::policy_of).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum PolicyKind {
    /// [`Lru`].
    #[default]
    Lru,
    /// [`PriorityLru`].
    Priority,
}

/// There is no policy of this name.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("no eviction policy is called {name:?}; there are {}", PolicyKind::names())]
pub struct UnknownPolicy {
    /// What was asked for.
    pub name: String,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Lru, Self::Priority];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => lru::NAME,
            Self::Priority => priority::NAME,
        }
    }

    /// Builds the policy.
    pub fn build(self) -> Arc<dyn Policy> {
        match self {
            Self::Lru => Arc::new(Lru),
            Self::Priority => Arc::new(PriorityLru),
        }
    }

    fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
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

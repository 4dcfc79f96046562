//! Prefix reuse: blocks that outlive their sequence, found again by what they hold.
//!
//! A block of final tokens is *registered* under the chained [`BlockHash`] of its tokens and all before them, when the batch
//! that filled it has ended. From then on whoever looks up the same tokens shares it. When nobody owns it any more it is
//! *evictable*: it counts as free, and is evicted when its frame is needed, by the [`policy`]'s choice.
//!
//! # Files
//!
//! `hash` what a block is known by, `index` which block may hold what is looked for, `row` what is noted of a block, `queue`
//! a priority queue without a lock, `queues` where evictable blocks wait, `policy` which of them goes first, `cache` all of
//! it together, `events` who is told, `config` how it is built.

mod cache;
mod config;
mod events;
mod hash;
mod index;
#[cfg(kvpool_loom)]
pub mod models;
pub mod policy;
mod queue;
mod queues;
mod row;
mod stats;

pub(crate) use cache::{Cold, Owner};
pub use cache::{Now, PrefixCache};
pub use config::PrefixConfig;
pub use events::{EVENTS, EventQueue, KvEvent, KvEvents, Numbered};
pub use hash::{BlockHash, Chain, HashFunction, HashKey, Hashing, PrefixHasher, PrefixKeys, PrefixRoot};
pub use index::{Index, Inserted, Key};
pub use queue::{Links, RankQueue};
pub use stats::PrefixStats;

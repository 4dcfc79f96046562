//! Prefix reuse: cached blocks outlive their sequence and are found again by their contents.
//!
//! A full block of final tokens is *registered* under the chained [`BlockHash`] of its tokens and
//! all tokens before them when the batch that filled it ends. From then on, every lookup of the
//! same tokens shares the block. Once its last reference is released the block is *evictable*: it
//! counts as free, and the [`policy`] decides when it is evicted.
//!
//! # Files
//!
//! `hash` the hash of a block, `index` from a hash to candidate blocks, `row` metadata of a block,
//! `queue` a lock-free priority queue, `queues` the queues of evictable blocks, `policy` the
//! eviction order, `cache` the whole, `events` notifications for routers, `config` the construction
//! parameters.

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

pub use cache::PrefixCache;
pub(crate) use cache::{ColdBlock, PolicyInfo};
pub use config::{Now, PrefixConfig};
pub use events::{EVENTS, EventQueue, KvEvent, KvEvents, Numbered};
pub use hash::{BlockHash, Chain, HashKey, Hashing, PrefixHasher, PrefixKeys, PrefixRoot};
pub use index::{Index, Inserted, Key};
pub use queue::{Links, RankQueue};
pub use stats::PrefixStats;

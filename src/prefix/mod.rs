//! Prefix reuse: cached blocks outlive their sequence and are found again by their contents.
//!
//! When a batch ends, each full block of final tokens is *registered* under the chained
//! [`BlockHash`] of its tokens and of all tokens before them. Later lookups of the same tokens
//! share the block. When its last reference is released, the block becomes *evictable*: it counts
//! as available, not as free, and the [`policy`] decides when it is evicted.
//!
//! ```
//! use kvpool::prefix::{PrefixConfig, PrefixKeys};
//! use kvpool::{KvLayout, Pool, SequenceId};
//!
//! let cache = PrefixConfig::new();
//! let pool = Pool::builder(KvLayout::named("tiny")?).blocks(1_000).prefix_cache(cache).build()?;
//! let prompt: Vec<u32> = (0..100).collect();
//! for id in 0..2 {
//!     // Shares the cached blocks of the prompt; the engine computes the rest.
//!     let keys = PrefixKeys::new().salt(b"a secret of these tenants");
//!     let mut sequence = pool.sequence(SequenceId(id)).keys(keys).tokens(&prompt)?;
//!     let mut batch = pool.begin_batch();
//!     let missing = prompt.len() - sequence.len();
//!     batch.append(&mut sequence, missing)?;
//!     batch.finish(); // registers the full blocks
//! }
//! assert!(pool.prefix_cache().is_some_and(|cache| cache.stats().hit_blocks > 0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

// `hash`: block hashes; `index`: hash to candidate blocks; `row`: metadata per block; `names`:
// further hashes in a frame pool; `queue`: a lock-free priority queue; `queues`: queues of
// evictable blocks; `evict_first`: links of one of them; `eviction_list`: their order, for readers;
// `policy`: eviction order; `cache`: the whole; `events`: notifications for routers; `origin`:
// origins of blocks from other pools; `weights`: current versions of the weights; `retention`:
// blocks beside the policy's order, which are evicted first or last; `user`: who has used a block.

mod cache;
mod config;
mod events;
mod evict_first;
mod eviction_list;
mod hash;
mod index;
#[cfg(kvpool_loom)]
pub mod models;
mod names;
mod origin;
pub mod policy;
mod queue;
mod queues;
mod retention;
mod row;
mod stats;
mod user;
mod weights;

pub(crate) use cache::{ColdBlock, PolicyInfo, Since, WindowBlocks};
pub use cache::{PrefixCache, UncachedBlocks};
pub use config::{Now, PrefixConfig};
pub use events::{EVENTS, EventQueue, KvEvent, KvEvents, Numbered};
pub(crate) use hash::ChainHash;
pub use hash::{BlockHash, Chain, ExtraKey, HashKey, Hashing, PrefixHasher, PrefixKeys, PrefixRoot, Weights};
#[cfg(feature = "internals")]
pub use index::{Index, Inserted, Key};
pub(crate) use origin::{CACHE_GROUPS_MAX, Provenance, in_group, is_older, join};
pub use origin::{ORIGINS_MAX, Origin};
#[cfg(feature = "internals")]
pub use queue::{Links, RankQueue};
pub(crate) use retention::Retention;
pub use stats::{EvictionCounts, PrefixStats};
pub(crate) use user::Users;
pub(crate) use weights::WeightsStamp;

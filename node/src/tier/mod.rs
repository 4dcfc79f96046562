//! A cluster-wide tier of cached blocks by hash, on a store that the cluster already runs.
//!
//! [`Tiered`] connects a pool with a [`SharedTier`]: it fetches prefixes before a request is
//! admitted, and stores blocks when they are computed or before they are evicted. A tier is over a
//! [`Store`]: [`InProcess`], [`Peer`], [`FileStore`](file::FileStore), `Redis` (feature `redis`) or
//! `Mooncake` (feature `mooncake`).
//!
//! # State of one get
//!
//! ```text
//! asked      the caller has frames that no other owner has, and a hold on each      Tiered, an Import per block
//! waiting    the key waits until the store may be asked                             Call
//! begun      the store was asked                                                    SharedTier, Store
//! landed     the value was verified, and its block is in the frame                  Landing
//! hit        the memory was dropped; the caller states that the block arrived       Outcome::Hit, Import::arrived
//! committed  the block can be found in the prefix cache                             Import::commit
//! ```
//!
//! | state at the deadline | the caller gets | its frame |
//! |---|---|---|
//! | waiting | failed (late) | is free immediately |
//! | begun | in flight | is free immediately, since a later answer finds no memory; quarantined while a value is landing |
//! | hit | a hit | is in the cache once committed |
//!
//! # Invariants
//!
//! ```text
//! a block is registered only after its value was verified: fingerprint, both hashes, length, checksum
//! the memory of a get is dropped before its outcome can be seen; then no byte of it is written any more
//! a call returns by its deadline, whatever the store does
//! any failure is a miss: no error of a store reaches the engine
//! ```

mod breaker;
mod call;
mod connect;
mod counters;
mod error;
mod failed_keys;
pub mod file;
mod file_error;
mod in_process;
mod key;
#[cfg(feature = "mooncake")]
pub mod mooncake;
mod outcome;
mod peer;
mod read;
#[cfg(feature = "redis")]
mod redis;
mod reporter;
mod settings;
mod shared_tier;
mod store;
mod store_counters;
mod store_error;
mod tiered;
mod value;

#[cfg(feature = "redis")]
pub use self::redis::Redis;
pub use breaker::BreakerState;
pub use connect::{ADDRESSES, connect};
pub use counters::TierCounters;
pub use error::TierError;
pub use in_process::InProcess;
pub use key::{Fingerprint, TierKey};
pub use outcome::{Outcome, TierFailure};
pub use peer::Peer;
pub use read::{Landing, TierRead};
pub use reporter::TierReporter;
pub use settings::TierSettings;
pub use shared_tier::SharedTier;
pub use store::{Answer, Store, StoreFuture};
pub use store_counters::StoreCounters;
pub use store_error::StoreError;
pub use tiered::{TierPolicy, TierReport, Tiered, TieredCounters, TieredSettings};
pub use value::{HEADER_BYTES, TierValue, ValueError, origins_of, value_bytes, verify};

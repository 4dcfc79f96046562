//! The eviction policies of [`kvpool`] for caches that are not pools, and their simulation on
//! traces.
//!
//! [`Evictable`] has any [`Policy`](kvpool::prefix::policy::Policy) order the blocks of a cache
//! that is not a pool. The module `simulate`, behind the feature of the same name (on by default),
//! measures hit rates on a trace without a pool, beside S3-FIFO, SIEVE and a clairvoyant bound.

mod evictable;
#[cfg(feature = "simulate")]
pub mod simulate;

pub use evictable::{Evictable, Position};

//! Shared tiers: one conformance suite over all stores, stores that fail and lie, and pools that use
//! them.
//!
//! | file | contents |
//! |---|---|
//! | `kv` | pools whose bytes identify them |
//! | `support` | tiers, values, and memory for them |
//! | `conformance` | the suite, over the store in the process |
//! | `faulty` | a store with faults |
//! | `failures` | deadlines, the breaker, the queue, keys that failed |
//! | `pools` | prefixes come back, policies, stores that lie, quarantine |
//! | `groups` | pools with several groups of layers |
//! | `load` | faults that change under load |
//! | `peer` | a node as the store |
//! | `file` | a directory: restarts, kills, one process at a time, what is declined |
//! | `redis` | a real server: conformance, eviction, answers that lie, kills and stops under load |
//! | `mooncake` | a library with the interface of Mooncake, in memory |

#[path = "../../../tests/migration/kv.rs"]
#[allow(dead_code)]
mod kv;

mod conformance;
mod failures;
mod faulty;
mod file;
mod groups;
mod load;
#[cfg(feature = "mooncake")]
mod mooncake;
mod peer;
mod pools;
#[cfg(feature = "redis")]
mod redis;
mod support;

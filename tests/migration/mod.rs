//! Migration: blocks go to another pool and come back, with their bytes, cached and owned, and no
//! fault loses one.
//!
//! | file | contents |
//! |---|---|
//! | `kv` | bytes that identify their token |
//! | `sequences` | a sequence goes to another pool, and continues there |
//! | `cached` | evictable blocks go, and come back |
//! | `lineage` | random operations and clears, against a model of where each sequence is and of when each token was computed |
//! | `waiting` | a sequence that comes back into a full pool waits its turn |
//! | `refusals` | refused migrations, which change nothing |
//! | `faults` | storages that fail or panic, futures that are dropped |
//! | `stress` | migrations beside threads on both pools |
#![cfg(not(kvpool_loom))]

mod cached;
mod faults;
pub(super) mod kv;
mod lineage;
mod refusals;
mod sequences;
#[cfg(not(miri))]
mod stress;
mod waiting;

//! The halves of a transfer: manifests, exports and imports.
//!
//! | file | contents |
//! |---|---|
//! | `kv` | pools whose bytes identify them |
//! | `manifests` | round trips, and manifests that lie |
//! | `halves` | an export arrives in an import, and continues; steps at which it is given up |
//! | `holds` | blocks that a transport holds longer than export and import |
//! | `cached` | cached blocks go, and a prefix is fetched |
//! | `heads` | ranks of one tensor-parallel split feed those of another |
//! | `nodes` | destinations on other nodes |
#![cfg(not(kvpool_loom))]

mod cached;
mod halves;
mod heads;
mod holds;
#[cfg(feature = "serde")]
mod manifests;
pub mod nodes;

use super::migration::kv;

fn not_transferred(place: u32) -> kvpool::TransferError {
    kvpool::Invalid::new("place of a block", place, "one that is transferred").into()
}

//! Accounts: each reference on a block has an owner.
//!
//! ```text
//! references in the words == listed by their owners + known to them in number + counted by threads
//! ```
//!
//! | owner | how its references are known |
//! |---|---|
//! | an open sequence, a pinned prefix, an export, an import | it lists its blocks |
//! | a reservation, the copies on write of a batch in flight | their number |
//! | a lease, the engine of a frame pool | threads [count](super::state) them with plain stores |
//!
//! A request in the queue holds no reference. The equation holds whenever no thread is inside a
//! call. A surplus on the left is a leak.

use thiserror::Error;

use crate::ids::BlockId;

/// References that no owner accounts for. Exact while no thread is inside a call.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[error(
    "owners account for all but {references} references; wrong blocks: {}, {:?}; candidates: {}, {:?}",
    .blocks.len(), first(.blocks), .candidates.len(), first(.candidates)
)]
#[non_exhaustive]
pub struct Unaccounted {
    /// Number of references that no owner will release, minus those counted that do not exist.
    pub references: i64,
    /// Blocks that certainly have more or fewer references than owners, ascending.
    pub blocks: Vec<BlockId>,
    /// Other blocks that may have too many, ascending: of leases or reservations, or, while a batch
    /// copies blocks and in a frame pool, all blocks.
    pub candidates: Vec<BlockId>,
}

fn first(blocks: &[BlockId]) -> &[BlockId] {
    &blocks[..blocks.len().min(16)]
}

#[derive(Default)]
pub(crate) struct Accounts {
    pub(crate) listed: Vec<BlockId>,
    /// References of owners that record only their number.
    pub(crate) unlisted: usize,
    /// Whether all references on shared and on cached blocks are listed.
    pub(crate) lists_shared: bool,
}

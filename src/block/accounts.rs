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
//! call. What remains on the left has an owner that does not exist: it would never be released.

use thiserror::Error;

use crate::ids::BlockId;

/// References that no owner accounts for.
///
/// Exact while no thread is inside a call.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[error(
    "owners account for all but {references} references; wrong blocks: {}, {:?}; candidates: {}, {:?}",
    .blocks.len(), first(.blocks), .candidates.len(), first(.candidates)
)]
#[non_exhaustive]
pub struct Unaccounted {
    /// Number of references: of those that no owner will release, less those that an owner counts
    /// on and that do not exist.
    pub references: i64,
    /// Blocks that have more or fewer references than owners for certain, ascending.
    pub blocks: Vec<BlockId>,
    /// Other blocks that may have more, ascending: their references may be leases' or
    /// reservations'. While a batch copies blocks, and in a frame pool, all are
    /// candidates.
    pub candidates: Vec<BlockId>,
}

/// The blocks that a message names.
fn first(blocks: &[BlockId]) -> &[BlockId] {
    &blocks[..blocks.len().min(16)]
}

/// References of owners that threads do not count.
#[derive(Default)]
pub(crate) struct Accounts {
    /// A block for each reference.
    pub(crate) listed: Vec<BlockId>,
    /// Number of references of owners that do not say on which blocks they are.
    pub(crate) unlisted: usize,
    /// Whether all references on shared and on cached blocks are listed.
    pub(crate) lists_shared: bool,
}

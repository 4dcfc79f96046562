//! The rank queue's view of the blocks' rows.

use crate::ids::BlockId;
use crate::sync::AtomicU32;

/// Access to the links and ranks of blocks, whose rows outlive the rank queue.
pub trait Links {
    /// Returns a word used only by the rank queue.
    fn next(&self, id: BlockId) -> &AtomicU32;

    /// Returns the block's rank. It may grow at any time, even while the block is enqueued.
    fn rank(&self, id: BlockId) -> u64;
}

//! Results of transfers.

use std::time::Duration;

use crate::error::TransferError;

use super::held::Finished;

/// Bytes copied from one pool to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Carried {
    /// Number of copied blocks.
    pub blocks: usize,
    /// Their packed bytes.
    pub bytes: u64,
    /// Runs of consecutive frames, in the end that has more: a device copies run by run.
    pub runs: usize,
    /// Duration of the whole operation.
    pub took: Duration,
}

/// Result of a sequence's migration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MigrationReport {
    /// Number of its tokens.
    pub tokens: usize,
    /// Blocks that were cached in the target, and are shared instead of copied.
    pub shared_blocks: usize,
    /// Copied blocks.
    pub carried: Carried,
}

/// Result of moving cached blocks to another pool's cache.
///
/// `carried.blocks + present_blocks == evicted_blocks + leaving_blocks + warm_blocks`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct OffloadReport {
    /// Blocks that were already cached there.
    pub present_blocks: usize,
    /// Blocks evicted here.
    pub evicted_blocks: usize,
    /// Blocks that a batch in flight may see, or that are being moved: evicted before all others.
    pub leaving_blocks: usize,
    /// Blocks that were looked up during the transfer, and stay.
    pub warm_blocks: usize,
    /// Blocks that stay: computed there before a clear, or copied while this cache was cleared.
    pub stale_blocks: usize,
    /// Copied blocks.
    pub carried: Carried,
}

impl OffloadReport {
    pub(crate) fn new(carried: Carried, present_blocks: usize, finished: Finished) -> Self {
        let Finished { evicted_blocks, leaving_blocks, warm_blocks } = finished;
        Self { present_blocks, evicted_blocks, leaving_blocks, warm_blocks, stale_blocks: 0, carried }
    }
}

/// Result of copying a prompt's blocks back from another pool's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BringBackReport {
    /// Leading full blocks of the prompt that are now cached here.
    pub cached_blocks: usize,
    /// Blocks not found here: computed here before a clear, or copied while the other was cleared.
    pub stale_blocks: usize,
    /// Copied blocks.
    pub carried: Carried,
}

/// Counts of transfers between pools since the pool was built. A transfer counts when it ends, in
/// the pool whose method began it, unless its future was dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MigrationCounts {
    /// Sequences moved to another pool, except for those that were swapped and resumed.
    pub migrated: u64,
    /// Sequences copied to another pool.
    pub replicated: u64,
    /// Sequences that a [preemption](crate::Pool::preempt) swapped to another pool.
    #[cfg_attr(feature = "serde", serde(default))]
    pub swapped_out: u64,
    /// Sequences of this pool that another pool [resumed](crate::Pool::resume).
    #[cfg_attr(feature = "serde", serde(default))]
    pub swapped_in: u64,
    /// Offloads of cached blocks to another pool.
    pub offloads: u64,
    /// Prompts whose cached blocks were copied back from another pool.
    pub brought_back: u64,
    /// Transfers that ended with an error after they had begun.
    pub failed: u64,
    /// Transfers refused before anything was copied, for example for lack of room.
    #[cfg_attr(feature = "serde", serde(default))]
    pub refused: u64,
    /// Cached blocks rejected because they were computed before a cache was cleared.
    #[cfg_attr(feature = "serde", serde(default))]
    pub stale_blocks: u64,
    /// Copied blocks.
    pub blocks: u64,
    /// Bytes of the copied blocks.
    pub bytes: u64,
}

pub(crate) type Kind = fn(&mut MigrationCounts) -> &mut u64;

impl MigrationCounts {
    /// Counts the end of a transfer: what it carried, and its stale blocks.
    pub(crate) fn ended(&mut self, outcome: Result<(&Carried, usize), &TransferError>, kind: Kind) {
        match outcome {
            Ok((carried, stale_blocks)) => {
                *kind(self) += 1;
                self.stale_blocks += stale_blocks as u64;
                self.blocks += carried.blocks as u64;
                self.bytes += carried.bytes;
            }
            Err(error) if error.is_refusal() => self.refused += 1,
            Err(_) => self.failed += 1,
        }
    }
}

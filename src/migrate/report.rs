//! Results of transfers.

use std::time::Duration;

/// Bytes copied from one pool to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct Carried {
    /// Number of copied blocks.
    pub blocks: usize,
    /// Their packed bytes.
    pub bytes: u64,
    /// Runs of consecutive frames, in the source or in the target, whichever has more: a device
    /// copies one run at a time.
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
    /// Blocks that were cached in the target, and are shared there instead of being copied.
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
    /// Blocks that a batch in flight may see, or that are being moved: evicted before all others
    /// when frames are needed.
    pub leaving_blocks: usize,
    /// Blocks that were looked up meanwhile, and stay.
    pub warm_blocks: usize,
    /// Copied blocks.
    pub carried: Carried,
}

/// Result of copying a prompt's blocks back from another pool's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BringBackReport {
    /// Leading full blocks of the prompt that are now cached here.
    pub cached_blocks: usize,
    /// Copied blocks.
    pub carried: Carried,
}

/// Counts of transfers between pools since the pool was built.
///
/// A transfer counts in the pool whose method began it, when it ends. One whose future was dropped
/// does not count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct MigrationCounts {
    /// Sequences that were moved to another pool.
    pub migrated: u64,
    /// Sequences that were copied to another pool.
    pub replicated: u64,
    /// Offloads of cached blocks to another pool.
    pub offloads: u64,
    /// Prompts whose cached blocks were copied back from another pool.
    pub brought_back: u64,
    /// Transfers that ended with an error.
    pub failed: u64,
    /// Copied blocks.
    pub blocks: u64,
    /// Bytes of the copied blocks.
    pub bytes: u64,
}

impl MigrationCounts {
    /// Counts the end of a transfer. `kind` returns the counter of its kind.
    pub(crate) fn ended(&mut self, carried: Option<&Carried>, kind: fn(&mut Self) -> &mut u64) {
        match carried {
            Some(carried) => {
                *kind(self) += 1;
                self.blocks += carried.blocks as u64;
                self.bytes += carried.bytes;
            }
            None => self.failed += 1,
        }
    }
}

//! What was done.

use std::time::Duration;

/// Bytes that went from one pool to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Carried {
    /// Blocks that were copied.
    pub blocks: usize,
    /// Their bytes, packed.
    pub bytes: u64,
    /// Runs of neighbouring blocks, in the source or in the target, whichever were more: what a device copies at once.
    pub runs: usize,
    /// From the first look to the last step.
    pub took: Duration,
}

/// A sequence that went to another pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct MigrationReport {
    /// Its tokens.
    pub tokens: usize,
    /// Its blocks that were cached in the other pool, and are shared there instead of being copied.
    pub shared_blocks: usize,
    /// What was copied.
    pub carried: Carried,
}

/// Cached blocks that went to another pool's cache.
///
/// `carried.blocks + present_blocks == evicted_blocks + leaving_blocks + warm_blocks`
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct OffloadReport {
    /// Blocks that were cached there already.
    pub present_blocks: usize,
    /// Blocks that were evicted here.
    pub evicted_blocks: usize,
    /// Blocks that a batch in flight may see, or that are being moved: they are the first to be evicted when their frames are
    /// needed.
    pub leaving_blocks: usize,
    /// Blocks that were looked up meanwhile, and stay.
    pub warm_blocks: usize,
    /// What was copied.
    pub carried: Carried,
}

/// Blocks of a prompt that came back from another pool's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct BringBackReport {
    /// Full blocks of the prompt, from its start, that are cached here now.
    pub cached_blocks: usize,
    /// What was copied for it.
    pub carried: Carried,
}

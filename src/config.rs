//! Constants that shape the words and caches. Under the loom configuration they shrink, so that a model with a
//! handful of frames reaches every edge.

/// Bits of a frame number in a block word: 134 million frames.
pub const FRAME_BITS: u32 = 27;

/// log2 of the frames in a leaf word, and of the units in a unit word.
pub const FAN_LOG2: u32 = if cfg!(kvpool_loom) { 2 } else { 6 };

/// Frames in a leaf word (a *unit*), and units in a unit word.
pub const FAN: usize = 1 << FAN_LOG2;

/// The most blocks that a magazine holds.
pub const MAGAZINE_BLOCKS_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

/// Frames in a segment unless configured otherwise.
pub const SEGMENT_FRAMES: usize = if cfg!(kvpool_loom) { 16 } else { 4096 };

/// The order at which fragmentation is reported unless configured otherwise: runs of 16 blocks.
pub const FRAGMENTATION_ORDER: u8 = if cfg!(kvpool_loom) { 1 } else { 4 };

/// Blocks that a magazine should hold in a pool of `frames` that `threads` threads share: small enough that all
/// magazines together hide at most an eighth of the pool; 0 means that magazines are bypassed.
pub const fn magazine_blocks(frames: usize, threads: usize) -> usize {
    let share = frames / (16 * if threads == 0 { 1 } else { threads });
    if share < MAGAZINE_BLOCKS_MAX { share } else { MAGAZINE_BLOCKS_MAX }
}

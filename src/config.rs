//! Sizes of words and magazines. They are smaller under loom, so that a model with a few frames
//! reaches every boundary case.

/// Bits of a frame number in a block word: 134 million frames.
pub const FRAME_BITS: u32 = 27;

/// log2 of the frames in a leaf word, and of the units in a unit word.
pub const FAN_LOG2: u32 = if cfg!(kvpool_loom) { 2 } else { 6 };

/// Frames in a leaf word (a *unit*), and units in a unit word.
pub const FAN: usize = 1 << FAN_LOG2;

/// Maximum number of blocks in a magazine.
pub const MAGAZINE_BLOCKS_MAX: usize = if cfg!(kvpool_loom) { 2 } else { 64 };

/// Default number of frames in a segment.
pub const SEGMENT_FRAMES: usize = if cfg!(kvpool_loom) { 16 } else { 4096 };

/// Default order at which fragmentation is reported: runs of 16 blocks.
pub const FRAGMENTATION_ORDER: u8 = if cfg!(kvpool_loom) { 1 } else { 4 };

/// Returns the number of blocks per magazine for a pool of `frames` frames and `threads` threads.
/// All magazines together hold at most an eighth of the pool; 0 disables them.
pub const fn magazine_blocks(frames: usize, threads: usize) -> usize {
    let share = frames / (16 * if threads == 0 { 1 } else { threads });
    if share < MAGAZINE_BLOCKS_MAX { share } else { MAGAZINE_BLOCKS_MAX }
}

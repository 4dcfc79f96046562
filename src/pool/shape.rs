//! The shape of a pool's blocks: what the builders of all pools set and check.

use crate::block::BlocksConfig;
use crate::config::{FAN, FRAGMENTATION_ORDER, MAGAZINE_BLOCKS_MAX, SEGMENT_FRAMES, magazine_blocks};
use crate::ids::{DeviceId, FRAMES_MAX, Order};
use crate::sync::available_parallelism;

use super::build_error::BuildError;

/// Maximum number of expected threads. More threads than that may use the pool.
const THREADS_MAX: usize = 1 << 16;

/// Numbers of blocks and frames, and how they are cached; `None` is a default.
pub(super) struct Shape {
    pub(super) blocks_max: Option<usize>,
    pub(super) segment_blocks: usize,
    pub(super) magazine_blocks: Option<usize>,
    pub(super) threads: Option<usize>,
    pub(super) has_null_block: bool,
    pub(super) reserve: usize,
    /// Order at which fragmentation is reported.
    pub(super) order: Order,
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            blocks_max: None,
            segment_blocks: SEGMENT_FRAMES,
            magazine_blocks: None,
            threads: None,
            has_null_block: true,
            reserve: 0,
            order: Order(FRAGMENTATION_ORDER),
        }
    }
}

impl Shape {
    /// Returns the checked configuration of a pool of `blocks` blocks, without the null block.
    pub(super) fn check(&self, blocks: usize, device: DeviceId) -> Result<BlocksConfig, BuildError> {
        let null = self.has_null_block as usize;
        let most = FRAMES_MAX - null;
        if blocks == 0 {
            return Err(BuildError::NoBlocks);
        }
        let blocks_max = self.blocks_max.unwrap_or(blocks);
        if let Some(&blocks) = [blocks, blocks_max].iter().find(|&&blocks| blocks > most) {
            return Err(BuildError::TooManyBlocks { blocks, max: most });
        }
        if blocks_max < blocks {
            return Err(BuildError::MaxBelowStart { blocks, max: blocks_max });
        }
        if self.reserve >= blocks {
            return Err(BuildError::Reserve { reserve: self.reserve, blocks });
        }
        let segment_frames = self.segment_blocks;
        if !segment_frames.is_power_of_two() || !(FAN..=FRAMES_MAX).contains(&segment_frames) {
            return Err(BuildError::Segment { frames: segment_frames, min: FAN });
        }
        let threads = self.threads.unwrap_or_else(available_parallelism).max(1);
        if threads > THREADS_MAX {
            return Err(BuildError::Threads { threads, max: THREADS_MAX });
        }
        let magazine_blocks = self.magazine_blocks.unwrap_or_else(|| magazine_blocks(blocks, threads));
        if magazine_blocks > MAGAZINE_BLOCKS_MAX {
            return Err(BuildError::Magazine { blocks: magazine_blocks, max: MAGAZINE_BLOCKS_MAX });
        }
        let order_max = crate::config::FRAME_BITS as u8;
        if self.order.0 > order_max {
            return Err(BuildError::Order { order: self.order.0, max: order_max });
        }
        Ok(BlocksConfig {
            frames: blocks + null,
            frames_max: blocks_max + null,
            segment_frames,
            magazine_blocks,
            threads,
            has_null_block: self.has_null_block,
            reserve: self.reserve,
            device,
        })
    }
}

use crate::block::BlocksConfig;
use crate::config::{
    FAN, FRAGMENTATION_ORDER, FRAME_BITS, MAGAZINE_BLOCKS_MAX, SEGMENT_FRAMES, magazine_blocks,
};
use crate::error::Invalid;
use crate::ids::{DeviceId, FRAMES_MAX, Order};
use crate::sync::available_parallelism;

const THREADS_MAX: usize = 1 << 16;

/// Numbers of blocks and frames, and sizes of their caches; `None` is a default.
pub(super) struct Shape {
    pub(super) blocks_max: Option<usize>,
    pub(super) segment_blocks: usize,
    pub(super) magazine_blocks: Option<usize>,
    pub(super) threads: Option<usize>,
    pub(super) has_null_block: bool,
    pub(super) reserve: usize,
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
    pub(super) fn check(&self, blocks: usize, device: DeviceId) -> Result<BlocksConfig, Invalid> {
        let null = self.has_null_block as usize;
        let most = FRAMES_MAX - null;
        if blocks == 0 {
            return Err(Invalid::new("blocks", "0, or nothing", "at least 1, by `blocks` or `sizing`"));
        }
        let blocks_max = self.blocks_max.unwrap_or(blocks);
        at_most("blocks", blocks, most)?;
        at_most("blocks_max", blocks_max, most)?;
        at_most("blocks", blocks, blocks_max)?;
        if self.reserve >= blocks {
            let limit = format_args!("less than the pool's {blocks} blocks");
            return Err(Invalid::new("reserve", self.reserve, limit));
        }
        let segment_frames = self.segment_blocks;
        if !segment_frames.is_power_of_two() || !(FAN..=FRAMES_MAX).contains(&segment_frames) {
            let limit = format_args!("a power of two from {FAN} to {FRAMES_MAX}");
            return Err(Invalid::new("segment_blocks", segment_frames, limit));
        }
        let threads = self.threads.unwrap_or_else(available_parallelism).max(1);
        at_most("threads", threads, THREADS_MAX)?;
        let magazine_blocks = self.magazine_blocks.unwrap_or_else(|| magazine_blocks(blocks, threads));
        at_most("magazine_blocks", magazine_blocks, MAGAZINE_BLOCKS_MAX)?;
        at_most("fragmentation_order", self.order.0.into(), FRAME_BITS as usize)?;
        Ok(BlocksConfig {
            frames: blocks + null,
            frames_max: blocks_max + null,
            segment_frames,
            magazine_blocks,
            threads,
            has_null_block: self.has_null_block,
            reserve: self.reserve,
            run_frames: 0,
            device,
        })
    }
}

pub(super) fn at_most(what: &'static str, got: usize, max: usize) -> Result<(), Invalid> {
    if got <= max { Ok(()) } else { Err(Invalid::new(what, got, format_args!("at most {max}"))) }
}

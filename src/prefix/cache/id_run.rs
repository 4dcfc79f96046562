//! Lookups of a chain whose blocks have consecutive ids.

use crate::block::Core;
use crate::ids::BlockId;

use super::{AHEAD, BlockHash, PrefixCache, key_of};

/// Blocks that follow each other in a chain, and have consecutive ids: most do, because lists grow
/// by consecutive frames. A lookup tries the next id first, and finds its contents, or asks the
/// index.
#[derive(Clone, Copy)]
pub(super) struct IdRun {
    last: BlockId,
    /// The block that probably holds the next hash.
    pub(super) next: Option<BlockId>,
    blocks: u32,
}

impl IdRun {
    pub(super) fn new(core: &Core) -> Self {
        Self { last: BlockId(u32::MAX), next: None, blocks: core.rows() as u32 }
    }

    #[inline]
    pub(super) fn found(&mut self, id: BlockId) {
        // 1 or -1.
        let step = id.0.wrapping_sub(self.last.0);
        let next = id.0.wrapping_add(step);
        let goes_on = step.wrapping_add(1) <= 2 && step != 0 && next < self.blocks;
        self.next = goes_on.then_some(BlockId(next));
        self.last = id;
    }

    #[inline]
    fn ahead(self) -> Option<BlockId> {
        let next = self.next?;
        let step = next.0.wrapping_sub(self.last.0);
        let ahead = next.0.wrapping_add(step.wrapping_mul(AHEAD as u32));
        (ahead < self.blocks).then_some(BlockId(ahead))
    }
}

impl PrefixCache {
    /// Prefetches what the lookup of a later hash reads: the block at that distance in the run, or
    /// without one the index.
    #[inline]
    pub(super) fn prefetch_ahead(&self, core: &Core, run: IdRun, later: Option<&BlockHash>) {
        match (run.ahead(), later) {
            (Some(id), Some(_)) => {
                self.row(id).prefetch();
                core.prefetch_word(id);
            }
            (None, Some(&hash)) => self.index.prefetch(key_of(hash)),
            (_, None) => {}
        }
    }
}

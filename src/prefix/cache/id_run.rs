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
    /// Takes references on the blocks of the run from its next one on, as long as they hold these
    /// hashes, as [`take_prefix`](Self::take_prefix) does: without the index, and with few
    /// instructions per block. Returns how many, and how many of them were evictable.
    #[inline(never)]
    pub(super) fn hit_run<const HAS_TENANTS: bool>(
        &self,
        core: &Core,
        run: &mut IdRun,
        hashes: &[BlockHash],
        era: u64,
        take: &mut dyn FnMut(BlockId),
    ) -> (usize, usize) {
        let Some(first) = run.next.filter(|_| self.names.is_none()) else { return (0, 0) };
        let step = first.0.wrapping_sub(run.last.0);
        let (rows, cells) = (&*self.rows.first().rows, core.first_cells());
        let fetch = |id: u32| {
            if let (Some(row), Some(cell)) = (rows.get(id as usize), cells.get(BlockId(id))) {
                row.prefetch();
                cell.prefetch();
            }
        };
        (0..AHEAD.min(hashes.len()) as u32).for_each(|at| fetch(first.0.wrapping_add(step.wrapping_mul(at))));
        let (mut id, mut taken, mut evictable) = (first, 0, 0);
        for hash in hashes {
            let (row, cell) = match (rows.get(id.index()), cells.get(id)) {
                (Some(row), Some(cell)) => (row, cell),
                // Of a pool that has grown.
                _ if id.0 < run.blocks => (self.row(id), core.cell(id)),
                _ => break,
            };
            fetch(id.0.wrapping_add(step.wrapping_mul(AHEAD as u32)));
            let word = cell.read();
            if !row.holds(hash, era) {
                break;
            }
            let Some(was_evictable) = cell.hit(word) else { break };
            // Again: as in `hit`.
            if !row.holds(hash, era) {
                core.give_back_hit(id, was_evictable);
                break;
            }
            row.count_hit();
            if HAS_TENANTS && was_evictable {
                core.took_cached(id);
            }
            take(id);
            (taken, evictable) = (taken + 1, evictable + usize::from(was_evictable));
            run.last = id;
            id = BlockId(id.0.wrapping_add(step));
        }
        run.next = (id.0 < run.blocks).then_some(id);
        (taken, evictable)
    }

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

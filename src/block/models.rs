//! Operations for the models that do to a block what sequences do, without their lists.

use crate::ids::{BlockId, FrameId, Run};

use crate::sync::{Frozen, Ordering::*};

use super::allocate::{ListEnd, own};
use super::core::Blocks;
use super::request::AllocRequest;
use super::state::{GrowTable, TablePart};
use super::tenants::Tenant;

/// Allocates a block for a list; `None` if there is none.
pub fn allocate_listed(blocks: &Blocks, request: &AllocRequest) -> Option<BlockId> {
    let mut taken = None;
    blocks.allocate_listed(request, None, &mut |id| taken = Some(id)).ok().and(taken)
}

/// Allocates a block for a list of a tenant; `None` if there is none, or its quota is reached.
pub fn allocate_for(blocks: &Blocks, tenant: Tenant) -> Option<BlockId> {
    let (mut taken, end) = (None, ListEnd { tenant, ..ListEnd::default() });
    blocks.allocate_listed(&AllocRequest::new(1), Some(end), &mut |id| taken = Some(id)).ok().and(taken)
}

/// Returns the numbers of blocks that a tenant holds, and of the cached ones of them.
pub fn holds(blocks: &Blocks, tenant: Tenant) -> (u64, u64) {
    let holding = blocks.tenants().map(|tenants| tenants.holding(tenant)).unwrap_or_default();
    (holding.held, holding.cached)
}

/// Drops a reference on each block of a list.
pub fn release_listed(blocks: &Blocks, ids: &[BlockId]) {
    blocks.release_listed(ids);
}

/// Sets a free block's generation so that its next free wraps the low bits around.
pub fn before_the_turn(blocks: &Blocks, id: BlockId) {
    let word = blocks.word(id);
    assert!(word.is_available());
    blocks.space.table.word(id).store(word.before_the_turn().to_bits(), Release);
}

/// Evicts a block, passes its frame to `used`, and frees it. False: none could be evicted.
pub fn evict(blocks: &Blocks, mut used: impl FnMut(FrameId)) -> bool {
    let evicted = blocks.evict_some_for(Tenant::NONE, 1, &mut |frames| {
        for &start in frames {
            used(start);
            blocks.space.free_run(Run { start, len: 1 });
        }
    });
    evicted > 0
}

/// Records that a list took whole units, and evicts up to `watermark` blocks ahead of need.
pub fn reclaim(blocks: &Blocks, watermark: usize) -> usize {
    blocks.reclaim_debt.fetch_add(1, Relaxed);
    blocks.settle_reclaim_debt(watermark)
}

/// Like [`evict`], but allocates the block at the frame for a list.
pub fn replace(blocks: &Blocks) -> Option<BlockId> {
    let mut taken = None;
    let request = AllocRequest::new(1);
    let evicted = blocks.evict_some_for(Tenant::NONE, 1, &mut |frames| {
        let now = blocks.clock().newest();
        taken = Some(own(blocks.space.table.view(), frames[0], &request, now));
    });
    if evicted > 0 { taken } else { None }
}

/// Returns whether a block is evictable and no batch in flight sees it.
pub fn can_evict(blocks: &Blocks, id: BlockId) -> bool {
    blocks.can_evict(id, blocks.word(id), blocks.clock().oldest())
}

/// A table that grows, whose rows are their own numbers.
pub struct Rows(GrowTable<Numbers>);

struct Numbers(Frozen<Vec<usize>>);

impl TablePart for Numbers {
    fn new(base: usize, len: usize) -> Self {
        Self(Frozen::new((base..base + len).collect()))
    }

    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Rows {
    /// Creates the first rows.
    pub fn new(rows: usize) -> Self {
        Self(GrowTable::new(rows))
    }

    /// Grows to at least `rows` rows.
    pub fn grow(&self, rows: usize) {
        self.0.grow(rows);
    }

    /// Returns the number of rows.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns a row.
    pub fn row(&self, row: usize) -> usize {
        let (part, at) = self.0.locate(row);
        part.0[at]
    }
}

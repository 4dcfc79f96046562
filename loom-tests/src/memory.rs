//! A pool and a cell for each frame, for models of leases.

use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, FrameId, Pool};
use loom::cell::UnsafeCell;
use loom::sync::Arc;

use crate::conclude;

/// A pool, and a cell for each frame that stands for its bytes.
pub struct Memory {
    /// The pool, without magazines and without a null block.
    pub pool: Pool,
    cells: Vec<UnsafeCell<u32>>,
}

// SAFETY: a cell is written by the sole owner of the block in its frame, and read by its mover, or
// by a batch that holds it back. The models check it.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    /// Creates a pool of `blocks` free blocks.
    pub fn new(blocks: usize) -> Arc<Self> {
        let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(blocks).without_storage();
        let pool = builder.without_null_block().segment_blocks(4).magazine_blocks(0).build().unwrap();
        Arc::new(Self { pool, cells: (0..blocks).map(|_| UnsafeCell::new(0)).collect() })
    }

    /// Writes a block's bytes, as its owner.
    pub fn write(&self, frame: FrameId) {
        // SAFETY: the caller owns it; the checker verifies it.
        self.cells[frame.index()].with_mut(|bytes| unsafe { *bytes += 1 });
    }

    /// Reads a block's bytes, as its mover, or in a batch.
    pub fn read(&self, frame: FrameId) {
        // SAFETY: no thread writes it; the checker verifies it.
        self.cells[frame.index()].with(|bytes| unsafe { *bytes });
    }

    /// Allocates all free blocks one by one, writes them, and frees them.
    pub fn pass(&self) {
        let mut leases = Vec::new();
        while let Ok(lease) = self.pool.allocate(AllocRequest::new(1)) {
            self.write(lease.frames().next().unwrap());
            leases.push(lease);
        }
    }

    /// Ends a model: all blocks are free, and can be allocated.
    pub fn finish(&self) {
        conclude(self.pool.blocks());
        assert_eq!(self.pool.audit().unwrap().owned, 0);
        assert_eq!(self.pool.free_blocks(), self.cells.len());
        self.pass();
    }
}

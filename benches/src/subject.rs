//! Subjects of measurement: anything that hands out blocks.

mod lists;
mod pool;
mod runs;

pub use lists::{FreeList, ListWorker, Listed, Parking, Queued, Standard};
pub use pool::{Leases, layout, pool};
pub use runs::{Bitmap, Contiguous, OffsetRuns, PoolRuns};

/// An allocator of blocks.
pub trait Subject: Sync + Sized {
    /// Handle of one thread.
    type Worker<'a>: Worker
    where
        Self: 'a;

    /// Name in reports.
    const NAME: &'static str;

    /// Creates `blocks` free blocks.
    fn new(blocks: usize) -> Self;

    /// Creates a worker for the calling thread.
    fn worker(&self) -> Self::Worker<'_>;

    /// Returns the number of free blocks, in any cache or list.
    fn free_blocks(&self) -> usize;
}

/// One thread's handle to a subject. A bench never exhausts the subject: an allocation that fails
/// panics.
pub trait Worker {
    /// One owned block.
    type Block: Send;
    /// Owned blocks of one allocation.
    type Blocks;

    /// Allocates one block.
    fn allocate(&mut self) -> Self::Block;

    /// Frees it.
    fn free(&mut self, block: Self::Block);

    /// Allocates `count` blocks, and notes references, owner and last use of each.
    fn allocate_many(&mut self, count: usize, owner: u64) -> Self::Blocks;

    /// Frees them.
    fn free_many(&mut self, blocks: Self::Blocks);

    /// Frees single blocks, in one call if there is such a call.
    fn free_each(&mut self, blocks: Vec<Self::Block>) {
        blocks.into_iter().for_each(|block| self.free(block));
    }

    /// Returns the number of a block.
    fn id(block: &Self::Block) -> u32;

    /// Returns the numbers of blocks.
    fn ids(blocks: &Self::Blocks, visit: &mut dyn FnMut(u32));
}

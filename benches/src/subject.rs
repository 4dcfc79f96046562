//! What can be measured: anything that deals in blocks.

mod lists;
mod pool;
mod runs;

pub use lists::{FreeList, ListWorker, Listed, Parking, Queued, Standard};
pub use pool::{Handles, Leases, RawHandles, RawWorker, Way, layout, pool};
pub use runs::{Bitmap, Contiguous, OffsetRuns, PoolRuns};

/// Something that deals in blocks.
pub trait Subject: Sync + Sized {
    /// What one thread works through.
    type Worker<'a>: Worker
    where
        Self: 'a;

    /// How reports call it.
    const NAME: &'static str;

    /// With `blocks` blocks, all free.
    fn new(blocks: usize) -> Self;

    /// For the calling thread.
    fn worker(&self) -> Self::Worker<'_>;

    /// Blocks that are free now, wherever they are.
    fn free_blocks(&self) -> usize;
}

/// One thread's way to a subject. A bench never asks for more than there is: an allocation that fails panics.
pub trait Worker {
    /// One owned block.
    type Block: Send;
    /// Owned blocks that were allocated in one call.
    type Blocks;

    /// One block.
    fn allocate(&mut self) -> Self::Block;

    /// Gives it back.
    fn free(&mut self, block: Self::Block);

    /// `count` blocks, each with its references, its owner and its last use noted.
    fn allocate_many(&mut self, count: usize, owner: u64) -> Self::Blocks;

    /// Gives them back.
    fn free_many(&mut self, blocks: Self::Blocks);

    /// Gives single blocks back, in one call where there is such a call.
    fn free_each(&mut self, blocks: Vec<Self::Block>) {
        blocks.into_iter().for_each(|block| self.free(block));
    }

    /// The number of a block.
    fn id(block: &Self::Block) -> u32;

    /// The numbers of blocks.
    fn ids(blocks: &Self::Blocks, visit: &mut dyn FnMut(u32));
}

/// A worker that can give a part of an allocation back.
pub trait Splits: Worker {
    /// Gives the first half of the blocks back at once (rounded down).
    fn free_first_half(&mut self, blocks: &mut Self::Blocks);
}

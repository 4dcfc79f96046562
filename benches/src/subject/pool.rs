//! kvpool itself, by each of its entry points.

use kvpool::storage::{Dtype, KvLayout};
use kvpool::{AllocRequest, Lease, Pool, SequenceId};

use super::{Subject, Worker};

/// Returns a small model's layout. The benches of blocks store no bytes.
pub fn layout() -> KvLayout {
    KvLayout::builder()
        .layers(28)
        .kv_heads(4)
        .head_dim(128)
        .block_tokens(16)
        .dtype(Dtype::Bf16)
        .build()
        .expect("a valid layout")
}

/// Creates a pool without bytes.
pub fn pool(blocks: usize) -> Pool {
    Pool::builder(layout()).blocks(blocks).without_storage().build().expect("a valid pool")
}

/// `Pool::allocate`: a lease that frees on drop, through the cache of the calling thread.
pub struct Leases(Pool);

impl Subject for Leases {
    type Worker<'a> = LeaseWorker<'a>;

    const NAME: &'static str = "kvpool lease";

    fn new(blocks: usize) -> Self {
        Self(pool(blocks))
    }

    fn worker(&self) -> LeaseWorker<'_> {
        LeaseWorker(&self.0)
    }

    fn free_blocks(&self) -> usize {
        self.0.free_blocks()
    }
}

/// A thread that holds leases.
pub struct LeaseWorker<'a>(&'a Pool);

impl<'a> Worker for LeaseWorker<'a> {
    type Block = Lease<'a>;
    type Blocks = Lease<'a>;

    #[inline]
    fn allocate(&mut self) -> Lease<'a> {
        self.0.allocate(AllocRequest::new(1)).expect("enough blocks are free")
    }

    #[inline]
    fn free(&mut self, block: Lease<'a>) {
        drop(block);
    }

    #[inline]
    fn allocate_many(&mut self, count: usize, owner: u64) -> Lease<'a> {
        let request = AllocRequest::new(count).sequence(SequenceId(owner));
        self.0.allocate(request).expect("enough blocks are free")
    }

    #[inline]
    fn free_many(&mut self, blocks: Lease<'a>) {
        drop(blocks);
    }

    fn id(block: &Lease<'a>) -> u32 {
        block.blocks()[0].get()
    }

    fn ids(blocks: &Lease<'a>, visit: &mut dyn FnMut(u32)) {
        blocks.blocks().iter().for_each(|id| visit(id.get()));
    }
}

//! kvpool itself, by each of its entry points.

use kvpool::storage::{Dtype, KvLayout};
use kvpool::{AllocRequest, BlockHandle, Lease, Pool, PoolHandle, SequenceId};

use super::{Splits, Subject, Worker};

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

/// `Pool::allocate_raw`: handles that the engine keeps in its own tables, through the cache of the
/// calling thread.
pub struct RawHandles(Pool);

impl RawHandles {
    /// The pool itself, for calls that only it has.
    pub fn pool(&self) -> &Pool {
        &self.0
    }
}

impl Subject for RawHandles {
    type Worker<'a> = RawWorker<&'a Pool>;

    const NAME: &'static str = "kvpool raw";

    fn new(blocks: usize) -> Self {
        Self(pool(blocks))
    }

    fn worker(&self) -> Self::Worker<'_> {
        RawWorker { way: &self.0, spare: Vec::new(), one: Vec::with_capacity(1) }
    }

    fn free_blocks(&self) -> usize {
        self.0.free_blocks()
    }
}

/// `PoolHandle`: an explicit cache, as carried by a task that changes threads.
pub struct Handles(Pool);

impl Subject for Handles {
    type Worker<'a> = RawWorker<PoolHandle>;

    const NAME: &'static str = "kvpool handle";

    fn new(blocks: usize) -> Self {
        Self(pool(blocks))
    }

    fn worker(&self) -> Self::Worker<'_> {
        RawWorker { way: self.0.handle(), spare: Vec::new(), one: Vec::with_capacity(1) }
    }

    fn free_blocks(&self) -> usize {
        self.0.free_blocks()
    }
}

/// An entry point for raw handles.
pub trait Way {
    /// Allocates into `handles`.
    fn allocate(&mut self, request: AllocRequest, handles: &mut Vec<BlockHandle>);
    /// Frees handles.
    fn free(&mut self, handles: &[BlockHandle]);
}

impl Way for &Pool {
    #[inline]
    fn allocate(&mut self, request: AllocRequest, handles: &mut Vec<BlockHandle>) {
        self.allocate_raw(request, handles).expect("enough blocks are free");
    }

    #[inline]
    fn free(&mut self, handles: &[BlockHandle]) {
        Pool::free(self, handles).expect("the blocks are owned");
    }
}

impl Way for PoolHandle {
    #[inline]
    fn allocate(&mut self, request: AllocRequest, handles: &mut Vec<BlockHandle>) {
        self.allocate_raw(request, handles).expect("enough blocks are free");
    }

    #[inline]
    fn free(&mut self, handles: &[BlockHandle]) {
        PoolHandle::free(self, handles).expect("the blocks are owned");
    }
}

/// A thread that holds raw handles. It keeps its emptied vectors, as an engine keeps its tables.
pub struct RawWorker<W> {
    way: W,
    spare: Vec<Vec<BlockHandle>>,
    one: Vec<BlockHandle>,
}

impl<W: Way> Worker for RawWorker<W> {
    type Block = BlockHandle;
    type Blocks = Vec<BlockHandle>;

    #[inline]
    fn allocate(&mut self) -> BlockHandle {
        self.one.clear();
        self.way.allocate(AllocRequest::new(1), &mut self.one);
        self.one[0]
    }

    #[inline]
    fn free(&mut self, block: BlockHandle) {
        self.way.free(&[block]);
    }

    #[inline]
    fn allocate_many(&mut self, count: usize, owner: u64) -> Vec<BlockHandle> {
        let mut handles = self.spare.pop().unwrap_or_default();
        self.way.allocate(AllocRequest::new(count).sequence(SequenceId(owner)), &mut handles);
        handles
    }

    #[inline]
    fn free_many(&mut self, mut blocks: Vec<BlockHandle>) {
        self.way.free(&blocks);
        blocks.clear();
        self.spare.push(blocks);
    }

    fn free_each(&mut self, blocks: Vec<BlockHandle>) {
        if !blocks.is_empty() {
            self.way.free(&blocks);
        }
    }

    fn id(block: &BlockHandle) -> u32 {
        block.id.get()
    }

    fn ids(blocks: &Vec<BlockHandle>, visit: &mut dyn FnMut(u32)) {
        blocks.iter().for_each(|handle| visit(handle.id.get()));
    }
}

impl<W: Way> Splits for RawWorker<W> {
    fn free_first_half(&mut self, blocks: &mut Vec<BlockHandle>) {
        let half = blocks.len() / 2;
        self.way.free(&blocks[..half]);
        blocks.drain(..half);
    }
}

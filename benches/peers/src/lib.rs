//! kvbm-logical as a subject: a full block manager behind one mutex, RAII blocks with typed states.
//!
//! [`Kvbm`] allocates mutable blocks and drops them, its cheapest path. [`KvbmRegistered`] takes
//! every block of a group through complete to registered, its normal path, in which it notes the
//! block's metadata.

mod reuse;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvbm_logical::blocks::{ImmutableBlock, MutableBlock};
use kvbm_logical::manager::FrequencyTrackingCapacity;
use kvbm_logical::{BlockManager, BlockRegistry, SequenceHash};
use kvpool_benches::{Subject, Worker};

pub use reuse::KvbmReuse;

const BLOCK_TOKENS: usize = 16;

/// Marker of the memory tier.
#[derive(Clone, Debug)]
pub struct Device;

fn manager(blocks: usize, block_tokens: usize) -> BlockManager<Device> {
    let tracker = FrequencyTrackingCapacity::Medium.create_tracker();
    BlockManager::builder()
        .block_count(blocks)
        .block_size(block_tokens)
        .registry(BlockRegistry::builder().frequency_tracker(tracker).build())
        .with_lru_backend()
        .build()
        .expect("a valid manager")
}

/// Mutable blocks only.
pub struct Kvbm(BlockManager<Device>);

impl Subject for Kvbm {
    type Worker<'a> = KvbmWorker<'a>;

    const NAME: &'static str = "kvbm-logical, mutable";

    fn new(blocks: usize) -> Self {
        Self(manager(blocks, BLOCK_TOKENS))
    }

    fn worker(&self) -> KvbmWorker<'_> {
        KvbmWorker(&self.0)
    }

    fn free_blocks(&self) -> usize {
        self.0.available_blocks()
    }
}

/// A thread that uses a manager.
pub struct KvbmWorker<'a>(&'a BlockManager<Device>);

impl Worker for KvbmWorker<'_> {
    type Block = MutableBlock<Device>;
    type Blocks = Vec<MutableBlock<Device>>;

    #[inline]
    fn allocate(&mut self) -> Self::Block {
        self.allocate_many(1, 0).pop().expect("one block was requested")
    }

    #[inline]
    fn free(&mut self, block: Self::Block) {
        drop(block);
    }

    #[inline]
    fn allocate_many(&mut self, count: usize, _: u64) -> Self::Blocks {
        self.0.allocate_blocks(count).expect("enough blocks are free")
    }

    #[inline]
    fn free_many(&mut self, blocks: Self::Blocks) {
        drop(blocks);
    }

    fn id(block: &Self::Block) -> u32 {
        block.block_id() as u32
    }

    fn ids(blocks: &Self::Blocks, visit: &mut dyn FnMut(u32)) {
        blocks.iter().for_each(|block| visit(Self::id(block)));
    }
}

/// Every block registered under a hash of its own.
pub struct KvbmRegistered {
    manager: BlockManager<Device>,
    hashes: AtomicU64,
}

impl Subject for KvbmRegistered {
    type Worker<'a> = RegisteredWorker<'a>;

    const NAME: &'static str = "kvbm-logical, registered";

    fn new(blocks: usize) -> Self {
        Self { manager: manager(blocks, BLOCK_TOKENS), hashes: AtomicU64::new(0) }
    }

    fn worker(&self) -> RegisteredWorker<'_> {
        RegisteredWorker(self)
    }

    fn free_blocks(&self) -> usize {
        self.manager.available_blocks()
    }
}

/// A thread that registers the blocks that it allocates.
pub struct RegisteredWorker<'a>(&'a KvbmRegistered);

impl Worker for RegisteredWorker<'_> {
    type Block = ImmutableBlock<Device>;
    type Blocks = Vec<ImmutableBlock<Device>>;

    #[inline]
    fn allocate(&mut self) -> Self::Block {
        self.allocate_many(1, 0).pop().expect("one block was requested")
    }

    #[inline]
    fn free(&mut self, block: Self::Block) {
        drop(block);
    }

    #[inline]
    fn allocate_many(&mut self, count: usize, _: u64) -> Self::Blocks {
        let first = self.0.hashes.fetch_add(count as u64, Relaxed);
        let blocks = self.0.manager.allocate_blocks(count).expect("enough blocks are free");
        let complete = (first..).zip(blocks).map(|(hash, block)| {
            block.stage(SequenceHash::new(hash, None, 0), BLOCK_TOKENS).expect("the manager's block size")
        });
        self.0.manager.register_blocks(complete.collect())
    }

    #[inline]
    fn free_many(&mut self, blocks: Self::Blocks) {
        drop(blocks);
    }

    fn id(block: &Self::Block) -> u32 {
        block.block_id() as u32
    }

    fn ids(blocks: &Self::Blocks, visit: &mut dyn FnMut(u32)) {
        blocks.iter().for_each(|block| visit(Self::id(block)));
    }
}

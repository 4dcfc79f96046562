//! The pool itself.

use smallvec::SmallVec;

use crate::block::{
    AllocRequest, AuditError, AuditReport, BlockInfo, Blocks, Counts, INLINE_BLOCKS, Sampler,
};
use crate::compact::Compactor;
use crate::error::{AllocError, GrowError, HandleError, StorageError};
use crate::ids::{BlockHandle, BlockId, Order, PoolTag, Run, SequenceId};
use crate::prefix::{BlockHash, PrefixCache};
use crate::sequence::{Batch, SequenceBuilder, SequenceView, Sequences};
use crate::storage::{DeviceStream, KvLayout, Storage};
use crate::sync::Arc;

use super::ids::LeasedIds;
use super::lease::Root;
use super::{Fragmentation, Lease, PoolBuilder, PoolHandle, Stats};

/// A pool of KV-cache blocks. Clones are the same pool; every method takes `&self` and may be called from any number
/// of threads at once.
///
/// ```
/// use kvpool::pool::{AllocRequest, Pool};
/// use kvpool::storage::KvLayout;
///
/// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(1_000).build()?;
/// let lease = pool.allocate(AllocRequest::new(10))?;
/// assert_eq!(lease.blocks().len(), 10);
/// assert_eq!(pool.free_blocks(), 990);
/// drop(lease);
/// assert_eq!(pool.free_blocks(), 1_000);
/// pool.audit()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Pool(pub(super) Arc<Shared>);

/// What all clones of a pool share.
pub(super) struct Shared {
    pub(super) blocks: Blocks,
    pub(super) layout: KvLayout,
    pub(super) storage: Option<std::sync::Arc<dyn Storage>>,
    pub(super) sequences: Sequences,
    pub(super) compactor: Compactor,
    pub(super) sampler: Sampler,
    pub(super) order: Order,
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.blocks.close();
        self.compactor.close();
    }
}

impl Pool {
    /// A builder of a pool of blocks of this layout.
    pub fn builder(layout: KvLayout) -> PoolBuilder {
        PoolBuilder::new(layout)
    }

    /// Hands out blocks, or says why not. Never waits, and takes no lock.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[inline]
    pub fn allocate(&self, request: AllocRequest) -> Result<Lease<'_>, AllocError> {
        match self.allocate_one::<true>(&request) {
            Some(id) => Ok(Lease::new(Root::Borrowed(&self.0.blocks), LeasedIds::one(id))),
            None => Ok(Lease::new(Root::Borrowed(&self.0.blocks), self.allocate_ids::<true>(&request)?)),
        }
    }

    /// As [`allocate`](Self::allocate), for a lease that borrows nothing: a reference count on top.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[inline]
    pub fn allocate_owned(&self, request: AllocRequest) -> Result<Lease<'static>, AllocError> {
        match self.allocate_one::<true>(&request) {
            Some(id) => Ok(Lease::new(Root::Owned(self.0.blocks.keep_alive()), LeasedIds::one(id))),
            None => {
                let ids = self.allocate_ids::<true>(&request)?;
                Ok(Lease::new(Root::Owned(self.0.blocks.keep_alive()), ids))
            }
        }
    }

    /// Hands out blocks as handles, appended to `out`, for an engine that keeps its own tables. What is not passed to
    /// [`free`](Self::free) stays allocated.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool and `out` are unchanged.
    #[inline]
    pub fn allocate_raw(&self, request: AllocRequest, out: &mut Vec<BlockHandle>) -> Result<(), AllocError> {
        match self.allocate_one::<false>(&request) {
            Some(id) => out.push(self.0.blocks.handle(id)),
            None => {
                let ids = self.allocate_ids::<false>(&request)?;
                out.extend(ids.iter().map(|&id| self.0.blocks.handle(id)));
            }
        }
        Ok(())
    }

    /// One block for a lease (guarded), or for a handle, the short way, unless it is this allocation's turn to be timed.
    #[inline]
    fn allocate_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<BlockId> {
        if self.0.sampler.is_due() || request.blocks != 1 {
            None
        } else {
            self.0.blocks.allocate_one::<GUARDED>(request)
        }
    }

    /// Any number of blocks: the short way where it goes, else the long one.
    #[inline(never)]
    fn allocate_ids<const GUARDED: bool>(&self, request: &AllocRequest) -> Result<LeasedIds, AllocError> {
        let blocks = &self.0.blocks;
        self.0.sampler.time(|| {
            let mut fast_path = [BlockId(0); INLINE_BLOCKS];
            if blocks.allocate_inline::<GUARDED>(request, &mut fast_path) {
                return Ok(LeasedIds::fast_path(fast_path, request.blocks));
            }
            let mut ids = SmallVec::new();
            let mut take = |id| ids.push(id);
            if GUARDED {
                blocks.allocate_guarded(request, None, &mut take)?;
            } else {
                blocks.allocate(request, None, &mut take)?;
            }
            Ok(LeasedIds::more(ids))
        })
    }

    /// Drops one reference on each block. A block that is in the list twice loses two.
    ///
    /// # Errors
    ///
    /// [`HandleError`] if a handle is foreign, out of range, stale (the block was freed since), of a block that a lease or
    /// a sequence owns, or in the list more often than the block has references. Nothing was freed then, unless another
    /// thread freed one of the blocks at the same moment through a handle of the same reference, or made a
    /// [lease](Lease::from_raw) of it: that one is reported, and the others are freed.
    #[inline]
    pub fn free(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        self.0.blocks.free(handles)
    }

    /// One more reference on each block.
    ///
    /// # Errors
    ///
    /// [`HandleError`], also of a block that a lease or a sequence owns; no block has a reference more than before.
    pub fn share(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        self.0.blocks.share_handles(handles)
    }

    /// One more pin on a block: it is neither evicted nor moved until as many [unpins](Self::unpin), or until it has
    /// lost its last owner. A lease's or a sequence's block is pinned by [`pin_scoped`](Self::pin_scoped).
    ///
    /// # Errors
    ///
    /// [`HandleError`], also of a block that a lease or a sequence owns; nothing was changed.
    pub fn pin(&self, handle: BlockHandle) -> Result<(), HandleError> {
        self.0.blocks.pin(handle)
    }

    /// One pin less.
    ///
    /// # Errors
    ///
    /// [`HandleError`], also of a block that a lease or a sequence owns, whose pin it may be; nothing was changed.
    pub fn unpin(&self, handle: BlockHandle) -> Result<(), HandleError> {
        self.0.blocks.unpin(handle)
    }

    /// A block's bytes are final: nobody writes them from now on, and compaction may move it. Sequences seal their blocks
    /// by themselves, and leases [theirs](Lease::seal).
    ///
    /// # Errors
    ///
    /// [`HandleError`], also of a block that a lease or a sequence owns; nothing was changed.
    pub fn seal(&self, handle: BlockHandle) -> Result<(), HandleError> {
        self.0.blocks.seal(handle)
    }

    /// Makes a sealed block writable again: true if it is open now; false if it has another owner, or is just being
    /// moved, so that its bytes are being read: then write to a block of your own.
    ///
    /// # Errors
    ///
    /// [`HandleError`], also of a block that a lease or a sequence owns; nothing was changed.
    pub fn reopen(&self, handle: BlockHandle) -> Result<bool, HandleError> {
        self.0.blocks.reopen(handle)
    }

    /// A block as it is at this moment.
    ///
    /// # Errors
    ///
    /// [`HandleError`] if the handle is foreign, out of range or stale.
    pub fn info(&self, handle: BlockHandle) -> Result<BlockInfo, HandleError> {
        self.0.blocks.info(handle)
    }

    /// A cache of its own for a task that moves between threads, or a thread that wants no thread-local.
    pub fn handle(&self) -> PoolHandle {
        PoolHandle::new(self)
    }

    /// A sequence to be opened: it owns its blocks in order, and frees them when dropped.
    ///
    /// ```
    /// # use kvpool::{ids::SequenceId, pool::Pool, sequence::BlockTable, storage::KvLayout};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
    /// let mut sequence = pool.sequence(SequenceId(7)).open()?;
    /// let mut batch = pool.begin_batch();
    /// batch.append(&mut sequence, 40)?;
    /// let mut table = BlockTable::new();
    /// batch.block_table([&sequence], &mut table)?;
    /// assert_eq!(table.row(0).len(), 10, "this layout has blocks of 4 tokens");
    /// batch.finish();
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sequence(&self, id: SequenceId) -> SequenceBuilder<'_> {
        self.0.sequences.sequence(id)
    }

    /// Reads an open sequence's blocks while its owner goes on; `None` if it is not open.
    pub fn view(&self, id: SequenceId) -> Option<SequenceView> {
        self.0.sequences.view(id)
    }

    /// Open sequences.
    pub fn sequence_count(&self) -> usize {
        self.0.sequences.count()
    }

    /// Begins a batch: one step of the engine, under which tables are read. What is freed while it is in flight is
    /// not written by anybody else before it has ended. Batches overlap and end in any order.
    pub fn begin_batch(&self) -> Batch {
        Batch::begin(&self.0.sequences)
    }

    /// Begins a batch on a device's stream; see [`Batch::begin_on`]. It ends when the stream gets there.
    ///
    /// # Errors
    ///
    /// [`StorageError::ForeignStream`], [`StorageError::Capturing`], [`StorageError::DeviceLost`].
    pub fn begin_batch_on(&self, stream: &DeviceStream) -> Result<Batch, StorageError> {
        Batch::begin_on(&self.0.sequences, stream)
    }

    /// Whether the pool's device has failed: it hands out no blocks any more, and what they held is lost.
    pub fn is_lost(&self) -> bool {
        self.0.blocks.is_lost()
    }

    /// Adds blocks while the pool serves.
    ///
    /// # Errors
    ///
    /// [`GrowError`]; the pool is unchanged.
    pub fn grow(&self, blocks: usize) -> Result<(), GrowError> {
        self.grow_as(blocks, &mut |_| Ok(()))
    }

    /// As [`grow`](Self::grow), unless `check` of the frames to come, before anything is done, says otherwise.
    pub(super) fn grow_as(
        &self,
        blocks: usize,
        check: &mut dyn FnMut(Run) -> Result<(), GrowError>,
    ) -> Result<(), GrowError> {
        self.0.blocks.grow(blocks, &mut |run| {
            check(run)?;
            match &self.0.storage {
                Some(storage) => storage.grow(run.end() as usize),
                None => Ok(()),
            }
        })
    }

    /// Brings free blocks that threads keep for later (magazines, the depot, retired ones that no batch sees any more)
    /// back to where they join into runs. An allocation that runs short does this by itself; an operator may do it
    /// before looking at fragmentation.
    pub fn trim(&self) {
        self.0.blocks.trim();
    }

    /// Blocks that any allocation can get now without evicting, wherever they are: [`Stats::free`].
    /// Without the [reserve](PoolBuilder::reserve). O(threads); exact when nobody allocates or
    /// frees meanwhile.
    pub fn free_blocks(&self) -> usize {
        self.0.blocks.counts().free()
    }

    /// Blocks that any allocation can get now, cached ones that nobody owns among them:
    /// [`Stats::available`]. Without the [reserve](PoolBuilder::reserve). O(threads); exact when
    /// nobody allocates or frees meanwhile.
    pub fn available_blocks(&self) -> usize {
        self.0.blocks.counts().available()
    }

    /// Threads and handles that have a cache of free blocks in this pool. A thread gives its cache back when its
    /// destructors run, which can be after the end of its scope: see
    /// [`testing::wait_for_threads`](crate::testing::wait_for_threads).
    pub fn thread_caches(&self) -> usize {
        self.0.blocks.thread_caches_in_use()
    }

    /// Blocks of the pool, without the null block.
    pub fn total_blocks(&self) -> usize {
        self.0.blocks.total()
    }

    /// How full the pool is. O(threads), of whatever size the pool is; exact when nobody allocates
    /// or frees meanwhile.
    pub fn stats(&self) -> Stats {
        Stats::of(&self.0)
    }

    /// How the free part hangs together, at the pool's [order](PoolBuilder::fragmentation_order). A
    /// walk over the bitmaps: some hundred microseconds a million blocks.
    pub fn fragmentation(&self) -> Fragmentation {
        Fragmentation::of(&self.0, self.0.order)
    }

    /// The prefix cache; `None` in a pool that was built without.
    pub fn prefix_cache(&self) -> Option<&PrefixCache> {
        self.0.sequences.cache().map(|cache| &**cache)
    }

    /// Blocks that are cached, and what they hold: for who begins to follow the [events](PrefixCache::events), or has lost some. A walk
    /// over all blocks; empty without a prefix cache.
    pub fn cached_blocks(&self) -> Vec<(BlockId, BlockHash)> {
        self.prefix_cache().map_or_else(Vec::new, |cache| cache.cached_blocks(&self.0.blocks))
    }

    /// Forgets all prefixes: nothing that was cached until now is found any more. What nobody owns is free at once, the rest when
    /// it is released. Returns how many blocks were evicted.
    pub fn clear_prefix_cache(&self) -> usize {
        self.prefix_cache().map_or(0, |cache| cache.clear(&self.0.blocks))
    }

    /// Recounts everything; to be called when nobody allocates or frees. Leases and batches may be open.
    ///
    /// # Errors
    ///
    /// The first contradiction found.
    pub fn audit(&self) -> Result<AuditReport, AuditError> {
        self.0.blocks.audit()
    }

    /// The layout of a block.
    pub fn layout(&self) -> &KvLayout {
        &self.0.layout
    }

    /// Where the bytes are; `None` in a pool that was built without storage.
    pub fn storage(&self) -> Option<&std::sync::Arc<dyn Storage>> {
        self.0.storage.as_ref()
    }

    internal! {
        /// The floor below.
        fn blocks(&self) -> &Blocks {
            &self.0.blocks
        }
    }

    /// Where the pool's blocks are, by counters: no walk over them. Exact when nobody allocates or frees meanwhile.
    pub fn counts(&self) -> Counts {
        self.0.blocks.counts()
    }

    /// Batches that were begun and have not ended.
    pub fn batches_in_flight(&self) -> u64 {
        self.0.blocks.clock().in_flight()
    }

    /// The number by which this pool's handles are told from another's.
    pub fn tag(&self) -> PoolTag {
        self.0.blocks.tag()
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("tag", &self.tag()).field("counts", &self.0.blocks.counts()).finish()
    }
}

use crate::block::{AuditError, AuditReport, BlockInfo, Blocks, Sampler};
use crate::compact::Compactor;
use crate::error::{GrowError, HandleError, PrefixError, StorageError};
use crate::ids::{BlockHandle, BlockId, Order, PoolTag, Run, SequenceId, WeightsVersion};
use crate::migrate::{MigrationCounts, Remotes, Transfers};
use crate::prefix::{BlockHash, PrefixCache, UncachedBlocks};
use crate::sequence::{Batch, Sequence, SequenceBuilder, SequenceView, Sequences};
use crate::storage::{DeviceStream, KvLayout, Storage};
use crate::sync::{Arc, call};

/// A pool of KV-cache blocks.
///
/// Cloning is cheap, and all clones are the same pool. Any number of threads may call it at once.
///
/// A block has at most 8,191 references: of sequences, forks, pinned prefixes, and
/// [shared](super::Lease::share) leases. A sequence whose prompt contains a cached block with that
/// many references computes its tokens from that block on
/// ([`PrefixStats::full_blocks`](crate::prefix::PrefixStats::full_blocks)).
///
/// ```
/// use kvpool::{AllocRequest, Pool};
/// use kvpool::storage::KvLayout;
///
/// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(1_000).build()?;
/// let lease = pool.allocate(AllocRequest::new(10))?;
/// assert_eq!((lease.blocks().len(), pool.free_blocks()), (10, 990));
/// drop(lease);
/// assert_eq!(pool.free_blocks(), 1_000);
/// pool.audit()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Pool(pub(super) Arc<Shared>);

pub(super) struct Shared {
    pub(super) blocks: Blocks,
    pub(super) layout: KvLayout,
    pub(super) storage: Option<std::sync::Arc<dyn Storage>>,
    pub(super) sequences: Sequences,
    pub(super) compactor: Compactor,
    pub(super) sampler: Sampler,
    pub(super) order: Order,
    pub(super) migrations: std::sync::Mutex<MigrationCounts>,
    pub(super) transfers: Transfers,
    /// Nodes that the pool knows.
    pub(super) remotes: std::sync::RwLock<Option<std::sync::Weak<dyn Remotes>>>,
}

impl Shared {
    pub(super) fn migrations(&self) -> std::sync::MutexGuard<'_, MigrationCounts> {
        self.migrations.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.blocks.close();
        self.compactor.close();
    }
}

impl Pool {
    #[cfg(not(kvpool_loom))]
    pub(super) fn own_sequences(&self) {
        let own: std::sync::Weak<Shared> = Arc::downgrade(&self.0);
        self.0.sequences.set_owner(own);
    }

    /// Returns the current state of a block.
    pub fn info(&self, handle: BlockHandle) -> Result<BlockInfo, HandleError> {
        let _call = call();
        self.0.blocks.info(handle)
    }

    /// Returns a builder of a sequence, which owns its blocks in order and frees them when dropped.
    ///
    /// ```
    /// # use kvpool::{SequenceId, Pool, BlockTable, storage::KvLayout};
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

    /// Returns a read-only view of an open sequence's blocks, usable while its owner continues;
    /// `None` if the sequence is not open. Of a sequence with several groups of layers, the view is
    /// that of the first one: [`SequenceView::group`] returns those of the others.
    pub fn view(&self, id: SequenceId) -> Option<SequenceView> {
        let _call = call();
        self.0.sequences.view(id)
    }

    /// Returns the number of open sequences.
    pub fn sequence_count(&self) -> usize {
        let _call = call();
        self.0.sequences.count()
    }

    /// Returns whether a sequence belongs to this pool.
    pub fn owns(&self, sequence: &Sequence) -> bool {
        sequence.sequences().same(&self.0.sequences)
    }

    /// Begins a batch: one step of the engine, under which block tables are read. A frame that is
    /// freed while it is in flight is not reused before it has ended. Batches may overlap and end
    /// in any order. Panics if 65,536 batches are in flight.
    pub fn begin_batch(&self) -> Batch {
        Batch::begin(&self.0.sequences)
    }

    /// Begins a batch on a device's stream; it ends when the stream reaches that point, however it
    /// is ended on the host. Panics like [`begin_batch`](Self::begin_batch), and fails if the
    /// stream is foreign or being captured, or the device is lost.
    ///
    /// Copies on write are enqueued on the stream, ahead of the batch's writes. The bytes that the
    /// batch reads and copies must be written by work that precedes it on the stream, or that the
    /// stream waits for.
    pub fn begin_batch_on(&self, stream: &DeviceStream) -> Result<Batch, StorageError> {
        Batch::begin_on(&self.0.sequences, stream)
    }

    /// Returns whether the pool's device has failed. It then allocates no more; contents are lost.
    pub fn is_lost(&self) -> bool {
        self.0.blocks.is_lost()
    }

    /// Adds `blocks` blocks while the pool serves.
    pub fn grow(&self, blocks: usize) -> Result<(), GrowError> {
        let _call = call();
        self.grow_as(blocks, &mut |_| Ok(()))
    }

    /// Grows after calling `check` with the new frames. An error of `check` cancels the growth.
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

    /// Returns free blocks in magazines to the bitmaps, where they merge into runs. An allocation
    /// that runs short does the same; an operator may call this before looking at fragmentation.
    pub fn trim(&self) {
        let _call = call();
        self.0.blocks.trim();
    }

    /// Returns the number of blocks that can be allocated without evicting, like
    /// [`Stats::free`](super::Stats::free). O(threads); exact without concurrent calls.
    pub fn free_blocks(&self) -> usize {
        let _call = call();
        self.0.blocks.counts().free()
    }

    /// Returns the number of free and evictable blocks, to compare with
    /// [`blocks_needed`](Self::blocks_needed). O(threads); exact without concurrent calls.
    pub fn available_blocks(&self) -> usize {
        let _call = call();
        self.0.blocks.counts().available()
    }

    /// Returns the number of threads with a thread cache in this pool. A thread returns its cache
    /// when its thread-local destructors run, possibly after the end of its scope: see
    /// [`testing::wait_for_threads`](crate::testing::wait_for_threads).
    pub fn thread_caches(&self) -> usize {
        self.0.blocks.thread_caches_in_use()
    }

    /// Returns the number of blocks in the pool, without the null block.
    pub fn total_blocks(&self) -> usize {
        let _call = call();
        self.0.blocks.total()
    }

    /// Returns the prefix cache, or `None` if the pool was built without one.
    pub fn prefix_cache(&self) -> Option<&PrefixCache> {
        self.0.sequences.cache().map(|cache| &**cache)
    }

    /// Returns the cached blocks and their hashes. Visits every block. Call it before following the
    /// [events](PrefixCache::events), and after events were lost.
    pub fn cached_blocks(&self) -> Vec<(BlockId, BlockHash)> {
        let cached = self.prefix_cache().map_or_else(Vec::new, |cache| cache.cached_blocks(&self.0.blocks));
        cached.into_iter().map(|(id, hash, _)| (id, hash)).collect()
    }

    /// Returns the same by [group of layers](Self::cache_groups): one list for each, which may be empty.
    /// Visits every block.
    pub fn cached_blocks_by_group(&self) -> Vec<Vec<(BlockId, BlockHash)>> {
        let mut groups = vec![Vec::new(); self.cache_groups().len()];
        let cached = self.prefix_cache().map_or_else(Vec::new, |cache| cache.cached_blocks(&self.0.blocks));
        cached.into_iter().for_each(|(id, hash, group)| groups[group as usize].push((id, hash)));
        groups
    }

    /// Clears the prefix cache: prefixes cached before the call are no longer found. O(1).
    ///
    /// Unowned blocks stay evictable; LRU evicts them before any that are cached later, a policy
    /// with several queues first in their queue. Owned ones are evicted before all others once
    /// released. To free blocks immediately, [evict](Self::evict_cached) some.
    pub fn clear_prefix_cache(&self) {
        let _call = call();
        if let Some(cache) = self.prefix_cache() {
            cache.clear();
        }
    }

    /// Sets the version of the model's weights: requests that begin after the call find cached
    /// blocks of this version only, here, in shared tiers and on other nodes. O(1): no block is
    /// visited. Returns the version before; a new pool has version 0.
    ///
    /// Call it between the last batch that computes with the old weights and the first one that
    /// computes with the new ones: the version of what a batch computes is that at its beginning.
    /// The number is the engine's, for example the training step: the same in all pools that
    /// exchange blocks, each of which makes the call, and never that of other weights. Blocks of an
    /// earlier version age, and are found again after a return to it.
    ///
    /// Sequences go on. [`Sequence::versions`](crate::Sequence::versions) tells which tokens were
    /// computed with which weights, and what is computed from K and V of other weights is never
    /// found. A request that waits for admission is looked up with the version at its admission.
    ///
    /// ```
    /// # use kvpool::{KvLayout, Pool, PrefixConfig, SequenceId, WeightsVersion};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).prefix_cache(PrefixConfig::new()).build()?;
    /// let prompt: Vec<u32> = (0..42).collect();
    /// for (version, cached) in [(0, 0), (0, 40), (1, 0), (1, 40), (0, 40)] {
    ///     pool.begin_version(WeightsVersion(version))?;
    ///     let mut sequence = pool.sequence(SequenceId(7)).tokens(&prompt)?;
    ///     assert_eq!(sequence.len(), cached);
    ///     let mut batch = pool.begin_batch();
    ///     batch.append(&mut sequence, prompt.len() - cached)?;
    ///     batch.finish();
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`PrefixError::NoCache`].
    pub fn begin_version(&self, version: WeightsVersion) -> Result<WeightsVersion, PrefixError> {
        let _call = call();
        Ok(self.prefix_cache().ok_or(PrefixError::NoCache)?.begin_version(version))
    }

    /// Sets the version of an adapter's weights, like [`begin_version`](Self::begin_version) for
    /// the sequences with this [adapter](crate::prefix::PrefixKeys::adapter). Keeps an entry for
    /// each adapter.
    ///
    /// # Errors
    /// [`PrefixError::NoCache`], [`PrefixError::Invalid`] for a name without bytes.
    pub fn begin_adapter_version(
        &self,
        adapter: &[u8],
        version: WeightsVersion,
    ) -> Result<WeightsVersion, PrefixError> {
        let _call = call();
        let cache = self.prefix_cache().ok_or(PrefixError::NoCache)?;
        Ok(cache.begin_adapter_version(adapter, version)?)
    }

    /// Returns for each hash whether a block is currently cached for it, as part of a chain or not.
    /// Takes no reference and changes no recency.
    pub fn has_cached(&self, hashes: &[BlockHash]) -> Vec<bool> {
        let _call = call();
        let has = |cache: &PrefixCache, hash| cache.has(&self.0.blocks, hash);
        hashes.iter().map(|&hash| self.prefix_cache().is_some_and(|cache| has(cache, hash))).collect()
    }

    /// Uncaches all blocks of these hashes, whose contents proved to be wrong: lookups no longer
    /// find them.
    ///
    /// Blocks without owners are evicted. Owners keep theirs and continue. This includes blocks
    /// that were written before the call, even in part, and become full or final later: by a batch
    /// in flight, by another sequence with the same tokens, or by an import. Blocks written after
    /// the call are found again.
    ///
    /// Blocks computed from a wrong block are wrong too, and have other hashes. After the call, a
    /// sequence with a wrong block caches nothing, and batches in flight do not cache what they
    /// filled before it; sequences without a wrong block do, when they are closed. Also pass the hashes of blocks that are cached
    /// already: [`Sequence::block_hashes`] returns those of a sequence, and
    /// [`KvEvent::Stored`](crate::prefix::KvEvent::Stored) names the block before each, also for an
    /// unfinished last block that was [registered](crate::AdmitRequest::reuse_tail).
    ///
    /// In a pool with [states](super::PoolBuilder::states), no earlier checkpoint is found any more.
    ///
    /// Visits every block. Remembers the newest 65,536 hashes. Frames that a batch in flight may
    /// see become free when it ends.
    ///
    /// ```
    /// # use kvpool::{Pool, SequenceId, Tokens, prefix::PrefixConfig, storage::KvLayout};
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).prefix_cache(PrefixConfig::new()).build()?;
    /// let prompt: Vec<u32> = (0..42).collect();
    /// let mut sequence = pool.sequence(SequenceId(1)).tokens(&prompt)?;
    /// let mut batch = pool.begin_batch();
    /// batch.append(&mut sequence, Tokens::Announced(prompt.len()))?;
    /// batch.finish();
    /// // This layout has blocks of 4 tokens. The bytes of the third proved to be wrong.
    /// let uncached = pool.uncache(&sequence.block_hashes()[2..]);
    /// assert_eq!((uncached.evicted_blocks, uncached.kept_blocks), (0, 8), "the sequence keeps them");
    /// assert_eq!(pool.sequence(SequenceId(2)).tokens(&prompt)?.len(), 8);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn uncache(&self, hashes: &[BlockHash]) -> UncachedBlocks {
        let _call = call();
        self.prefix_cache()
            .map_or_else(UncachedBlocks::default, |cache| cache.uncache_hashes(&self.0.blocks, hashes))
    }

    /// Evicts cached blocks without owners, in the policy's order, until at most `keep` are left,
    /// and returns the number evicted. Blocks that a batch in flight may see, or that are being
    /// moved, stay. Evicts in slices, between which other threads may allocate.
    pub fn evict_cached(&self, keep: usize) -> usize {
        let _call = call();
        const SLICE: usize = 512;
        let mut evicted = 0;
        loop {
            let over = self.0.blocks.evictable().saturating_sub(keep);
            match self.0.blocks.evict_free(over.min(SLICE)) {
                0 => return evicted,
                more => evicted += more,
            }
        }
    }

    /// Recounts every frame and block, and the references of each kind of owner. The error is the
    /// first contradiction found, or a reference that no owner will release.
    ///
    /// No thread may allocate or free meanwhile; leases, batches, transfers and waiting requests
    /// may be open. A [forgotten](std::mem::forget) lease is an [owner](Self::owners). While a
    /// thread is ending, returns [`AuditError::Busy`]: the end of a [scope](std::thread::scope),
    /// unlike a `join`, does not wait for thread-local destructors.
    pub fn audit(&self) -> Result<AuditReport, AuditError> {
        let _call = call();
        let report = self.0.blocks.audit()?;
        self.0.blocks.audit_owners(|| self.accounts())?;
        let (units, sequences) =
            (self.0.blocks.growth_units(), self.sequence_count() * self.0.sequences.kinds().len());
        if units > sequences { Err(AuditError::ReservedForGrowth { units, sequences }) } else { Ok(report) }
    }

    /// Returns the layout of a block.
    pub fn layout(&self) -> &KvLayout {
        &self.0.layout
    }

    /// Returns the storage that holds the blocks' bytes, or `None` if the pool was built without.
    pub fn storage(&self) -> Option<&std::sync::Arc<dyn Storage>> {
        self.0.storage.as_ref()
    }

    internal! {
        /// Returns the block metadata.
        fn blocks(&self) -> &Blocks {
            &self.0.blocks
        }
    }

    /// Returns the number of batches in flight.
    pub fn batches_in_flight(&self) -> u64 {
        self.0.blocks.clock().in_flight()
    }

    /// Returns the number that distinguishes this pool's handles from those of other pools.
    pub fn tag(&self) -> PoolTag {
        self.0.blocks.tag()
    }
}

impl Sequence {
    /// Returns its pool, or `None` if all [`Pool`] handles have been dropped.
    ///
    /// In models always `None`; [`Pool::owns`] is exact there too.
    pub fn pool(&self) -> Option<Pool> {
        #[cfg(kvpool_loom)]
        return None;
        #[cfg(not(kvpool_loom))]
        self.sequences().owner()?.upgrade()?.downcast::<Shared>().ok().map(Pool)
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("tag", &self.tag()).field("counts", &self.0.blocks.counts()).finish()
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;
    use crate::ids::FrameId;

    #[test]
    fn an_audit_finds_a_growth_unit_of_no_sequence() {
        let layout = KvLayout::named("tiny").unwrap();
        let pool = Pool::builder(layout).blocks(1_023).without_storage().build().unwrap();
        let sequence = pool.sequence(SequenceId(1)).open().unwrap();
        assert!(pool.0.blocks.begin_growth_unit(FrameId(70)));
        assert_eq!(pool.audit().unwrap().reserved_for_growth, 64);
        drop(sequence);
        assert_eq!(pool.audit(), Err(AuditError::ReservedForGrowth { units: 1, sequences: 0 }));
    }
}

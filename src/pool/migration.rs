//! `Pool` methods that copy or move sequences and cached blocks to another pool of the process and
//! back.

use std::time::Instant;

use crate::block::Class;
use crate::error::{AllocError, SettleError, TransferError};
use crate::migrate::{
    self, BringBackReport, Kind, MigrateError, MigrationReport, OffloadReport, Route, SequenceCopy,
};
use crate::prefix::PrefixKeys;
use crate::sequence::Sequence;

use super::Pool;

impl Pool {
    /// Moves a sequence to another pool of this process, on any device or on the host.
    ///
    /// [`migrate_to_node`](Self::migrate_to_node) moves one to another node.
    ///
    /// The blocks' bytes are copied, in as few runs as they occupy. The sequence continues there
    /// with the same id, tokens, committed length and priority, and is closed here. Blocks that the
    /// other pool has already cached are shared instead of copied. If the prefix caches of both
    /// pools use the same hashing, what is known of the sequence's tokens moves along and can be
    /// hit there; otherwise its ids stay known, and its blocks are not cached there. The same holds
    /// where a cache was [cleared](Self::clear_prefix_cache) since its blocks were computed: this
    /// pool's, or the other one's if the sequence comes back. A pool does not find what was
    /// computed in it before a clear, however it comes back. It cannot tell by which weights
    /// another pool computed; after a change of weights, clear each pool that computes.
    ///
    /// If the other pool has no room, the sequence waits there in the line of
    /// [`allocate_async`](Self::allocate_async), as a running sequence: after requests of higher
    /// priority, before leases and admissions of its own. It holds no block there while it waits,
    /// and nothing overtakes it but appends to running sequences. Tasks that hold blocks there while
    /// they wait for each other's never end: give such a wait a deadline, or swap a sequence out
    /// first. A sequence that is larger than the other pool is refused at once. Of the other ways to another pool, only
    /// [`migrate_until`](Self::migrate_until) waits for room; [`preempt`](Self::preempt),
    /// [`replicate`](Self::replicate) and transfers to a node fail at once, and
    /// [`offload`](Self::offload) and [`bring_back`](Self::bring_back) move as many blocks as there
    /// is room for.
    ///
    /// On a tokio runtime a blocking-pool thread copies the bytes, except for less than 256 KiB
    /// between pools in host memory: these the polling thread copies, as it does elsewhere. A batch
    /// in flight that writes the sequence is a reason to refuse it; await
    /// [`settled`](Self::settled) first, or use [`migrate_until`](Self::migrate_until). Batches of
    /// other sequences are no obstacle. Frees here are not held back by the copy.
    ///
    /// Dropping the future gives up its place in line, or stops the copy, and closes the sequence;
    /// use [`replicate`](Self::replicate) to keep it, or [`migrate_until`](Self::migrate_until) to
    /// get it back.
    ///
    /// ```
    /// # use kvpool::{SequenceId, Pool, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layout = KvLayout::named("tiny")?;
    /// let busy = Pool::builder(layout.clone()).blocks(100).build()?;
    /// let idle = Pool::builder(layout).blocks(1_000).build()?;
    /// let mut sequence = busy.sequence(SequenceId(7)).open()?;
    /// let mut batch = busy.begin_batch();
    /// batch.append(&mut sequence, 42)?;
    /// batch.finish();
    /// let (mut sequence, report) = busy.migrate(sequence, &idle).await?;
    /// // This layout has blocks of 4 tokens.
    /// assert_eq!((sequence.len(), report.carried.blocks), (42, 11));
    /// assert_eq!(busy.free_blocks(), 100);
    /// let mut step = idle.begin_batch();
    /// step.append(&mut sequence, 1)?;
    /// step.finish();
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`MigrateError`], which contains the unchanged sequence: [`TransferError::Invalid`] for one and the same pool,
    /// [`TransferError::ForeignSequence`], [`TransferError::BeingWritten`],
    /// [`TransferError::NoStorage`], [`TransferError::Alloc`] if the sequence does not fit into the
    /// other pool, [`TransferError::Sequence`] if the id is open there, [`TransferError::Storage`]
    /// if the layouts differ or a copy fails.
    pub async fn migrate(
        &self,
        sequence: Sequence,
        to: &Self,
    ) -> Result<(Sequence, MigrationReport), MigrateError> {
        self.migrate_by(sequence, to, None).await
    }

    /// Moves a sequence, and waits for room until a deadline, if there is one.
    async fn migrate_by(
        &self,
        sequence: Sequence,
        to: &Self,
        deadline: Option<Instant>,
    ) -> Result<(Sequence, MigrationReport), MigrateError> {
        // The sequence stays outside of what a deadline cuts short.
        let moved = traced!("kvpool.migrate", self.move_to(&sequence, to, deadline)).await;
        let comes_back = sequence.swapped_from == Some(to.tag());
        let kind: Kind =
            if comes_back { |counts| &mut counts.swapped_in } else { |counts| &mut counts.migrated };
        self.0.migrations().ended(moved.as_ref().map(|(_, report)| (&report.carried, 0)), kind);
        moved.map_err(|error| MigrateError { error, sequence: Box::new(sequence) })
    }

    async fn move_to(
        &self,
        sequence: &Sequence,
        to: &Self,
        deadline: Option<Instant>,
    ) -> Result<(Sequence, MigrationReport), TransferError> {
        let mut copy = SequenceCopy::begin(self.route_to(to)?, sequence)?;
        match copy.take_now(true) {
            Err(AllocError::Behind { .. } | AllocError::Exhausted { .. }) => {
                let request = copy.request();
                // On the heap: a sequence that does not wait should not carry it.
                let waiting = Box::pin(async {
                    let mut place = to.blocks().wait_in_line(&request, Class::Growth);
                    to.in_turns(&mut place, |place| copy.take_in_turn(place)).await
                });
                match deadline {
                    Some(deadline) => {
                        to.until(request.blocks, deadline, waiting).await.unwrap_or_else(Err)?
                    }
                    None => waiting.await?,
                }
            }
            taken => taken?,
        }
        let (mut arrived, report) = copy.copy().await?;
        // Over a third pool it still comes back.
        arrived.swapped_from = sequence.swapped_from.filter(|&home| home != to.tag());
        Ok((arrived, report))
    }

    /// Copies a sequence to another pool, and leaves the original open here.
    ///
    /// The copies are independent. Never waits for room. Dropping the future cancels the operation
    /// without effect, except that the id stays open in the other pool until the current piece is
    /// copied.
    ///
    /// # Errors
    ///
    /// As for [`migrate`](Self::migrate), and [`TransferError::Alloc`] if the other pool has no
    /// room; nothing changes.
    pub async fn replicate(
        &self,
        sequence: &Sequence,
        to: &Self,
    ) -> Result<(Sequence, MigrationReport), TransferError> {
        self.replicate_as(sequence, to, |counts| &mut counts.replicated).await
    }

    async fn replicate_as(
        &self,
        sequence: &Sequence,
        to: &Self,
        kind: Kind,
    ) -> Result<(Sequence, MigrationReport), TransferError> {
        let copied = async {
            let mut copy = SequenceCopy::begin(self.route_to(to)?, sequence)?;
            copy.take_now(false)?;
            copy.copy().await
        };
        let copied = traced!("kvpool.replicate", copied).await;
        self.0.migrations().ended(copied.as_ref().map(|(_, report)| (&report.carried, 0)), kind);
        copied
    }

    fn route_to(&self, to: &Self) -> Result<Route, TransferError> {
        Route::new(self.end()?, to.end()?)
    }

    /// Moves a sequence like [`migrate`](Self::migrate), after the batches that write it have
    /// ended.
    ///
    /// The deadline is that of the waits, first for these batches and then for room in the other
    /// pool, not of the copy. Batches of other sequences are not waited for. The sequence is tried
    /// at least once: with a deadline that has passed, it moves only if it can at once.
    ///
    /// # Errors
    ///
    /// As for [`migrate`](Self::migrate), at the deadline with the sequence:
    /// [`TransferError::BeingWritten`] if a batch that writes it is in flight, and
    /// [`TransferError::Alloc`] with [`AllocError::Deadline`] if there is no room.
    ///
    /// # Panics
    ///
    /// If it has to wait in a tokio runtime whose timer is disabled.
    pub async fn migrate_until(
        &self,
        mut sequence: Sequence,
        to: &Self,
        deadline: Instant,
    ) -> Result<(Sequence, MigrationReport), MigrateError> {
        loop {
            let mut refused = match self.migrate_by(sequence, to, Some(deadline)).await {
                Err(error) if matches!(error.error, TransferError::BeingWritten { .. }) => error,
                outcome => return outcome,
            };
            match self.wait_for_writers(&refused.sequence, Some(deadline), refused.error.clone()).await {
                Ok(()) => sequence = *refused.sequence,
                Err(error) => {
                    refused.error = error;
                    return Err(refused);
                }
            }
        }
    }

    /// Copies a sequence like [`replicate`](Self::replicate), after the batches that write it have
    /// ended.
    ///
    /// # Errors
    ///
    /// As for [`migrate_until`](Self::migrate_until); nothing changes.
    ///
    /// # Panics
    ///
    /// If it has to wait in a tokio runtime whose timer is disabled.
    pub async fn replicate_until(
        &self,
        sequence: &Sequence,
        to: &Self,
        deadline: Instant,
    ) -> Result<(Sequence, MigrationReport), TransferError> {
        self.replicate_settled(sequence, to, Some(deadline), |counts| &mut counts.replicated).await
    }

    /// Waits only if the copy is refused because of a batch in flight, so that other refusals come
    /// at once.
    pub(super) async fn replicate_settled(
        &self,
        sequence: &Sequence,
        to: &Self,
        deadline: Option<Instant>,
        kind: Kind,
    ) -> Result<(Sequence, MigrationReport), TransferError> {
        loop {
            let refused = match self.replicate_as(sequence, to, kind).await {
                Err(error @ TransferError::BeingWritten { .. }) => error,
                outcome => return outcome,
            };
            self.wait_for_writers(sequence, deadline, refused).await?;
        }
    }

    /// Waits until the batches that write a sequence have ended, which was refused because of them.
    async fn wait_for_writers(
        &self,
        sequence: &Sequence,
        deadline: Option<Instant>,
        refused: TransferError,
    ) -> Result<(), TransferError> {
        // Borrowed here, the sequence gets no further writers: one wait is enough, unless the
        // refusal was about a batch that was just beginning.
        let settled = self.settled(sequence);
        let waited = match deadline {
            Some(deadline) => settled.until(deadline).await,
            None => settled.await,
        };
        match waited {
            Ok(()) => Ok(()),
            Err(SettleError::Deadline { batch }) => {
                Err(TransferError::BeingWritten { id: sequence.id(), batch })
            }
            Err(_) => Err(refused),
        }
    }

    /// Moves up to `blocks_max` evictable blocks to another pool's prefix cache.
    ///
    /// Blocks are copied in the order of eviction, and then evicted here. A block that is hit
    /// meanwhile stays. Both caches must use the same [hashing and
    /// key](crate::prefix::PrefixConfig). The other pool evicts its own coldest blocks to make
    /// room; if that is not enough, fewer blocks move.
    ///
    /// A hash identifies the tokens of a block, but neither the model nor the tensor-parallel rank.
    /// Pools that offload to the same pool therefore need a different [salt](PrefixKeys::salt)
    /// each, unless their bytes are identical. Blocks that are being offloaded cannot be evicted;
    /// choose a small `blocks_max` if other threads allocate here at the same time.
    ///
    /// Dropping the future is safe: the offload either completes, or leaves all blocks where they
    /// were. To [clear](Self::clear_prefix_cache) both caches during an offload, clear this pool's
    /// first; then the blocks being copied are found in neither. Blocks that come from a pool, and
    /// were computed there before it was cleared, do not go back into its cache: they stay here,
    /// and count as [stale](OffloadReport::stale_blocks).
    ///
    /// # Errors
    ///
    /// In all cases the blocks stay where they were: [`TransferError::Invalid`] for one and the same pool,
    /// [`TransferError::NoStorage`], [`TransferError::NoCache`], [`TransferError::Invalid`] for caches that hash differently,
    /// [`TransferError::Alloc`] if there is no room at all or `blocks_max` is zero,
    /// [`TransferError::Storage`].
    pub async fn offload(&self, to: &Self, blocks_max: usize) -> Result<OffloadReport, TransferError> {
        self.offloading(async { migrate::offload(self.route_to(to)?, blocks_max).await }).await
    }

    /// Traces and counts an offload.
    pub(super) async fn offloading(
        &self,
        offload: impl Future<Output = Result<OffloadReport, TransferError>>,
    ) -> Result<OffloadReport, TransferError> {
        let offloaded = traced!("kvpool.offload", offload).await;
        let outcome = offloaded.as_ref().map(|report| (&report.carried, report.stale_blocks));
        self.0.migrations().ended(outcome, |counts| &mut counts.offloads);
        offloaded
    }

    /// Copies cached blocks of these tokens from another pool's prefix cache into this pool's.
    ///
    /// Copies the blocks that this pool lacks, up to the first gap, so that a
    /// [sequence](Self::sequence) opened with these tokens finds them here. The other pool keeps
    /// its copies. Does not wait for room: if there is less, only the leading blocks come. Blocks
    /// that were computed here before this cache was cleared do not come, nor those that were
    /// computed after them, and count as [stale](BringBackReport::stale_blocks).
    ///
    /// Dropping the future is safe: the copy either completes, or has no effect.
    ///
    /// # Errors
    ///
    /// As for [`offload`](Self::offload), and [`TransferError::Invalid`] if a key is empty, or the
    /// range of an extra key is, or is not within the tokens; nothing is copied.
    pub async fn bring_back(
        &self,
        from: &Self,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
    ) -> Result<BringBackReport, TransferError> {
        self.bringing_back(async { migrate::bring_back(from.route_to(self)?, keys, tokens).await }).await
    }

    /// Traces and counts a return of cached blocks.
    pub(super) async fn bringing_back(
        &self,
        came: impl Future<Output = Result<BringBackReport, TransferError>>,
    ) -> Result<BringBackReport, TransferError> {
        let came = traced!("kvpool.bring_back", came).await;
        let outcome = came.as_ref().map(|report| (&report.carried, report.stale_blocks));
        self.0.migrations().ended(outcome, |counts| &mut counts.brought_back);
        came
    }
}

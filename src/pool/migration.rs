//! `Pool` methods that copy or move sequences and cached blocks to another pool and back.

use std::time::Instant;

use crate::error::{SettleError, TransferError};
use crate::migrate::{self, BringBackReport, MigrateError, OffloadReport, Party, Route};
use crate::prefix::PrefixKeys;
use crate::sequence::Sequence;

use super::Pool;
use super::destination::{Destination, Place};

impl Pool {
    /// Moves a sequence to another pool.
    ///
    /// The blocks' bytes are copied, in as few runs as they occupy. The sequence continues there
    /// with the same id, tokens, committed length and priority, and is closed here. Blocks that the
    /// other pool has already cached are shared instead of copied. If the prefix caches of both
    /// pools use the same hashing, what is known of the sequence's tokens moves along and can be
    /// hit there; otherwise its new blocks are not cached there, like those of a sequence without
    /// announced tokens.
    ///
    /// On a tokio runtime a blocking-pool thread copies the bytes; elsewhere the polling thread
    /// does. A batch in flight that writes the sequence is a reason to refuse it; await
    /// [`settled`](Self::settled) first, or use [`migrate_until`](Self::migrate_until). Batches of
    /// other sequences are no obstacle. Frees here are not held back by the copy.
    ///
    /// Dropping the future stops the copy and closes the sequence; use
    /// [`replicate`](Self::replicate) to keep it.
    ///
    /// ```
    /// # use kvpool::{SequenceId, Pool, Target, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layout = KvLayout::named("tiny")?;
    /// let busy = Pool::builder(layout.clone()).blocks(100).build()?;
    /// let idle = Pool::builder(layout).blocks(1_000).build()?;
    /// let mut sequence = busy.sequence(SequenceId(7)).open()?;
    /// let mut batch = busy.begin_batch();
    /// batch.append(&mut sequence, 42)?;
    /// batch.finish();
    /// let (mut sequence, report) = busy.migrate(sequence, Target::Device(&idle)).await?;
    /// // This layout has blocks of 4 tokens.
    /// assert_eq!((sequence.len(), report.carried.blocks), (42, 11));
    /// assert_eq!(busy.free_blocks(), 100);
    /// idle.begin_batch().append(&mut sequence, 1)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`MigrateError`], which contains the unchanged sequence: [`TransferError::SamePool`],
    /// [`TransferError::ForeignSequence`], [`TransferError::BeingWritten`],
    /// [`TransferError::NoStorage`], [`TransferError::Alloc`] if the other pool has no room,
    /// [`TransferError::Sequence`] if the id is open there, [`TransferError::Storage`] if the
    /// layouts differ or a copy fails.
    ///
    /// To a [node](super::Target::node): also [`TransferError::UnknownNode`],
    /// [`TransferError::Transport`], [`TransferError::Node`]; [`TransferError::InDoubt`] if this
    /// node ended before the other one said whether it has the sequence, which must then not go on
    /// here.
    pub async fn migrate<D: Destination>(
        &self,
        sequence: Sequence,
        target: D,
    ) -> Result<D::Arrived, MigrateError> {
        let moved = async {
            match target.place() {
                Place::Pool(to) => {
                    let moved = migrate::migrate(self.route_to(to), sequence).await;
                    moved.map(|(sequence, report)| (Some(sequence), report))
                }
                Place::Node(name) => self.migrate_to_node(sequence, name).await.map(|report| (None, report)),
            }
        };
        let moved = traced!("kvpool.migrate", moved).await;
        let carried = moved.as_ref().ok().map(|(_, report)| &report.carried);
        self.0.migrations().ended(carried, |counts| &mut counts.migrated);
        moved.map(|(sequence, report)| D::arrived(sequence, report))
    }

    /// Copies a sequence to another pool, and leaves the original open here.
    ///
    /// The copies are independent. Dropping the future cancels the operation without effect, except
    /// that the id stays open in the other pool until the current piece is copied.
    ///
    /// # Errors
    ///
    /// As for [`migrate`](Self::migrate); nothing changes.
    pub async fn replicate<D: Destination>(
        &self,
        sequence: &Sequence,
        target: D,
    ) -> Result<D::Arrived, TransferError> {
        let copied = async {
            match target.place() {
                Place::Pool(to) => {
                    let copied = migrate::replicate(self.route_to(to), sequence).await;
                    copied.map(|(sequence, report)| (Some(sequence), report))
                }
                Place::Node(name) => {
                    self.replicate_to_node(sequence, name).await.map(|report| (None, report))
                }
            }
        };
        let copied = traced!("kvpool.replicate", copied).await;
        let carried = copied.as_ref().ok().map(|(_, report)| &report.carried);
        self.0.migrations().ended(carried, |counts| &mut counts.replicated);
        copied.map(|(sequence, report)| D::arrived(sequence, report))
    }

    fn party(&self) -> Party<'_> {
        (&self.0.sequences, &self.0.transfers)
    }

    fn route_to(&self, to: &Self) -> Result<Route, TransferError> {
        Route::new(self.party(), to.party())
    }

    /// Moves a sequence like [`migrate`](Self::migrate), after the batches that write it have
    /// ended.
    ///
    /// The deadline is that of the wait, not of the copy. Batches of other sequences are not waited
    /// for. The target's blocks are taken after the wait.
    ///
    /// # Errors
    ///
    /// As for [`migrate`](Self::migrate); [`TransferError::BeingWritten`] if a batch that writes
    /// the sequence is in flight at the deadline.
    ///
    /// # Panics
    ///
    /// If it has to wait in a tokio runtime whose timer is disabled.
    pub async fn migrate_until<D: Destination>(
        &self,
        mut sequence: Sequence,
        target: D,
        deadline: Instant,
    ) -> Result<D::Arrived, MigrateError> {
        loop {
            let mut refused = match self.migrate(sequence, target).await {
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
    pub async fn replicate_until<D: Destination>(
        &self,
        sequence: &Sequence,
        target: D,
        deadline: Instant,
    ) -> Result<D::Arrived, TransferError> {
        self.replicate_settled(sequence, target, Some(deadline)).await
    }

    /// Waits only if the copy is refused because of a batch in flight, so that other refusals come
    /// at once.
    pub(super) async fn replicate_settled<D: Destination>(
        &self,
        sequence: &Sequence,
        target: D,
        deadline: Option<Instant>,
    ) -> Result<D::Arrived, TransferError> {
        loop {
            let refused = match self.replicate(sequence, target).await {
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
    /// first; then the blocks being copied are found in neither.
    ///
    /// # Errors
    ///
    /// In all cases the blocks stay where they were: [`TransferError::SamePool`],
    /// [`TransferError::NoStorage`], [`TransferError::NoCache`], [`TransferError::OtherHashing`],
    /// [`TransferError::Alloc`] if there is no room at all or `blocks_max` is zero,
    /// [`TransferError::Storage`].
    ///
    /// To a [node](super::Target::node): also [`TransferError::UnknownNode`],
    /// [`TransferError::Transport`], [`TransferError::Node`].
    pub async fn offload<D: Destination>(
        &self,
        to: D,
        blocks_max: usize,
    ) -> Result<OffloadReport, TransferError> {
        let offloaded = async {
            match to.place() {
                Place::Pool(to) => {
                    migrate::offload(Route::between_caches(self.party(), to.party()), blocks_max).await
                }
                Place::Node(name) => self.offload_to_node(name, blocks_max).await,
            }
        };
        let offloaded = traced!("kvpool.offload", offloaded).await;
        let carried = offloaded.as_ref().ok().map(|report| &report.carried);
        self.0.migrations().ended(carried, |counts| &mut counts.offloads);
        offloaded
    }

    /// Copies cached blocks of these tokens from another pool's prefix cache into this pool's.
    ///
    /// Copies the blocks that this pool lacks, up to the first gap, so that a
    /// [sequence](Self::sequence) opened with these tokens finds them here. The other pool keeps
    /// its copies.
    ///
    /// Dropping the future is safe: the copy either completes, or has no effect.
    ///
    /// # Errors
    ///
    /// As for [`offload`](Self::offload), and [`TransferError::Prefix`] if a key is empty, or the range
    /// of an extra key is, or is not within the tokens; nothing is copied.
    pub async fn bring_back<D: Destination>(
        &self,
        from: D,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
    ) -> Result<BringBackReport, TransferError> {
        let came = async {
            match from.place() {
                Place::Pool(from) => {
                    migrate::bring_back(Route::between_caches(from.party(), self.party()), keys, tokens).await
                }
                Place::Node(name) => self.bring_back_from_node(name, keys, tokens).await,
            }
        };
        let came = traced!("kvpool.bring_back", came).await;
        let carried = came.as_ref().ok().map(|report| &report.carried);
        self.0.migrations().ended(carried, |counts| &mut counts.brought_back);
        came
    }
}

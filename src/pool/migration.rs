//! `Pool` methods that copy or move sequences and cached blocks between pools of the process.

use std::time::Instant;

use crate::block::{Class, Waiting};
use crate::error::{AllocError, SettleError, TransferError};
use crate::migrate::{
    self, BringBackReport, Kind, MigrateError, MigrationReport, OffloadReport, Route, SequenceCopy,
};
use crate::prefix::PrefixKeys;
use crate::sequence::{AnySequence, ResumeOptions};

use super::Pool;
use super::wait::{CallUntil, Wait};

impl Pool {
    /// Moves a sequence to another pool of this process, on any device or on the host.
    /// [`migrate_to_node`](Self::migrate_to_node) moves one to another node.
    ///
    /// The sequence continues there with the same id, tokens, committed length and priority, and is
    /// closed here. Blocks that the other pool has cached are shared instead of copied. If both
    /// caches use the same hashing, the known tokens can be hit there; otherwise the sequence keeps
    /// their ids, but its blocks are not cached there, nor are those computed before a
    /// [clear](Self::clear_prefix_cache) of either cache. A pool cannot tell with which weights
    /// another one computed: after a change of weights, [begin a version](Self::begin_version) in
    /// each pool that computes.
    ///
    /// If the other pool has no room, the sequence waits in that pool's queue like a growing
    /// sequence, without holding blocks there. Tasks that hold blocks while they wait for each
    /// other's deadlock: set a deadline, or swap a sequence out first. Other transfers do not wait
    /// for room: [`preempt`](Self::preempt), [`replicate`](Self::replicate) and transfers to a node
    /// fail, and [`offload`](Self::offload) and [`bring_back`](Self::bring_back) move as many
    /// blocks as fit.
    ///
    /// Fails if a batch in flight writes the sequence: await [`settled`](Self::settled) first, or
    /// set a deadline ([`Wait::until`]), which bounds the waits for these batches and for room; the
    /// error then returns the open sequence. Dropping the future closes the sequence;
    /// [`replicate`](Self::replicate) keeps it.
    ///
    /// Copies of less than 256 KiB between pools in host memory, and all without a tokio runtime,
    /// run on the polling thread, others on a blocking-pool thread.
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
    /// let (sequence, report) = busy.migrate(sequence, &idle).await?;
    /// // This layout has blocks of 4 tokens.
    /// assert_eq!((sequence.len(), report.carried.blocks, busy.free_blocks()), (42, 11, 100));
    /// # Ok(())
    /// # }
    /// ```
    /// # Errors
    /// [`MigrateError`] returns the unchanged sequence: [`TransferError::Invalid`] if both pools
    /// are the same, [`TransferError::ForeignSequence`], [`TransferError::BeingWritten`],
    /// [`TransferError::NoStorage`], [`TransferError::Alloc`] if the sequence can never fit, or has
    /// no room at the deadline, [`TransferError::Sequence`], [`TransferError::Storage`].
    pub fn migrate<'a, S: AnySequence>(
        &'a self,
        mut sequence: S,
        to: &'a Self,
    ) -> Wait<impl CallUntil<Output = Result<(S, MigrationReport), MigrateError<S>>, Future: Send>> {
        Wait::new(move |deadline| async move {
            loop {
                let mut refused = match self.migrate_by(sequence, to, deadline).await {
                    Err(error)
                        if deadline.is_some()
                            && matches!(error.error, TransferError::BeingWritten { .. }) =>
                    {
                        error
                    }
                    outcome => return outcome,
                };
                match self.wait_for_writers(&*refused.sequence, deadline, refused.error.clone()).await {
                    Ok(()) => sequence = *refused.sequence,
                    Err(error) => {
                        refused.error = error;
                        return Err(refused);
                    }
                }
            }
        })
    }

    async fn migrate_by<S: AnySequence>(
        &self,
        sequence: S,
        to: &Self,
        deadline: Option<Instant>,
    ) -> Result<(S, MigrationReport), MigrateError<S>> {
        // The future that a deadline cancels only borrows the sequence.
        let room = ResumeOptions::new();
        let moved = traced!("kvpool.migrate", self.copy_to(&sequence, to, (Class::Growth, room), deadline));
        let moved = moved.await;
        let kind: Kind = |counts| &mut counts.migrated;
        self.0.migrations().ended(moved.as_ref().map(|(_, report)| (&report.carried, 0)), kind);
        moved.map_err(|error| MigrateError { error, sequence: Box::new(sequence) })
    }

    /// Copies a sequence, and waits for room until the deadline, if any.
    pub(super) async fn copy_to<S: AnySequence>(
        &self,
        sequence: &S,
        to: &Self,
        (class, room): (Class, ResumeOptions),
        deadline: Option<Instant>,
    ) -> Result<(S, MigrationReport), TransferError> {
        let mut copy = SequenceCopy::begin(self.route_to(to)?, sequence, room)?;
        match copy.take_now(true) {
            Err(AllocError::Behind { .. } | AllocError::Exhausted { .. } | AllocError::NoRun { .. }) => {
                let request = copy.request();
                let attempt = |place: &mut Waiting<'_>| copy.take_in_turn(place);
                to.in_turns(&request, class, deadline, attempt).await?;
            }
            taken => taken?,
        }
        copy.copy().await
    }

    /// Copies a sequence to another pool, and leaves the original open. The copies are independent.
    ///
    /// Never waits for room. Fails if a batch in flight writes the sequence, unless a deadline is
    /// set ([`Wait::until`]), until which it waits for such batches. Dropping the future cancels
    /// the copy, but the id stays open in the other pool until the current piece is copied. Errors
    /// are those of [`migrate`](Self::migrate).
    pub fn replicate<'a, S: AnySequence>(
        &'a self,
        sequence: &'a S,
        to: &'a Self,
    ) -> Wait<impl CallUntil<Output = Result<(S, MigrationReport), TransferError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            let kind: Kind = |counts| &mut counts.replicated;
            match deadline {
                Some(_) => self.replicate_settled(sequence, to, deadline, kind).await,
                None => self.replicate_as(sequence, to, kind).await,
            }
        })
    }

    async fn replicate_as<S: AnySequence>(
        &self,
        sequence: &S,
        to: &Self,
        kind: Kind,
    ) -> Result<(S, MigrationReport), TransferError> {
        let copied = async {
            let mut copy = SequenceCopy::begin(self.route_to(to)?, sequence, ResumeOptions::new())?;
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

    /// Waits only if the copy fails because of a batch in flight; other errors are immediate.
    pub(super) async fn replicate_settled<S: AnySequence>(
        &self,
        sequence: &S,
        to: &Self,
        deadline: Option<Instant>,
        kind: Kind,
    ) -> Result<(S, MigrationReport), TransferError> {
        loop {
            let refused = match self.replicate_as(sequence, to, kind).await {
                Err(error @ TransferError::BeingWritten { .. }) => error,
                outcome => return outcome,
            };
            self.wait_for_writers(sequence, deadline, refused).await?;
        }
    }

    async fn wait_for_writers<S: AnySequence>(
        &self,
        sequence: &S,
        deadline: Option<Instant>,
        refused: TransferError,
    ) -> Result<(), TransferError> {
        // While borrowed here, the sequence gets no further writers: one wait for those of each list
        // and state is enough, unless the copy failed because of a batch that was just beginning.
        for writers in sequence.lists().writers() {
            match self.settled_by(writers).until(deadline).await {
                Ok(()) => {}
                Err(SettleError::Deadline { batch }) => {
                    return Err(TransferError::BeingWritten { id: sequence.id(), batch });
                }
                Err(_) => return Err(refused),
            }
        }
        Ok(())
    }

    /// Moves up to `blocks_max` evictable blocks to another pool's prefix cache.
    ///
    /// Copies blocks in the order of eviction, of all groups of layers and of checkpoints, then
    /// evicts them here; one that is hit meanwhile stays. Both pools must have the same groups, and
    /// use the same [hashing and key](crate::prefix::PrefixConfig). The
    /// other pool evicts its own coldest blocks to make room; if that is not enough, fewer blocks
    /// move. Blocks being offloaded cannot be evicted: choose a small `blocks_max` if other threads
    /// allocate here.
    ///
    /// A hash identifies the tokens of a block, but neither the model nor the tensor-parallel rank.
    /// Pools that offload to the same pool need different [salts](PrefixKeys::salt), unless their
    /// bytes are identical.
    ///
    /// If the future is dropped, the offload either completes or leaves all blocks in place. To
    /// [clear](Self::clear_prefix_cache) both caches during an offload, clear this pool's first.
    /// Blocks computed in the other pool before it was cleared stay here, and count as
    /// [stale](OffloadReport::stale_blocks).
    ///
    /// # Errors
    /// [`TransferError::Invalid`] if both pools are the same, their caches hash differently, or
    /// their layers are in other groups, [`TransferError::NoStorage`], [`TransferError::NoCache`],
    /// [`TransferError::Alloc`] if there is no room or `blocks_max` is zero,
    /// [`TransferError::Storage`]. The blocks stay in place.
    pub async fn offload(&self, to: &Self, blocks_max: usize) -> Result<OffloadReport, TransferError> {
        self.offloading(async { migrate::offload(self.route_to(to)?, blocks_max).await }).await
    }

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
    /// [sequence](Self::sequence) opened with these tokens finds them; if there is less room, only
    /// the leading ones. Stops at blocks computed here before this cache was cleared, which count
    /// as [stale](BringBackReport::stale_blocks).
    ///
    /// With several groups of layers, or a window, copies what an [admission](Self::admit_grouped)
    /// of these tokens needs at the longest boundary that both pools together have: of each group
    /// all blocks, or those of its window and sinks, and a checkpoint of each state. A group alone
    /// is no hit.
    ///
    /// If the future is dropped, the copy either
    /// completes or has no effect. Errors are those of [`offload`](Self::offload), and
    /// [`TransferError::Invalid`] for invalid keys.
    pub async fn bring_back(
        &self,
        from: &Self,
        keys: &PrefixKeys<'_>,
        tokens: &[u32],
    ) -> Result<BringBackReport, TransferError> {
        self.bringing_back(async { migrate::bring_back(from.route_to(self)?, keys, tokens).await }).await
    }

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

use crate::block::Class;
use crate::error::TransferError;
use crate::migrate::{Kind, MigrationReport};
use crate::sequence::{AnySequence, ResumeOptions};

use super::Pool;
use super::wait::{CallUntil, Wait};

impl Pool {
    /// Copies a [swapped](super::Preempt::Swap) sequence back to this pool, and waits if necessary
    /// for all of its blocks: those of its tokens, shared where they are cached here, and further
    /// ones as the options say. In models, whose pools have no storage, it is refused.
    ///
    /// Waits in the queue of [`allocate_async`](Self::allocate_async) at the sequence's priority
    /// like an admission, not like a growing sequence as [`migrate`](Self::migrate) does: the
    /// sequences for which it was preempted come first. If these do not wait in the queue,
    /// [leave](ResumeOptions::leave) blocks for them. Holds no block here while it waits.
    ///
    /// `swapped` stays open and unchanged. Drop it after the call has succeeded: until then its
    /// blocks stay in use in its pool.
    ///
    /// # Errors
    /// [`TransferError::Alloc`] if there is no room at the deadline of [`Wait::until`], or never
    /// can be; [`TransferError::ForeignSequence`] if all handles of the sequence's pool were
    /// dropped, [`SequenceError::Tenant`](crate::SequenceError::Tenant) if the pool has tenants, but not
    /// that of the sequence, and those of [`replicate`](Self::replicate).
    pub fn resume<'a, S: AnySequence>(
        &'a self,
        swapped: &'a S,
        options: ResumeOptions,
    ) -> Wait<impl CallUntil<Output = Result<(S, MigrationReport), TransferError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            let (id, first) = (swapped.id(), swapped.lists().first());
            let pool = first.pool_tag();
            let from = first.pool().ok_or(TransferError::ForeignSequence { id, pool })?;
            let resumed = from.copy_to(swapped, self, (Class::Admission, options), deadline);
            let resumed = traced!("kvpool.resume", resumed).await;
            let kind: Kind = |counts| &mut counts.swapped_in;
            from.0.migrations().ended(resumed.as_ref().map(|(_, report)| (&report.carried, 0)), kind);
            resumed
        })
    }
}

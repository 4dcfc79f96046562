//! The way back of a swapped sequence.

use crate::block::Class;
use crate::error::TransferError;
use crate::migrate::{Kind, MigrationReport};
use crate::sequence::{ResumeOptions, Sequence};

use super::Pool;
use super::wait::{CallUntil, Wait};

impl Pool {
    /// Copies a [swapped](super::Preempt::Swap) sequence back to this pool, and waits for its blocks
    /// if necessary: those of its tokens, which it shares where they are cached here, and further
    /// ones as the options say. It gets all of them or none.
    ///
    /// Waits in the line of [`allocate_async`](Self::allocate_async) at the sequence's priority, as
    /// an admission, and not as a running sequence, as [`migrate`](Self::migrate) does: the
    /// sequences for which it was preempted come first. If these do not wait in the queue,
    /// [leave](ResumeOptions::leave) blocks to them. Holds no block here while it waits.
    ///
    /// `swapped` stays open in its pool, and unchanged. Drop it after the call has succeeded: until
    /// then its blocks stay in use there. Dropping the future has no further effect.
    ///
    /// In models, whose pools have no storage, it is refused.
    ///
    /// # Errors
    ///
    /// [`TransferError::Alloc`] with [`AllocError::Deadline`](crate::AllocError::Deadline) if there
    /// is no room at the deadline of [`Wait::until`], or with
    /// [`AllocError::TooLarge`](crate::AllocError::TooLarge) if there never is;
    /// [`TransferError::ForeignSequence`] if all handles of the sequence's pool were dropped, and
    /// those of [`replicate`](Self::replicate).
    pub fn resume<'a>(
        &'a self,
        swapped: &'a Sequence,
        options: ResumeOptions,
    ) -> Wait<impl CallUntil<Output = Result<(Sequence, MigrationReport), TransferError>, Future: Send>> {
        Wait::new(move |deadline| async move {
            let (id, pool) = (swapped.id(), swapped.pool_tag());
            let from = swapped.pool().ok_or(TransferError::ForeignSequence { id, pool })?;
            let resumed = from.copy_to(swapped, self, (Class::Admission, options), deadline);
            let resumed = traced!("kvpool.resume", resumed).await;
            let kind: Kind = |counts| &mut counts.swapped_in;
            from.0.migrations().ended(resumed.as_ref().map(|(_, report)| (&report.carried, 0)), kind);
            resumed
        })
    }
}

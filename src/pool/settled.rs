//! Futures that wait for batches to end: those that write a sequence, or all up to a ticket. The
//! clock implements the wait itself. Independent of the runtime.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use crate::block::BatchesEnd;
use crate::clock::BatchSet;
use crate::error::SettleError;
use crate::ids::Ticket;
use crate::sequence::Sequence;
use crate::sync::call;
use crate::sync::runtime::timeout_at;

use super::Pool;

/// Completes when the batches that it was created for have ended. It borrows neither the sequence
/// nor the pool, and keeps the pool's bookkeeping alive, but neither the bytes nor the [`Pool`].
#[must_use = "futures do nothing unless they are polled"]
pub struct Settled(Result<BatchesEnd, SettleError>);

impl Pool {
    /// Waits until every batch that has written to the sequence so far has ended.
    ///
    /// Its bytes are then complete: it can be [migrated](Self::migrate), and its full blocks of
    /// final tokens can be sealed and cached. If more than three batches in flight write the
    /// sequence, waits for all batches up to the oldest of these. A task must not await this while
    /// it holds such a batch itself.
    ///
    /// ```
    /// # use kvpool::{SequenceId, Pool, storage::KvLayout};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
    /// let mut sequence = pool.sequence(SequenceId(7)).open()?;
    /// let mut batch = pool.begin_batch();
    /// batch.append(&mut sequence, 42)?;
    /// let settled = pool.settled(&sequence);
    /// let (settled, ()) = tokio::join!(settled, async { batch.finish() });
    /// settled?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Fails with [`SettleError::ForeignSequence`] only.
    pub fn settled(&self, sequence: &Sequence) -> Settled {
        if !self.owns(sequence) {
            let (id, pool) = (sequence.id(), self.tag());
            return Settled(Err(SettleError::ForeignSequence { id, pool }));
        }
        self.settled_by(sequence.writers())
    }

    /// Waits until these batches of this pool have ended. Never fails.
    pub(super) fn settled_by(&self, batches: BatchSet) -> Settled {
        Settled(Ok(self.blocks().batches_end(batches)))
    }

    /// Waits until the batch with this ticket, and every earlier one, has ended, so that none of
    /// their kernels accesses a block. Fails with [`SettleError::NotBegun`] only.
    pub fn settled_up_to(&self, ticket: Ticket) -> Settled {
        // Acquire, inside: the wait sees the slot of every batch up to the ticket.
        let newest = self.blocks().clock().read().newest();
        if ticket > newest {
            return Settled(Err(SettleError::NotBegun { ticket, newest }));
        }
        let mut batches = BatchSet::default();
        batches.add_up_to(ticket);
        self.settled_by(batches)
    }
}

impl Settled {
    /// Waits like the future itself, but at most until the deadline, if any
    /// ([`SettleError::Deadline`]). Checks at least once. Panics if it has to wait in a tokio
    /// runtime whose timer is disabled.
    pub async fn until(mut self, deadline: impl Into<Option<Instant>>) -> Result<(), SettleError> {
        let Some(deadline) = deadline.into() else { return self.await };
        if let Some(outcome) = timeout_at(deadline, &mut self).await {
            return outcome;
        }
        match self.0?.in_flight() {
            Some(batch) => Err(SettleError::Deadline { batch }),
            // It has just ended.
            None => Ok(()),
        }
    }
}

impl Future for Settled {
    type Output = Result<(), SettleError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let _call = call();
        match &mut self.0 {
            Ok(end) => Pin::new(end).poll(context).map(Ok),
            Err(error) => Poll::Ready(Err(*error)),
        }
    }
}

impl std::fmt::Debug for Settled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let waits_for = self.0.as_ref().map(BatchesEnd::in_flight);
        f.debug_tuple("Settled").field(&waits_for).finish()
    }
}

const _: () = {
    const fn sent<T: Send + 'static>() {}
    sent::<Settled>();
};

use thiserror::Error;

use crate::ids::{PoolTag, SequenceId, Ticket};

/// Reason why a wait for the end of batches failed. Nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum SettleError {
    /// The sequence does not belong to the pool.
    #[error("sequence {id} does not belong to pool {pool}")]
    ForeignSequence {
        /// Id of the sequence.
        id: SequenceId,
        /// The pool asked.
        pool: PoolTag,
    },
    /// No batch of the pool has this ticket yet.
    #[error("batch {ticket} has not begun; the newest is {newest}")]
    NotBegun {
        /// The ticket.
        ticket: Ticket,
        /// The newest ticket of the pool.
        newest: Ticket,
    },
    /// The deadline passed first.
    #[error("batch {batch} was still in flight at the deadline")]
    Deadline {
        /// The newest of the batches that the call waited for and that is in flight.
        batch: Ticket,
    },
}

//! Preemption by a swap to a host pool, and the way back.

use std::time::{Duration, Instant};

use kvpool::{Pool, Preempt, ResumeOptions, Sequence, TransferError};
use tokio::runtime::Handle;

use crate::error::EngineError;

/// The host pool, and when to use it.
pub struct Swap {
    /// Holds the swapped sequences. Its prefix cache has the key of the pool's.
    pub host: Pool,
    /// Shorter sequences are computed again: that takes less time than to copy them twice.
    pub tokens_min: usize,
    /// Has a timer. Workers wait on it for swaps, and copy the bytes themselves.
    pub runtime: Handle,
}

/// How long a swap waits for the batches that write the sequence.
const PATIENCE: Duration = Duration::from_millis(20);

/// What became of a sequence that was to be swapped out.
pub enum SwapOut {
    /// It is in the host pool.
    Swapped(Box<Sequence>),
    /// It is closed: the host pool had too few blocks.
    Full,
    /// It is closed: a batch wrote it for longer than a swap waits.
    Refused,
}

impl Swap {
    /// Moves a sequence to the host pool, or closes it.
    ///
    /// # Errors
    ///
    /// [`TransferError`], other than a lack of blocks and batches in flight.
    pub fn swap_out(&self, pool: &Pool, sequence: Sequence) -> Result<SwapOut, EngineError> {
        let swap = pool.preempt(sequence, Preempt::Swap(&self.host)).until(Instant::now() + PATIENCE);
        match self.runtime.block_on(swap) {
            Ok(preempted) => Ok(preempted
                .swapped
                .map_or(SwapOut::Full, |swapped| SwapOut::Swapped(Box::new(swapped.sequence)))),
            Err(refused) => match refused.error {
                TransferError::Alloc(_) => Ok(SwapOut::Full),
                TransferError::BeingWritten { .. } => Ok(SwapOut::Refused),
                error => Err(error.into()),
            },
        }
    }

    /// Copies a swapped sequence back, with blocks for `headroom` more tokens. None: there is no
    /// room for it yet.
    ///
    /// # Errors
    ///
    /// [`TransferError`], other than a lack of room.
    pub fn swap_in(
        &self,
        pool: &Pool,
        parked: &Sequence,
        headroom: usize,
    ) -> Result<Option<Sequence>, EngineError> {
        // No wait in the queue: this worker would hold the blocks of its other sequences meanwhile.
        let now = pool.resume(parked, ResumeOptions::new().headroom(headroom)).until(Instant::now());
        match self.runtime.block_on(now) {
            Ok((sequence, _)) => Ok(Some(sequence)),
            Err(TransferError::Alloc(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

//! Preemption: by a swap to a host pool, or by computing the sequence again.

use std::time::{Duration, Instant};

use kvpool::{Pool, Sequence, Target, TransferError};

use crate::error::EngineError;

/// The host pool, and when to use it.
pub struct Swap {
    /// Holds the swapped sequences. Its prefix cache has the key of the pool's.
    pub host: Pool,
    /// Shorter sequences are computed again: that takes less time than to copy them twice.
    pub tokens_min: usize,
}

/// How long a swap waits for batches in flight before the sequence is computed again instead.
const PATIENCE: Duration = Duration::from_millis(20);

/// What became of a preempted sequence.
pub enum Preempted {
    /// It is in the host pool.
    Swapped(Sequence),
    /// It is closed, and its full blocks are cached until their frames are needed.
    Recompute,
}

/// Frees the blocks of a sequence. Also returns whether a swap was refused at first.
///
/// # Errors
///
/// [`TransferError`], other than a lack of room and batches in flight.
pub fn preempt(
    pool: &Pool,
    mut sequence: Sequence,
    swap: Option<&Swap>,
) -> Result<(Preempted, bool), EngineError> {
    let computed = sequence.committed();
    // A cut within the announced prompt would leave the tokens behind it unknown to the prefix cache.
    let is_prefilled = sequence.announced() <= computed;
    let Some(swap) = swap.filter(|swap| is_prefilled && computed >= swap.tokens_min) else {
        return Ok((Preempted::Recompute, false));
    };
    sequence.truncate(computed)?; // The room behind the computed tokens is not copied.
    let (began, mut was_refused) = (Instant::now(), false);
    loop {
        match block_on(pool.migrate(sequence, Target::Device(&swap.host))) {
            Ok((swapped, _)) => return Ok((Preempted::Swapped(swapped), was_refused)),
            Err(refused) => match refused.error {
                // An older batch of another worker is in flight, which may write to any sequence.
                TransferError::BeingWritten { .. } if began.elapsed() < PATIENCE => {
                    was_refused = true;
                    std::thread::sleep(Duration::from_micros(100));
                    sequence = *refused.sequence;
                }
                TransferError::BeingWritten { .. } | TransferError::Alloc(_) => {
                    return Ok((Preempted::Recompute, was_refused));
                }
                error => return Err(error.into()),
            },
        }
    }
}

/// Moves a swapped sequence back. `Ok(Err)`: there is no room for it yet.
///
/// # Errors
///
/// [`TransferError`], other than a lack of room.
pub fn swap_in(
    pool: &Pool,
    swap: &Swap,
    parked: Sequence,
) -> Result<Result<Sequence, Sequence>, EngineError> {
    match block_on(swap.host.migrate(parked, Target::Device(pool))) {
        Ok((sequence, _)) => Ok(Ok(sequence)),
        Err(refused) => match refused.error {
            TransferError::Alloc(_) => Ok(Err(*refused.sequence)),
            error => Err(error.into()),
        },
    }
}

/// Runs a future on this thread, which then copies the bytes itself.
fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(std::sync::Arc::new(Unpark(std::thread::current())));
    let (mut future, mut context) = (std::pin::pin!(future), std::task::Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(output) => return output,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

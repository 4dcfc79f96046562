//! Steps of an engine.

use std::thread;
use std::time::{Duration, Instant};

use kvpool::{AllocError, Batch, Pool, Sequence, SequenceError, Tokens};

/// Appends tokens to a sequence in a batch of their own, which finishes.
pub fn append<'a>(pool: &Pool, sequence: &mut Sequence, tokens: impl Into<Tokens<'a>>) {
    let mut batch = pool.begin_batch();
    batch.append(sequence, tokens).expect("blocks are free, and the tokens known");
    batch.finish();
}

/// Begins a batch with an append on one of several threads, and again while older batches may see
/// what could be reused.
///
/// A busy system stops a thread between two instructions of its batch, and another one serves the
/// whole pool over meanwhile. If each waited with its own batch open, none would go on.
///
/// # Panics
///
/// If the append is refused otherwise, or for a minute.
pub fn begin_with<T>(
    pool: &Pool,
    mut append: impl FnMut(&mut Batch) -> Result<T, SequenceError>,
) -> (Batch, T) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let mut batch = pool.begin_batch();
        match append(&mut batch) {
            Err(SequenceError::Alloc(AllocError::Exhausted { oldest_batch: Some(_), .. }))
                if Instant::now() < deadline =>
            {
                batch.finish();
                thread::yield_now();
            }
            outcome => return (batch, outcome.unwrap()),
        }
    }
}

/// The refusal of a request in a pool in which all other blocks are owned, and no batch is in flight.
pub fn exhausted(asked: usize, free: usize) -> AllocError {
    AllocError::Exhausted {
        asked,
        free,
        retired: 0,
        evictable: 0,
        held: 0,
        in_transfer: 0,
        oldest_batch: None,
    }
}

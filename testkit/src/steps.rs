//! Steps of an engine.

use kvpool::{AllocError, Pool, Sequence, Tokens};

/// Appends tokens to a sequence in a batch of their own, which finishes.
pub fn append<'a>(pool: &Pool, sequence: &mut Sequence, tokens: impl Into<Tokens<'a>>) {
    let mut batch = pool.begin_batch();
    batch.append(sequence, tokens).expect("blocks are free, and the tokens known");
    batch.finish();
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

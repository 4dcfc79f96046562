//! Admission to the pool: a sequence with its cached prefix, and with blocks for its whole prompt.
//!
//! An admission reserves the blocks of all tokens, and of some decode steps: it is granted as a
//! whole, or nothing is taken. No append of a granted prompt can fail for lack of blocks.

use kvpool::{AdmitRequest, AllocError, Pool, Priority, Retry, Sequence, SequenceError};

use crate::cache::Candidate;
use crate::error::EngineError;

/// Admits a sequence. None: there are too few blocks.
///
/// Blocks are also reserved for `headroom` tokens to decode, so that a sequence is not preempted by
/// its first decode steps.
///
/// # Errors
///
/// Errors other than a lack of blocks.
pub fn admit(
    pool: &Pool,
    candidate: Candidate<'_>,
    headroom: usize,
) -> Result<Option<Sequence>, EngineError> {
    let priority = if candidate.is_urgent { Priority::Urgent } else { Priority::Normal };
    let request = AdmitRequest::new(candidate.id, candidate.tokens).priority(priority);
    match pool.admit(&request.headroom(headroom)) {
        Ok(sequence) => Ok(Some(sequence)),
        Err(error) if is_lack(&error) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Tells a lack of blocks, which passes, from other errors.
pub(crate) fn is_lack(error: &SequenceError) -> bool {
    // A pool that shrinks, and is too small meanwhile, grows again.
    let shrinks =
        matches!(error, SequenceError::Alloc(AllocError::Reserved { .. } | AllocError::TooLarge { .. }));
    error.retry() != Retry::Never || shrinks
}

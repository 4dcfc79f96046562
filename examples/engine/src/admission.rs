//! Admission to the pool: a sequence with its cached prefix, and with blocks for its whole prompt.
//!
//! An admission reserves the blocks of all tokens, and of some decode steps: it is granted as a
//! whole, or nothing is taken. No append of a granted prompt can fail for lack of blocks.

use kvpool::{AdmitRequest, AllocError, Pool, Priority, Retry, Sequence, SequenceError};

use crate::cache::{Admission, Candidate};
use crate::error::EngineError;

/// Admits a sequence, or reserves blocks for one that was preempted and has been moved back.
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
    parked: Option<Sequence>,
    headroom: usize,
) -> Result<Admission<Sequence, Sequence>, EngineError> {
    let Candidate { id, is_urgent, tokens, tokens_max } = candidate;
    // The last token is chosen, and never computed.
    let behind = headroom.min(tokens_max - 1 - tokens.len());
    let admitted = match parked {
        Some(mut parked) => {
            let more = tokens.len() + behind - parked.len();
            parked.reserve(more).map(|()| parked)
        }
        None => {
            let priority = if is_urgent { Priority::Urgent } else { Priority::Normal };
            pool.admit(&AdmitRequest::new(id, tokens).priority(priority).headroom(behind))
        }
    };
    match admitted {
        Ok(sequence) => Ok(Admission::Granted(sequence)),
        // One that was moved back closes, and is computed again, from the prefix cache at best.
        Err(error) if is_lack(&error) => Ok(Admission::Lacking(None)),
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

//! Admission to the pool: a sequence that has room for its whole prompt.
//!
//! An admission takes the room of all tokens, and of some decode steps, in one allocation: it is
//! granted as a whole, or nothing is taken. No append of a granted prompt can fail afterwards.

use kvpool::{Pool, Priority, Sequence};

use crate::cache::{Admission, Candidate, Room};
use crate::error::EngineError;
use crate::paged::{PagedSequence, announce, room};

/// Admits a sequence: opens it with its cached prefix, and takes room for the rest.
///
/// `parked` is the sequence itself if it has been preempted and moved back. Room is also taken for
/// `headroom` tokens to decode, so that a sequence is not preempted by its first decode steps.
///
/// # Errors
///
/// Errors other than a lack of blocks.
pub fn admit(
    pool: &Pool,
    candidate: Candidate<'_>,
    parked: Option<Sequence>,
    headroom: usize,
) -> Result<Admission<PagedSequence, Sequence>, EngineError> {
    let Candidate { id, is_urgent, tokens, tokens_max } = candidate;
    let mut sequence = match parked {
        Some(parked) => parked,
        None => {
            let priority = if is_urgent { Priority::Urgent } else { Priority::Normal };
            match pool.sequence(id).priority(priority).tokens(tokens) {
                Ok(sequence) => sequence,
                // The pool is smaller than the prompt while it shrinks.
                Err(kvpool::SequenceError::Alloc(kvpool::AllocError::TooLarge { .. })) => {
                    return Ok(Admission::Lacking(None));
                }
                Err(error) => return Err(error.into()),
            }
        }
    };
    announce(pool, &mut sequence, tokens)?;
    // The last token is chosen, and never computed.
    let reserved = (tokens.len() + headroom).min(tokens_max - 1).max(sequence.len());
    if sequence.len() < reserved {
        let mut batch = pool.begin_batch();
        let more = reserved - sequence.len();
        if room(batch.draft(&mut sequence, more))? == Room::Lacking {
            batch.finish();
            // A sequence that was moved back is computed again, from the prefix cache at best.
            return Ok(Admission::Lacking(None));
        }
    }
    Ok(Admission::Granted(PagedSequence { sequence, reserved }))
}

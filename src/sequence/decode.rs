//! A decode step: one token for each of many sequences, or for none of them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{AllocError, DecodeError, SequenceError};
use crate::ids::SequenceId;

use super::batch::{Appended, Batch, Copied};
use super::sequence::Sequence;

/// Result of a decode step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Decoded {
    /// Number of blocks taken, from reservations or allocated, including copies.
    pub new_blocks: usize,
    /// The copies on write, with the place of the sequence in the step.
    pub copied: Vec<(usize, Copied)>,
}

impl Batch {
    /// Appends final tokens until the sequence has `total` of them. Does nothing if it has already.
    ///
    /// # Errors
    ///
    /// As for [`append`](Self::append).
    pub fn append_to(&mut self, sequence: &mut Sequence, total: usize) -> Result<Appended, SequenceError> {
        let length = sequence.len();
        match total.saturating_sub(length) {
            0 => {
                sequence.check_in(&self.step.sequences)?;
                Ok(Appended { tokens: length..length, new_blocks: 0, copied: None })
            }
            more => self.append(sequence, more),
        }
    }

    /// Appends one final token, whose id is unknown, to each of these sequences.
    ///
    /// As [`append`](Self::append) for each of them, except that either all sequences get their
    /// token or none does. Each block that is missing is reserved before the first token is
    /// appended, so that the caller can choose which sequences to preempt while all are unchanged.
    /// Then the copies on write are made, and then the tokens appended.
    ///
    /// # Errors
    ///
    /// [`DecodeError::Lacking`] names the sequences for which no block was found, in the order of
    /// the step; [`DecodeError::Sequence`] for another error. No sequence has changed, except that
    /// if a copy on write failed, those made before it stay, in blocks that may have been reserved.
    ///
    /// # Panics
    ///
    /// If the storage panics during a copy; then as after an error.
    pub fn decode(&mut self, sequences: &mut [&mut Sequence]) -> Result<Decoded, DecodeError> {
        self.decode_with(sequences, |_, _| Ok(()), |batch, sequence, _| batch.append(sequence, 1))
    }

    /// Appends one final token to each of these sequences and announces its id, as
    /// [`append_tokens`](Self::append_tokens) does.
    ///
    /// # Errors
    ///
    /// As for [`decode`](Self::decode); [`DecodeError::Tokens`] if there are more or fewer tokens
    /// than sequences.
    pub fn decode_tokens(
        &mut self,
        sequences: &mut [&mut Sequence],
        tokens: &[u32],
    ) -> Result<Decoded, DecodeError> {
        if sequences.len() != tokens.len() {
            return Err(DecodeError::Tokens { sequences: sequences.len(), tokens: tokens.len() });
        }
        self.decode_with(sequences, Self::check_announced, |batch, sequence, place| {
            batch.append_tokens(sequence, &[tokens[place]])
        })
    }

    fn decode_with(
        &mut self,
        sequences: &mut [&mut Sequence],
        check: impl Fn(&Self, &Sequence) -> Result<(), SequenceError>,
        mut append: impl FnMut(&mut Self, &mut Sequence, usize) -> Result<Appended, SequenceError>,
    ) -> Result<Decoded, DecodeError> {
        for sequence in sequences.iter() {
            check(self, sequence).map_err(|error| DecodeError::Sequence { id: sequence.id(), error })?;
        }
        let reserved = self.reserve_step(sequences)?;
        let copied = match catch_unwind(AssertUnwindSafe(|| self.open_tails(sequences))) {
            Ok(Ok(copied)) => copied,
            Ok(Err(error)) => {
                Self::unreserve(sequences, &reserved);
                return Err(error);
            }
            Err(panic) => {
                Self::unreserve(sequences, &reserved);
                resume_unwind(panic);
            }
        };
        let mut decoded = Decoded { new_blocks: copied.len(), copied };
        // There are blocks for all of them, and nothing to copy.
        for place in 0..sequences.len() {
            match append(self, sequences[place], place) {
                Ok(Appended { new_blocks, .. }) => decoded.new_blocks += new_blocks,
                Err(error) => {
                    let id = sequences[place].id();
                    for sequence in &mut sequences[..place] {
                        let length = sequence.len() - 1;
                        // Shorter than it is.
                        let _ = sequence.truncate(length);
                    }
                    return Err(DecodeError::Sequence { id, error });
                }
            }
        }
        // Blocks for copies that were not necessary after all.
        Self::unreserve(sequences, &reserved);
        Ok(decoded)
    }

    /// Makes the last blocks writable in place, and returns the copies.
    fn open_tails(&mut self, sequences: &mut [&mut Sequence]) -> Result<Vec<(usize, Copied)>, DecodeError> {
        let mut copies = Vec::new();
        for (place, sequence) in sequences.iter_mut().enumerate() {
            let copied = self.open_tail(sequence);
            let copied = copied.map_err(|error| DecodeError::Sequence { id: sequence.id(), error })?;
            copies.extend(copied.map(|copied| (place, copied)));
        }
        Ok(copies)
    }

    /// Reserves the blocks for one token of each sequence, or for none. Returns the places of the
    /// sequences that had no reserved block, with the number of those reserved now.
    fn reserve_step(&mut self, sequences: &mut [&mut Sequence]) -> Result<Vec<(usize, usize)>, DecodeError> {
        let mut lacking = Vec::<SequenceId>::new();
        let mut reserved = Vec::new();
        let mut refusal: Option<AllocError> = None;
        for (place, sequence) in sequences.iter_mut().enumerate() {
            let id = sequence.id();
            let wrong = |error| DecodeError::Sequence { id, error };
            let checked = sequence.check_in(&self.step.sequences).and_then(|()| sequence.reservation(1));
            let outcome = match checked.map_err(wrong) {
                Ok(None) => continue,
                // Once the pool has refused a block, the rest of the step lacks its own too.
                Ok(Some(_)) if refusal.is_some() => {
                    lacking.push(id);
                    continue;
                }
                Ok(Some(request)) => sequence.reserve(1).map(|()| request.blocks).map_err(wrong),
                Err(error) => Err(error),
            };
            match outcome {
                Ok(blocks) => reserved.push((place, blocks)),
                Err(DecodeError::Sequence {
                    error:
                        SequenceError::Alloc(error @ (AllocError::Exhausted { .. } | AllocError::Behind { .. })),
                    ..
                }) => {
                    refusal = Some(error);
                    lacking.push(id);
                }
                Err(error) => {
                    Self::unreserve(sequences, &reserved);
                    return Err(error);
                }
            }
        }
        let Some(error) = refusal else { return Ok(reserved) };
        Self::unreserve(sequences, &reserved);
        Err(DecodeError::Lacking { sequences: lacking, error })
    }

    /// Releases those of the blocks reserved for this step that were not used. The sequences had no
    /// others.
    fn unreserve(sequences: &mut [&mut Sequence], reserved: &[(usize, usize)]) {
        for &(place, blocks) in reserved.iter().rev() {
            let unused = blocks.min(sequences[place].reserved.len());
            if unused > 0 {
                sequences[place].release_last_reserved(unused);
            }
        }
    }
}

//! A decode step: one token for each of many sequences, or for none of them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{AllocError, DecodeError, SequenceError};
use crate::ids::SequenceId;

use super::batch::{Appended, Batch, Copied};
use super::plan::Growth;
use super::sequence::{Access, Sequence};

/// Result of a decode step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Decoded {
    /// Number of blocks taken, from reservations or allocated, including copies.
    pub new_blocks: usize,
    /// The copies on write, with the place of the sequence in the step.
    pub copied: Vec<(usize, Copied)>,
}

/// The plan for a sequence of the step whose last block cannot take the token as it is.
struct Planned {
    /// Its place in the step.
    place: usize,
    growth: Growth,
    /// Blocks reserved for this step. The sequence had no others.
    reserved: usize,
}

impl Batch {
    /// Appends final tokens until the sequence has `total` of them. Does nothing if it has already.
    ///
    /// # Errors
    ///
    /// As for [`append`](Self::append).
    pub fn append_to(&mut self, sequence: &mut Sequence, total: usize) -> Result<Appended, SequenceError> {
        sequence.catch_up();
        let length = sequence.list.tokens() as usize;
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
        self.decode_with(sequences, None)
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
        self.decode_with(sequences, Some(tokens))
    }

    fn decode_with(
        &mut self,
        sequences: &mut [&mut Sequence],
        tokens: Option<&[u32]>,
    ) -> Result<Decoded, DecodeError> {
        let planned = self.plan_step(sequences, tokens.is_some())?;
        let copied = match catch_unwind(AssertUnwindSafe(|| self.open_tails(sequences, &planned))) {
            Ok(Ok(copied)) => copied,
            Ok(Err(error)) => {
                Self::unreserve(sequences, &planned);
                return Err(error);
            }
            Err(panic) => {
                Self::unreserve(sequences, &planned);
                resume_unwind(panic);
            }
        };
        let mut decoded = Decoded { new_blocks: copied.len(), copied };
        let mut fresh = planned.iter().filter(|planned| planned.growth.fresh > 0).peekable();
        for place in 0..sequences.len() {
            let ids = tokens.map(|tokens| &tokens[place..=place]);
            let sequence = &mut *sequences[place];
            let Some(Planned { growth, .. }) = fresh.next_if(|planned| planned.place == place) else {
                self.append_one_in_place(sequence, ids);
                continue;
            };
            // There is a block for it.
            match self.append_to_list(sequence, growth, None, ids) {
                Ok(Appended { new_blocks, .. }) => decoded.new_blocks += new_blocks,
                Err(error) => {
                    let id = sequence.id();
                    Self::undo(&mut sequences[..place]);
                    Self::unreserve(sequences, &planned);
                    return Err(DecodeError::Sequence { id, error });
                }
            }
        }
        // Blocks for copies that were not necessary after all.
        Self::unreserve(sequences, &planned);
        Ok(decoded)
    }

    /// Appends a token to the last block, which is open and has room.
    #[inline]
    fn append_one_in_place(&mut self, sequence: &mut Sequence, ids: Option<&[u32]>) {
        let (length, blocks) = (sequence.list.tokens(), sequence.list.len() as u32);
        let growth = Growth::within_last(length, blocks, 1, self.step.sequences.0.block_tokens);
        let growth = growth.unwrap_or_else(|| unreachable!("{sequence:?} was planned to grow in place"));
        debug_assert!(self.find_room(sequence, &growth).is_ok(), "{sequence:?} is not open at its end");
        self.append_in_place(sequence, &growth, ids);
    }

    /// Removes the token that each of these sequences got.
    fn undo(sequences: &mut [&mut Sequence]) {
        for sequence in sequences {
            // With the extra keys of the tokens to come, which the caller has not taken back.
            sequence.take_back(sequence.list.tokens() as usize - 1, usize::MAX);
        }
    }

    /// Makes the last blocks writable in place, and returns the copies.
    fn open_tails(
        &mut self,
        sequences: &mut [&mut Sequence],
        planned: &[Planned],
    ) -> Result<Vec<(usize, Copied)>, DecodeError> {
        let mut copies = Vec::new();
        for &Planned { place, ref growth, .. } in planned {
            let copied = self.open_tail(sequences[place], growth);
            let id = sequences[place].id();
            let copied = copied.map_err(|error| DecodeError::Sequence { id, error })?;
            copies.extend(copied.map(|copied| (place, copied)));
        }
        Ok(copies)
    }

    /// Plans one token for each sequence, and reserves the blocks that are lacking, or none.
    /// Returns the plans for the sequences whose last block cannot take the token as it is; the last
    /// blocks of all others are open, and stay so: no other sequence has them.
    fn plan_step(
        &mut self,
        sequences: &mut [&mut Sequence],
        is_announced: bool,
    ) -> Result<Vec<Planned>, DecodeError> {
        let mut step = Vec::new();
        let mut lacking = Vec::<SequenceId>::new();
        let mut refusal: Option<AllocError> = None;
        for place in 0..sequences.len() {
            let sequence = &mut *sequences[place];
            let error = match self.plan_one(sequence, is_announced) {
                Ok(None) => continue,
                Ok(Some((growth, needed))) => match self.provide(sequence, needed, refusal.as_ref()) {
                    Ok(reserved) => {
                        step.push(Planned { place, growth, reserved });
                        continue;
                    }
                    Err(error) => error.into(),
                },
                Err(error) => error,
            };
            let id = sequence.id();
            match error {
                SequenceError::Alloc(error @ (AllocError::Exhausted { .. } | AllocError::Behind { .. })) => {
                    refusal = Some(error);
                    lacking.push(id);
                }
                error => {
                    Self::unreserve(sequences, &step);
                    return Err(DecodeError::Sequence { id, error });
                }
            }
        }
        let Some(error) = refusal else { return Ok(step) };
        Self::unreserve(sequences, &step);
        Err(DecodeError::Lacking { sequences: lacking, error })
    }

    /// Plans a token for a sequence. Returns `None` if its last block takes it as it is, otherwise
    /// the plan and the number of blocks that it needs.
    #[inline]
    fn plan_one(
        &self,
        sequence: &mut Sequence,
        is_announced: bool,
    ) -> Result<Option<(Growth, usize)>, SequenceError> {
        sequence.catch_up();
        if is_announced {
            self.check_announced(sequence)?;
        }
        let growth = self.plan(sequence, 1)?;
        Ok(match self.find_room(sequence, &growth) {
            Ok(()) => None,
            // A block that is reopened needs none, but is copied if it moves at that moment.
            Err(tail) => {
                let copies = tail.is_some_and(|tail| tail.access != Access::Open);
                Some((growth, growth.fresh as usize + usize::from(copies)))
            }
        })
    }

    /// Reserves the blocks by which a sequence has fewer than `needed`, and returns their number.
    /// Once the pool has refused a block, the rest of the step lacks its own too.
    fn provide(
        &self,
        sequence: &mut Sequence,
        needed: usize,
        refused: Option<&AllocError>,
    ) -> Result<usize, AllocError> {
        match (sequence.lacking(needed)?, refused) {
            (None, _) => Ok(0),
            (Some(_), Some(&error)) => Err(error),
            (Some(request), None) => {
                sequence.allocate_reserved(&self.step.sequences.0.blocks, &request)?;
                Ok(request.blocks)
            }
        }
    }

    /// Releases those of the blocks reserved for this step that were not used.
    fn unreserve(sequences: &mut [&mut Sequence], planned: &[Planned]) {
        for &Planned { place, reserved, .. } in planned.iter().rev() {
            let unused = reserved.min(sequences[place].reserved.len());
            if unused > 0 {
                sequences[place].release_last_reserved(unused);
            }
        }
    }
}

//! The appends of a step: tokens for many sequences, or for none of them.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{AllocError, SequenceError, StepError};
use crate::ids::SequenceId;
use crate::sync::call;

use super::append::{Appended, Room};
use super::batch::Batch;
use super::grow::Copied;
use super::plan::Growth;
use super::sequence::{Access, Sequence};
use super::tokens::Tokens;

/// Tokens for one sequence of a [step](Batch::step).
#[derive(Debug)]
pub struct Append<'a, S = Sequence> {
    /// The sequence.
    pub sequence: &'a mut S,
    /// Its new tokens.
    pub tokens: Tokens<'a>,
}

impl<'a, S> Append<'a, S> {
    /// Appends these tokens to a sequence.
    pub fn new(sequence: &'a mut S, tokens: impl Into<Tokens<'a>>) -> Self {
        Self { sequence, tokens: tokens.into() }
    }
}

/// Result of a step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct Stepped {
    /// Number of blocks taken, from reservations or allocated, including copies.
    pub new_blocks: usize,
    /// The copies on write, with the place of the sequence in the step.
    pub copied: Vec<(usize, Copied)>,
}

/// A sequence whose last block cannot take the tokens as it is.
struct Planned {
    place: usize,
    growth: Growth,
    /// Blocks reserved for this step, in addition to the sequence's own.
    reserved: usize,
}

impl Batch {
    /// Appends tokens to many sequences (chunks of prompts, decoded tokens, drafts), all or none.
    ///
    /// All missing blocks are reserved before the first token is appended, so that the caller can
    /// choose which sequences to preempt while all are unchanged. Then the copies on write are
    /// made, and the tokens [appended](Self::append).
    ///
    /// ```
    /// use kvpool::{Append, KvLayout, Pool, SequenceId, Tokens};
    ///
    /// let pool = Pool::builder(KvLayout::named("tiny")?).blocks(100).build()?;
    /// let mut prompt = pool.sequence(SequenceId(1)).open()?;
    /// let mut decoding = pool.sequence(SequenceId(2)).open()?;
    /// let mut batch = pool.begin_batch();
    /// batch.step(&mut [Append::new(&mut prompt, 64), Append::new(&mut decoding, &[7])])?;
    /// batch.step(&mut [Append::new(&mut decoding, Tokens::Draft(4))])?;
    /// batch.finish();
    /// assert_eq!((prompt.len(), decoding.len()), (64, 5));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`StepError::Lacking`] names the sequences for which blocks were missing, in the order of
    /// the step; [`StepError::Sequence`] for another error. No sequence has changed, except that
    /// sealed last blocks may be open again, and that after a failed copy on write the earlier
    /// copies stay, in blocks that may have been reserved.
    ///
    /// # Panics
    /// If the storage panics during a copy; then as after an error.
    pub fn step(&mut self, appends: &mut [Append<'_>]) -> Result<Stepped, StepError> {
        let _call = call();
        let planned = self.plan_step(appends)?;
        let copied = match catch_unwind(AssertUnwindSafe(|| self.open_tails(appends, &planned))) {
            Ok(Ok(copied)) => copied,
            Ok(Err(error)) => {
                Self::unreserve(appends, &planned);
                return Err(error);
            }
            Err(panic) => {
                Self::unreserve(appends, &planned);
                resume_unwind(panic);
            }
        };
        let mut stepped = Stepped { new_blocks: copied.len(), copied };
        let mut fresh = planned.iter().filter(|planned| planned.growth.fresh > 0).peekable();
        for (place, Append { sequence, tokens }) in appends.iter_mut().enumerate() {
            let Some(Planned { growth, .. }) = fresh.next_if(|planned| planned.place == place) else {
                self.append_within_last(sequence, *tokens);
                continue;
            };
            stepped.new_blocks += self.append_reserved(sequence, growth, *tokens);
        }
        Self::unreserve(appends, &planned);
        Ok(stepped)
    }

    /// Appends tokens to the last block, which is open and has room, or no tokens.
    #[inline(always)]
    fn append_within_last(&mut self, sequence: &mut Sequence, tokens: Tokens<'_>) {
        if let Some(last) = sequence.takes_one(tokens) {
            // It was planned: all else that `Batch::takes_one` checks holds.
            return self.append_one(sequence, last, tokens);
        }
        let (length, blocks) = (sequence.list.tokens(), sequence.list.len() as u32);
        let count = tokens.count(sequence) as u32;
        if count == 0 {
            return;
        }
        let growth = Growth::within_last(length, blocks, count, sequence.kind.block_tokens);
        let growth = growth.unwrap_or_else(|| unreachable!("{sequence:?} was planned to grow in place"));
        debug_assert!(
            matches!(self.room_now(sequence, tokens), Ok(Room::InPlace(_))),
            "{sequence:?} is not open at its end"
        );
        self.append_in_place(sequence, &growth, tokens);
    }

    fn open_tails(
        &mut self,
        appends: &mut [Append<'_>],
        planned: &[Planned],
    ) -> Result<Vec<(usize, Copied)>, StepError> {
        let mut copies = Vec::new();
        for &Planned { place, ref growth, .. } in planned {
            let sequence = &mut *appends[place].sequence;
            let copied = self.open_tail(sequence, growth);
            let copied = copied.map_err(|error| StepError::Sequence { id: sequence.id(), error })?;
            copies.extend(copied.map(|copied| (place, copied)));
        }
        Ok(copies)
    }

    /// Plans the tokens of each sequence, and reserves all missing blocks, or none. Returns the
    /// plans of sequences whose last block cannot take the tokens; other last blocks, unshared,
    /// stay open.
    fn plan_step(&mut self, appends: &mut [Append<'_>]) -> Result<Vec<Planned>, StepError> {
        let mut step = Vec::new();
        let mut lacking = Vec::<SequenceId>::new();
        let mut refusal: Option<(usize, AllocError)> = None;
        for place in 0..appends.len() {
            let Append { ref mut sequence, tokens } = appends[place];
            if self.takes_one(sequence, tokens).is_some() {
                continue;
            }
            sequence.catch_up();
            let error = match self.plan_one(sequence, tokens) {
                Ok(None) => continue,
                Ok(Some((growth, needs_opening))) => {
                    let needed = self.open_and_count(sequence, &growth, needs_opening);
                    match self.provide(sequence, needed, refusal) {
                        Ok(reserved) => {
                            step.push(Planned { place, growth, reserved });
                            continue;
                        }
                        Err(error) => error.into(),
                    }
                }
                Err(error) => error,
            };
            let id = sequence.id();
            match error {
                // Sequences of other tenants may get as many.
                SequenceError::Alloc(error @ AllocError::OverQuota { .. }) => {
                    refusal.get_or_insert((usize::MAX, error));
                    lacking.push(id);
                }
                SequenceError::Alloc(
                    error @ (AllocError::Exhausted { asked, .. } | AllocError::Behind { asked, .. }),
                ) => {
                    let (least, first) = refusal.unwrap_or((asked, error));
                    refusal = Some((least.min(asked), first));
                    lacking.push(id);
                }
                error => {
                    Self::unreserve(appends, &step);
                    return Err(StepError::Sequence { id, error });
                }
            }
        }
        let Some((_, error)) = refusal else { return Ok(step) };
        Self::unreserve(appends, &step);
        Err(StepError::Lacking { sequences: lacking, error })
    }

    /// `None` if the last block takes the tokens, otherwise the plan, and whether that block is not open.
    // Always inline: see `room_now`.
    #[inline(always)]
    fn plan_one(
        &self,
        sequence: &mut Sequence,
        tokens: Tokens<'_>,
    ) -> Result<Option<(Growth, bool)>, SequenceError> {
        Ok(match self.room_now(sequence, tokens)? {
            Room::NoTokens | Room::InPlace(_) => None,
            Room::InList(growth, tail) => {
                Some((growth, tail.is_some_and(|tail| tail.access != Access::Open)))
            }
        })
    }

    /// Returns the number of blocks that a plan needs. A sealed last block that need not be copied is
    /// opened, whatever becomes of the append.
    #[inline]
    fn open_and_count(&self, sequence: &mut Sequence, growth: &Growth, needs_opening: bool) -> usize {
        growth.fresh as usize
            + usize::from(needs_opening && self.copies_unless_opened(sequence, growth.first))
    }

    #[cold]
    fn copies_unless_opened(&self, sequence: &mut Sequence, place: u32) -> bool {
        let Some(id) = sequence.list.last() else { return false };
        match self.tail(sequence, place, id).access {
            // Not sealed, so not being moved: nothing keeps this batch from opening it later.
            Access::Open | Access::Withdraw => false,
            Access::Copy => true,
            Access::Reopen => {
                // Copied if it is being moved at this moment.
                let is_open = self.step.sequences.0.blocks.reopen(id);
                if is_open {
                    sequence.seals.reopen(place);
                }
                !is_open
            }
        }
    }

    /// Plans an append to a sequence that has caught up. `None` if its last block takes the tokens,
    /// otherwise the plan and the number of blocks.
    pub(super) fn plan_and_open(
        &self,
        sequence: &mut Sequence,
        tokens: Tokens<'_>,
    ) -> Result<Option<(Growth, usize)>, SequenceError> {
        let Some((growth, needs_opening)) = self.plan_one(sequence, tokens)? else { return Ok(None) };
        let needed = self.open_and_count(sequence, &growth, needs_opening);
        Ok(Some((growth, needed)))
    }

    /// Reserves and counts the blocks that a sequence lacks of `needed`. Once the pool has refused
    /// some number of blocks, the rest of the step lacks as many too.
    fn provide(
        &self,
        sequence: &mut Sequence,
        needed: usize,
        refused: Option<(usize, AllocError)>,
    ) -> Result<usize, AllocError> {
        match (sequence.lacking(needed)?, refused) {
            (None, _) => Ok(0),
            (Some(request), Some((least, error))) if request.blocks >= least => Err(error),
            (Some(request), _) => {
                sequence.allocate_reserved(&self.step.sequences.0.blocks, &request)?;
                Ok(request.blocks)
            }
        }
    }

    /// Appends by a plan for which the blocks are reserved and the last block is open.
    pub(super) fn append_planned(
        &mut self,
        sequence: &mut Sequence,
        growth: Option<&Growth>,
        tokens: Tokens<'_>,
    ) -> usize {
        match growth.filter(|growth| growth.fresh > 0) {
            Some(growth) => self.append_reserved(sequence, growth, tokens),
            None => {
                self.append_within_last(sequence, tokens);
                0
            }
        }
    }

    /// Appends tokens that need new blocks, which are reserved.
    #[inline(never)]
    fn append_reserved(&mut self, sequence: &mut Sequence, growth: &Growth, tokens: Tokens<'_>) -> usize {
        let appended = self.append_to_list(sequence, growth, None, tokens);
        let Ok(Appended { new_blocks, .. }) = appended else {
            unreachable!("{sequence:?} has reserved its blocks: {appended:?}")
        };
        new_blocks
    }

    fn unreserve(appends: &mut [Append<'_>], planned: &[Planned]) {
        for &Planned { place, reserved, .. } in planned.iter().rev() {
            appends[place].sequence.unreserve(reserved);
        }
    }
}

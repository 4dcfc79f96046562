//! Appends to sequences with several groups of layers: of one, or of many or none.
//!
//! ```text
//! plan      all parts catch up; sealed last blocks are opened; the missing blocks are counted
//! reserve   of each sequence by one request
//! open      the copies on write, and those of states                what can fail is done here
//! grow      all parts
//! ```

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use smallvec::{SmallVec, smallvec};

use crate::error::{AllocError, SequenceError, StepError};
use crate::sync::call;

use super::batch::Batch;
use super::grouped::{Counts, GroupedSequence};
use super::plan::Growth;
use super::state::{GroupCopy, State};
use super::step::Append;
use super::tokens::Tokens;

/// Result of an append to a sequence with several groups of layers.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct GroupedAppended {
    /// Positions of the new tokens.
    pub tokens: Range<usize>,
    /// Number of blocks taken in all groups, from reservations or allocated, including copies.
    pub new_blocks: usize,
    /// The last blocks that could not be written in place, and at the first append behind a cached
    /// prefix the states. Without storage, the engine makes these copies before the batch's own work.
    pub copies: Vec<GroupCopy>,
    /// Positions of the tokens over which the batch's work steps the
    /// [states](GroupedSequence::state): from what they hold to the last final token. Empty if it
    /// leaves the states as they are, and in a pool without states.
    ///
    /// Drafts are not among them, as long as they are not accepted: the engine computes what
    /// follows them from a copy of its own. With the next append, the accepted ones are stepped
    /// over, or their copy becomes the state.
    pub stepped: Range<usize>,
}

/// What an append of some tokens needs.
struct Planned {
    parts: SmallVec<[Option<Growth>; 8]>,
    lacking: Counts,
}

type Opened = SmallVec<[Vec<GroupCopy>; 1]>;

impl Batch {
    /// Appends tokens in every group of layers, as [`append`](Self::append).
    ///
    /// # Errors
    /// As [`append`](Self::append). No group has grown. Sealed last blocks may be open again; after
    /// a failed copy on write the earlier copies stay, in blocks that may have been reserved.
    /// [`SequenceError::NotWritable`] while a transfer reads the states.
    ///
    /// # Panics
    /// If the storage panics during a copy; then as after an error.
    pub fn append_grouped<'t>(
        &mut self,
        sequence: &mut GroupedSequence,
        tokens: impl Into<Tokens<'t>>,
    ) -> Result<GroupedAppended, SequenceError> {
        let _call = call();
        let mut append = [Append { sequence, tokens: tokens.into() }];
        let planned = self.plan_grouped(&mut append[0])?;
        append[0].sequence.allocate_reserved(&planned.lacking)?;
        let appended = self.append_planned_groups(&mut append, &[planned]);
        Ok(appended.map_err(|(_, error)| error)?.pop().expect("of one sequence"))
    }

    /// Appends tokens to many sequences with several groups of layers, all or none, as
    /// [`step`](Self::step). Returns the result of each.
    ///
    /// # Errors
    /// As [`step`](Self::step) and [`append_grouped`](Self::append_grouped).
    ///
    /// # Panics
    /// If the storage panics during a copy; then as after an error.
    pub fn step_grouped(
        &mut self,
        appends: &mut [Append<'_, GroupedSequence>],
    ) -> Result<Vec<GroupedAppended>, StepError> {
        let _call = call();
        let (mut planned, mut lacking) = (Vec::with_capacity(appends.len()), Vec::new());
        let mut refusal: Option<AllocError> = None;
        for place in 0..appends.len() {
            let plan = self.plan_grouped(&mut appends[place]).and_then(|plan| {
                appends[place].sequence.allocate_reserved(&plan.lacking)?;
                Ok(plan)
            });
            let id = appends[place].sequence.id();
            match plan {
                Ok(plan) => planned.push(plan),
                Err(SequenceError::Alloc(
                    error @ (AllocError::Exhausted { .. }
                    | AllocError::Behind { .. }
                    | AllocError::OverQuota { .. }),
                )) => {
                    refusal.get_or_insert(error);
                    lacking.push(id);
                    planned.push(Planned { parts: SmallVec::new(), lacking: Counts::new() });
                }
                Err(error) => {
                    unreserve(appends, &planned);
                    return Err(StepError::Sequence { id, error });
                }
            }
        }
        if let Some(error) = refusal {
            unreserve(appends, &planned);
            return Err(StepError::Lacking { sequences: lacking, error });
        }
        match self.append_planned_groups(appends, &planned) {
            Ok(appended) => Ok(appended.into_vec()),
            Err((place, error)) => Err(StepError::Sequence { id: appends[place].sequence.id(), error }),
        }
    }

    fn plan_grouped(&mut self, append: &mut Append<'_, GroupedSequence>) -> Result<Planned, SequenceError> {
        let Append { sequence, tokens } = append;
        sequence.catch_up();
        if let Some(block) = sequence.states.iter().find_map(State::shared) {
            return Err(SequenceError::NotWritable { id: sequence.id(), position: sequence.len(), block });
        }
        let mut planned = Planned { parts: SmallVec::new(), lacking: Counts::new() };
        for part in &mut sequence.parts {
            let plan = self.plan_and_open(part, *tokens)?;
            planned.lacking.push(plan.map_or(0, |(_, needed)| needed.saturating_sub(part.reserved.len())));
            planned.parts.push(plan.map(|(growth, _)| growth));
        }
        Ok(planned)
    }

    /// Appends by plans whose blocks are reserved. On an error, with the place of its sequence, no
    /// sequence has grown, and the reservations are as before.
    fn append_planned_groups(
        &mut self,
        appends: &mut [Append<'_, GroupedSequence>],
        planned: &[Planned],
    ) -> Result<SmallVec<[GroupedAppended; 1]>, (usize, SequenceError)> {
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let mut opened = Opened::new();
            for (place, (append, plan)) in appends.iter_mut().zip(planned).enumerate() {
                let copies = self.open_parts(append.sequence, &plan.parts);
                opened.push(copies.map_err(|error| (place, error))?);
            }
            Ok(opened)
        }));
        // Whatever the outcome: a copy is noted from the beginning of its block, in its part alone.
        appends.iter_mut().for_each(|append| self.note_in_all(append.sequence));
        let opened = match opened {
            Ok(Ok(opened)) => opened,
            // Reached by `a_failed_copy_grows_no_group`.
            Ok(Err(error)) => {
                unreserve(appends, planned);
                return Err(error);
            }
            Err(panic) => {
                unreserve(appends, planned);
                resume_unwind(panic);
            }
        };
        let grow = |((append, plan), copies)| self.grow_parts(append, plan, copies);
        let appended = appends.iter_mut().zip(planned).zip(opened).map(grow).collect();
        unreserve(appends, planned);
        Ok(appended)
    }

    fn open_parts(
        &mut self,
        sequence: &mut GroupedSequence,
        plans: &[Option<Growth>],
    ) -> Result<Vec<GroupCopy>, SequenceError> {
        let mut copies = Vec::new();
        if plans.iter().any(Option::is_some) {
            copies.extend(sequence.states.iter().filter_map(State::copies_of_source));
        }
        for state in &copies {
            // SAFETY: the run has no other owner, and is written only through the sequence, which is
            // borrowed mutably. The checkpoint is sealed, and its frames stay until this batch ends:
            // the sequence has references, and gives them back under the batch.
            unsafe { self.copy_frames(&state.frames) }?;
        }
        for (group, (part, plan)) in sequence.parts.iter_mut().zip(plans).enumerate() {
            let Some(growth) = plan else { continue };
            let copied = self.open_tail(part, growth)?;
            copies.extend(copied.map(|copied| GroupCopy { group, frames: smallvec![copied.frames] }));
        }
        Ok(copies)
    }

    fn grow_parts(
        &mut self,
        append: &mut Append<'_, GroupedSequence>,
        plan: &Planned,
        copies: Vec<GroupCopy>,
    ) -> GroupedAppended {
        let Append { sequence, tokens } = append;
        let from = sequence.parts[0].list.tokens() as usize;
        let mut new_blocks = copies.iter().filter(|copy| copy.group < sequence.parts.len()).count();
        for (part, plan) in sequence.parts.iter_mut().zip(&plan.parts) {
            new_blocks += self.append_planned(part, plan.as_ref(), *tokens);
        }
        let (length, committed) = (sequence.parts[0].list.tokens(), sequence.parts[0].committed);
        let (before, mut stepped) = (sequence.state_tokens(), 0);
        if length as usize > from {
            for state in &mut sequence.states {
                // Also of drafts: what is computed from them may become the state, in a later
                // batch.
                self.step.note(&mut state.run, 0, None);
                state.restored();
                state.at = committed;
                stepped = committed as usize - before;
            }
        }
        let stepped = before..before + stepped;
        GroupedAppended { tokens: from..length as usize, new_blocks, copies, stepped }
    }
}

fn unreserve(appends: &mut [Append<'_, GroupedSequence>], planned: &[Planned]) {
    let pairs = appends.iter_mut().zip(planned).rev();
    pairs.for_each(|(append, plan)| append.sequence.unreserve(&plan.lacking));
}

//! States of sequences, in pools of models that have them: each step overwrites a row of every frame
//! with the bytes of the last token, as kernels overwrite a state. Its bytes depend on all tokens
//! before, so that a state of other tokens, or of another length, is found.
//!
//! ```text
//! first append behind a hit    copies from the checkpoint, then reads
//! each later append            reads what the last one wrote, then writes
//! at a cut                     copies to the checkpoint, behind what this step wrote
//! ```

use kvpool::storage::FrameMove;
use kvpool::{Batch, StateCopy};
use kvpool_load::{Access, Transfer, full};

use super::super::scheduler::Running;
use super::{Open, Worker};

/// Gathers the row of the last of `held` tokens in each frame of a sequence's states.
pub(super) fn add(
    transfer: &mut Transfer<'_>,
    access: Access,
    running: &Running<Open>,
    held: usize,
) -> Result<(), String> {
    let Running { job, sequence: Open { sequence, text, .. }, .. } = running;
    let (last, block_tokens) = (held - 1..held, transfer.shape().block_tokens);
    for (index, frame) in sequence.state_frames().enumerate() {
        let of = (job.request, job.attempt, sequence.lists() + index);
        transfer.add(access, of, text, last.clone(), |tokens, out| {
            out.push((frame * block_tokens + tokens.start % block_tokens) as i64);
            Ok(())
        })?;
    }
    Ok(())
}

impl Worker<'_> {
    /// Returns the tokens at which the next append to a sequence ends, at most, so that its states
    /// can be kept there for later prompts.
    pub(super) fn next_cut(&mut self, place: usize) -> Option<u64> {
        // Without texts no prompt is found again.
        let cut = self.at.texts.and_then(|_| self.scheduler.running()[place].sequence.sequence.next_cut())?;
        Some(cut as u64)
    }

    /// Reads back the states of a sequence: what was written last, or what was restored.
    pub(super) fn check_states(&mut self, place: usize) -> Result<(), String> {
        if !self.at.options.verify {
            return Ok(());
        }
        // Other rows are gathered for writing.
        self.transfer.flush(Access::Write)?;
        let running = &self.scheduler.running()[place];
        add(&mut self.transfer, Access::Check, running, running.held as usize)?;
        self.transfer.flush(Access::Check)
    }

    /// Reads back the states that the last steps have written, before this one overwrites them.
    pub(super) fn check_all_states(&mut self) -> Result<(), String> {
        if !self.at.pool.has_states() || !self.at.options.verify {
            return Ok(());
        }
        for running in self.scheduler.running().iter() {
            if running.sequence.is_computed {
                add(&mut self.transfer, Access::Check, running, running.held as usize)?;
            }
        }
        self.transfer.flush(Access::Check)
    }

    /// Keeps the states of the sequences that have reached a cut, unless there is no memory for it.
    pub(super) fn checkpoint(&mut self, batch: &mut Batch) -> Result<(), String> {
        for at in 0..self.advanced.len() {
            let place = self.advanced[at];
            let running = &mut self.scheduler.running()[place];
            if running.sequence.cut.take_if(|cut| *cut == running.held).is_none() {
                continue;
            }
            loop {
                let Running { job, held, sequence: Open { sequence, .. } } =
                    &mut self.scheduler.running()[place];
                match sequence.checkpoint(batch).map_err(full) {
                    Ok(copies) => {
                        self.tally.checkpoints += u64::from(!copies.is_empty());
                        copy(self.at.pool.rows(), &copies)?;
                    }
                    // What it can see is not reused before it ends.
                    Err(Ok(_)) if self.previous.is_some() => {
                        self.end_previous();
                        continue;
                    }
                    Err(Ok(_)) => self.tally.checkpoints_refused += 1,
                    Err(Err(reason)) => {
                        return Err(format!(
                            "request {}: keeping a state of {held} tokens: {reason}",
                            job.request
                        ));
                    }
                }
                break;
            }
        }
        Ok(())
    }
}

/// Makes copies of states, as an engine does.
pub(super) fn copy(rows: &kvpool_load::Rows, copies: &[StateCopy]) -> Result<(), String> {
    let moves: Vec<FrameMove> = copies.iter().flat_map(|copy| copy.frames.iter().copied()).collect();
    if moves.is_empty() { Ok(()) } else { rows.copy(&moves) }
}

//! States of sequences, in pools of models that have them: each piece of a prompt, each full block
//! of an answer, and the last token overwrite the first row of every frame with the bytes of the
//! last token, as kernels overwrite a state with every token. The bytes depend on all tokens
//! before, so that a state of other tokens, or of another of these lengths, is found.
//!
//! ```text
//! first append behind a hit    copies from the checkpoint, then reads
//! before it is overwritten     reads what was written last
//! at a cut                     copies to the checkpoint, behind what this step wrote
//! ```

use kvpool::storage::FrameMove;
use kvpool::{Batch, GroupCopy};
use kvpool_load::{Access, Transfer, full};

use super::super::scheduler::Running;
use super::super::sequence::ReplaySequence;
use super::{Open, Worker};

/// Gathers the row of the last of `tokens` tokens in each frame of a sequence's states.
pub(super) fn add(
    transfer: &mut Transfer<'_>,
    access: Access,
    running: &Running<Open>,
    tokens: usize,
) -> Result<(), String> {
    if tokens == 0 {
        return Ok(());
    }
    let Running { job, sequence: Open { sequence, text, .. }, .. } = running;
    let (last, block_tokens) = (tokens - 1..tokens, transfer.shape().block_tokens);
    for (index, frame) in sequence.state_frames().enumerate() {
        let of = (job.request, job.attempt, sequence.lists() + index);
        transfer.add(access, of, text, last.clone(), |tokens, out| {
            out.extend(tokens.map(|_| (frame * block_tokens) as i64));
            Ok(())
        })?;
    }
    Ok(())
}

impl Worker<'_> {
    /// Returns the number of frames of a sequence's states, which must be a run.
    pub(super) fn check_run(&self, request: u32, sequence: &ReplaySequence) -> Result<u64, String> {
        let frames: Vec<usize> = sequence.state_frames().collect();
        let wanted = self.at.pool.lists().state_frames();
        if frames.len() != wanted || frames.windows(2).any(|two| two[0] + 1 != two[1]) {
            let found = frames.len();
            return Err(format!("request {request}: {found} frames for states of {wanted}, or not a run"));
        }
        Ok(wanted as u64)
    }

    /// Returns the tokens at which the next append to a sequence ends, at most, so that its states
    /// can be kept there for later prompts.
    pub(super) fn next_cut(&mut self, place: usize) -> Option<u64> {
        // Without texts no prompt is found again.
        let cut = self.at.texts.and_then(|_| self.scheduler.running()[place].sequence.sequence.next_cut())?;
        Some(cut as u64)
    }

    /// Restores the states of a sequence at its first append, and reads them: also if the pool
    /// named no copies for its cached prefix.
    pub(super) fn restore(&mut self, place: usize, restored: &[GroupCopy]) -> Result<(), String> {
        copy(self.at.pool.rows(), restored)?;
        let running = &mut self.scheduler.running()[place];
        let held = running.held as usize;
        if !self.at.pool.has_states() || running.sequence.computed > 0 || held == 0 {
            return Ok(());
        }
        running.sequence.computed = held;
        // Other rows are gathered for writing.
        self.transfer.flush(Access::Write)?;
        self.check_states(place)
    }

    /// Reads back the states of a sequence.
    fn check_states(&mut self, place: usize) -> Result<(), String> {
        if !self.at.options.verify {
            return Ok(());
        }
        let running = &self.scheduler.running()[place];
        add(&mut self.transfer, Access::Check, running, running.sequence.computed)?;
        self.transfer.flush(Access::Check)
    }

    /// Overwrites the states of a sequence that has grown to `end` tokens.
    pub(super) fn overwrite_states(
        &mut self,
        place: usize,
        end: usize,
        in_prompt: bool,
    ) -> Result<(), String> {
        let is_last = end as u64 == self.scheduler.running()[place].job.total;
        let is_due = in_prompt || is_last || end.is_multiple_of(self.shape.block_tokens);
        if !self.at.pool.has_states() || !is_due {
            return Ok(());
        }
        self.transfer.flush(Access::Write)?;
        self.check_states(place)?;
        let running = &mut self.scheduler.running()[place];
        running.sequence.computed = end;
        add(&mut self.transfer, Access::Write, running, end)
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
fn copy(rows: &kvpool_load::Rows, copies: &[GroupCopy]) -> Result<(), String> {
    let moves: Vec<FrameMove> = copies.iter().flat_map(|copy| copy.frames.iter().copied()).collect();
    if moves.is_empty() { Ok(()) } else { rows.copy(&moves) }
}

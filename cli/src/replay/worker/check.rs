//! Reads tokens back, and compares them.

use std::ops::Range;

use kvpool::Batch;
use kvpool_load::{Access, slots};

use super::super::scheduler::Running;
use super::super::tally::TableRuns;
use super::{Open, Worker, states};

/// The frame of the null block, in tables in place of a block that was given up.
const NULL: i32 = 0;

/// Returns the places of a table that were given up.
fn gap(table: &[i32]) -> Range<usize> {
    let is_null = |&frame: &i32| frame == NULL;
    let start = table.iter().position(is_null).unwrap_or(0);
    start..start + table[start..].iter().take_while(|&frame| is_null(frame)).count()
}

impl Worker<'_> {
    /// Reads back the last token of every sequence with new tokens, through its slot.
    pub(super) fn check_last(&mut self, batch: &Batch) -> Result<(), String> {
        if !self.at.options.verify {
            return Ok(());
        }
        for &place in &self.advanced {
            let Running { job, held, sequence: Open { sequence, text, .. } } =
                &self.scheduler.running()[place];
            let last = *held as usize - 1..*held as usize;
            for list in 0..sequence.lists() {
                let (of, slots) =
                    ((job.request, job.attempt, list), slots(batch, sequence.list(list), self.shape));
                self.transfer.add(Access::Check, of, text, last.clone(), slots)?;
            }
        }
        self.transfer.flush(Access::Check)
    }

    /// Counts the runs of a sequence's block tables, and reads back every token through them.
    pub(super) fn check_all(&mut self, batch: &Batch, running: &Running<Open>) -> Result<(), String> {
        let Running { job, held, sequence: Open { sequence, listed, counts, .. }, .. } = running;
        let lists = sequence.lists();
        let counts = *counts && self.is_steady();
        self.tally.lists.resize_with(if lists > 1 { lists } else { 0 }, TableRuns::default);
        self.frames.clear();
        for list in 0..lists {
            let before = self.frames.len();
            batch.block_table([sequence.list(list)], &mut self.table).map_err(|error| error.to_string())?;
            let table = self.table.row(0);
            let blocks = (*held as usize).div_ceil(sequence.list(list).block_tokens());
            if table.len() != blocks {
                let found = table.len();
                return Err(format!("request {}: a table of {found} blocks for {held} tokens", job.request));
            }
            self.frames.extend(table.iter().filter(|&&frame| frame != NULL));
            if let Some(tables) = self.tally.lists.get_mut(list).filter(|_| counts) {
                tables.count(&self.frames[before..], running.is_done());
            }
            if self.at.options.verify {
                self.check_list(running, list)?;
            }
        }
        if counts {
            self.tally.tables.count(&self.frames, running.is_done());
            self.tally.listed.count(&listed.blocks, running.is_done());
        }
        if self.at.options.verify {
            states::add(&mut self.transfer, Access::Check, running, running.sequence.computed)?;
        }
        self.transfer.flush(Access::Check)
    }

    /// Reads back the tokens of a list through its table, and checks that the next token sees none
    /// of those that were given up.
    fn check_list(&mut self, running: &Running<Open>, list: usize) -> Result<(), String> {
        let Running { job, held, sequence: Open { sequence, text, .. } } = running;
        let (held, table, in_frame) = (*held as usize, self.table.row(0), self.shape.block_tokens as i64);
        let block_tokens = sequence.list(list).block_tokens();
        let gap = gap(table);
        let (given_up, gap) = (gap.len(), gap.start * block_tokens..gap.end * block_tokens);
        let is_kept = self.at.pool.lists().window(list).is_none_or(|window| {
            gap.is_empty() || window.sink_tokens() <= gap.start && gap.end + window.tokens() <= held + 1
        });
        if given_up != sequence.list(list).blocks_given_up() || !is_kept {
            let request = job.request;
            return Err(format!("request {request}: no tokens {gap:?} of {held} in list {list}"));
        }
        for tokens in [0..gap.start, gap.end..held] {
            let of = (job.request, job.attempt, list);
            self.transfer.add(Access::Check, of, text, tokens, |tokens, out| {
                let mut token = tokens.start;
                while token < tokens.end {
                    let (block, offset) = (token / block_tokens, token % block_tokens);
                    let count = (block_tokens - offset).min(tokens.end - token);
                    let slot = i64::from(table[block]) * in_frame + offset as i64;
                    out.extend(slot..slot + count as i64);
                    token += count;
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_where_the_null_block_is() {
        for (table, places) in
            [(&[][..], 0..0), (&[4, 5], 0..0), (&[NULL, NULL, 7], 0..2), (&[3, NULL, 7, NULL], 1..2)]
        {
            assert_eq!(gap(table), places, "{table:?}");
        }
    }
}

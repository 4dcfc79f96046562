//! Sequences: each one's tokens as a plain list, and the blocks that it holds.
//!
//! Every token has a unique number, stored when it is appended, and read back from the place that
//! the pool reports: a block that was lost, wrongly shared or copied, or reused too early shows in
//! the numbers.

use std::ops::Range;

use kvpool::{Appended, BlockId, BlockTable, CsrTable, Invalid, SequenceError, SequenceId, Tokens, Window};

use super::Pick;
use super::drive::{Checked, Drive, Opened, same};

const NULL: BlockId = BlockId(0);

impl Drive {
    pub(super) fn open(&mut self, id: SequenceId) -> Checked {
        let got = self.pool.sequence(id).open();
        if self.is_open(id) {
            return refused(got.map(drop), SequenceError::AlreadyOpen { id });
        }
        let real = got.map_err(|error| error.to_string())?;
        self.sequences.push(Opened { real, tokens: Vec::new(), committed: 0, blocks: Vec::new() });
        Ok(())
    }

    fn is_open(&self, id: SequenceId) -> bool {
        self.sequences.iter().any(|opened| opened.real.id() == id)
    }

    pub(super) fn append(&mut self, sequence: Pick, batch: Pick, tokens: usize, draft: bool) -> Checked {
        if self.batches.is_empty() {
            self.begin();
        }
        let (Some(sequence), Some(batch)) =
            (sequence.index(self.sequences.len()), batch.index(self.batches.len()))
        else {
            return Ok(());
        };
        let opened = &mut self.sequences[sequence];
        let (before, id) = (opened.tokens.len(), opened.real.id());
        let real = &mut self.batches[batch].1;
        let got = if draft {
            real.append(&mut opened.real, Tokens::Draft(tokens))
        } else {
            real.append(&mut opened.real, tokens)
        };
        if tokens == 0 {
            return refused(got.map(drop), invalid(id, "tokens", 0, "at least 1"));
        }

        let fresh = (before + tokens).div_ceil(self.block_tokens) - before.div_ceil(self.block_tokens);
        let tail = (before % self.block_tokens != 0).then(|| opened.blocks[before / self.block_tokens]);
        let is_shared = tail.is_some_and(|tail| self.model.owned(tail).is_some_and(|owned| owned.refs > 1));
        // A tail that was full once may be about to be sealed by a batch in flight; it is then
        // copied.
        let may_copy = is_shared || tail.is_some_and(|tail| self.full_once.contains(&tail));
        let free = self.model.free();
        self.gave_up(sequence, before)?;
        let appended = match got {
            Ok(appended) => appended,
            Err(SequenceError::Alloc(_)) if free < fresh + usize::from(may_copy) => {
                return self.sequence_is(sequence);
            }
            Err(error) => return Err(format!("{fresh} fresh blocks of {free} free: {error}")),
        };
        if appended.copied.is_some() && !may_copy || appended.copied.is_none() && is_shared {
            return Err(format!("copied {:?}, with tail {tail:?} shared: {is_shared}", appended.copied));
        }
        same("tokens appended", &(before..before + tokens), &appended.tokens)?;
        same("new blocks", &(fresh + usize::from(appended.copied.is_some())), &appended.new_blocks)?;
        self.appended(sequence, &appended, draft)?;
        self.store(sequence, batch, before)?;
        self.sequence_is(sequence)
    }

    /// Releases blocks that an append to a sequence of `before` tokens gave up, whether it then
    /// took others or was refused. Those of batches in flight may stay.
    fn gave_up(&mut self, sequence: usize, before: usize) -> Checked {
        let opened = &mut self.sequences[sequence];
        let next = opened.committed.min(before);
        for (place, block) in opened.real.blocks().take(opened.blocks.len()).enumerate() {
            let was = &mut opened.blocks[place];
            if block != NULL || *was == NULL {
                continue;
            }
            let mut tokens = place * self.block_tokens..(place + 1) * self.block_tokens;
            if tokens.any(|position| sees(self.window, next, position)) {
                return Err(format!("gave up place {place}, which token {next} sees"));
            }
            self.model.release(std::mem::replace(was, NULL));
        }
        Ok(())
    }

    /// The model's part of a successful append.
    fn appended(&mut self, sequence: usize, appended: &Appended, draft: bool) -> Checked {
        let Self { sequences, model, tokens_stored, full_once, .. } = self;
        let opened = &mut sequences[sequence];
        let id = opened.real.id();
        let mut take = |block: BlockId| {
            full_once.remove(&block);
            if model.allocate(block, Some(id), false) {
                Ok(())
            } else {
                Err(format!("block {block} was not free"))
            }
        };
        if let Some(copied) = appended.copied {
            let place = appended.tokens.start / self.block_tokens;
            same("the block that was copied", &opened.blocks[place], &copied.from)?;
            take(copied.to)?;
            opened.blocks[place] = copied.to;
        }
        for block in opened.real.blocks().skip(opened.blocks.len()) {
            take(block)?;
            opened.blocks.push(block);
        }
        if let Some(copied) = appended.copied {
            model.release(copied.from);
        }
        for _ in appended.tokens.clone() {
            *tokens_stored += 1;
            opened.tokens.push(*tokens_stored as f32);
        }
        full_once.extend(&opened.blocks[..opened.tokens.len() / self.block_tokens]);
        if !draft {
            opened.committed = opened.tokens.len();
        }
        Ok(())
    }

    fn store(&mut self, sequence: usize, batch: usize, from: usize) -> Checked {
        let opened = &mut self.sequences[sequence];
        let k = &opened.tokens[from..];
        let v: Vec<f32> = k.iter().map(|k| -k).collect();
        let range = from..opened.tokens.len();
        let stored = self.batches[batch].1.store(&mut opened.real, 0, range, k.into(), (&v).into());
        stored.map_err(|error| format!("store: {error}"))
    }

    pub(super) fn commit(&mut self, pick: Pick, share: u8) -> Checked {
        let Some(index) = pick.index(self.sequences.len()) else { return Ok(()) };
        let opened = &mut self.sequences[index];
        let (id, length) = (opened.real.id(), opened.tokens.len());
        let asked = share_of(length, share);
        let got = opened.real.commit(asked);
        if asked > length {
            return refused(
                got,
                invalid(id, "tokens to commit", asked, &format!("at most its {length} tokens")),
            );
        }
        got.map_err(|error| error.to_string())?;
        opened.committed = opened.committed.max(asked);
        self.sequence_is(index)
    }

    pub(super) fn truncate(&mut self, pick: Pick, share: u8) -> Checked {
        let Some(index) = pick.index(self.sequences.len()) else { return Ok(()) };
        let opened = &mut self.sequences[index];
        let (id, length) = (opened.real.id(), opened.tokens.len());
        let asked = share_of(length, share);
        let behind = opened.behind(self.window, asked, self.block_tokens);
        let got = opened.real.truncate(asked);
        if asked > length {
            return refused(
                got,
                invalid(id, "tokens to keep", asked, &format!("at most its {length} tokens")),
            );
        }
        if let Some(error) = behind {
            refused(got, error)?;
            return self.sequence_is(index);
        }
        got.map_err(|error| error.to_string())?;
        opened.tokens.truncate(asked);
        opened.committed = opened.committed.min(asked);
        for block in opened.blocks.drain(asked.div_ceil(self.block_tokens)..).filter(|&block| block != NULL) {
            self.model.release(block);
        }
        self.sequence_is(index)
    }

    pub(super) fn fork(&mut self, pick: Pick, id: SequenceId) -> Checked {
        let Some(index) = pick.index(self.sequences.len()) else { return Ok(()) };
        let opened = &self.sequences[index];
        let got = opened.real.fork(id);
        if self.is_open(id) {
            return refused(got.map(drop), SequenceError::AlreadyOpen { id });
        }
        let real = got.map_err(|error| error.to_string())?;
        let (tokens, blocks) = (opened.tokens.clone(), opened.blocks.clone());
        blocks.iter().filter(|&&block| block != NULL).for_each(|&block| self.model.share(block));
        self.sequences.push(Opened { real, tokens, committed: opened.committed, blocks });
        self.sequence_is(self.sequences.len() - 1)
    }

    pub(super) fn close(&mut self, pick: Pick) -> Checked {
        let Some(index) = pick.index(self.sequences.len()) else { return Ok(()) };
        let Opened { real, blocks, .. } = self.sequences.swap_remove(index);
        drop(real);
        blocks.into_iter().filter(|&block| block != NULL).for_each(|block| self.model.release(block));
        same("open sequences", &self.sequences.len(), &self.pool.sequence_count())
    }

    /// Checks that the sequence equals the model's, and that its blocks have the expected
    /// references.
    fn sequence_is(&self, index: usize) -> Checked {
        let opened = &self.sequences[index];
        same("length", &opened.tokens.len(), &opened.real.len())?;
        same("committed", &opened.committed, &opened.real.committed())?;
        same("blocks", &opened.blocks, &opened.real.blocks().collect())?;
        for position in
            (0..opened.tokens.len()).filter(|&position| sees(self.window, opened.tokens.len(), position))
        {
            if opened.blocks[position / self.block_tokens] == NULL {
                return Err(format!("token {position} was given up; the next one sees it"));
            }
        }
        let nulls = opened.blocks.iter().filter(|&&block| block == NULL).count();
        same("blocks given up", &nulls, &opened.real.blocks_given_up())?;
        for &block in opened.blocks.iter().filter(|&&block| block != NULL) {
            let refs = self.model.owned(block).map_or(0, |owned| owned.refs);
            same("references", &refs, &self.pool.blocks().word(block).refs())?;
        }
        Ok(())
    }

    pub(super) fn read(&mut self, pick: Pick) -> Checked {
        let Some(index) = pick.index(self.sequences.len()) else { return Ok(()) };
        self.read_back(index)?;
        self.tables()
    }

    pub(super) fn read_all(&mut self) -> Checked {
        (0..self.sequences.len()).try_for_each(|index| self.read_back(index))?;
        self.tables()
    }

    fn read_back(&mut self, index: usize) -> Checked {
        self.sequence_is(index)?;
        let opened = &self.sequences[index];
        let (length, lost) = (opened.tokens.len(), opened.given_up(self.block_tokens));
        let mut batch = self.pool.begin_batch();
        let mut load = |tokens: Range<usize>| {
            let (mut k, mut v) = (vec![0.0_f32; tokens.len()], vec![0.0_f32; tokens.len()]);
            batch.load(&opened.real, 0, tokens, (&mut k).into(), (&mut v).into())?;
            v.iter_mut().for_each(|v| *v = -*v);
            Ok((k, v))
        };
        if !lost.is_empty() {
            refused(load(0..length).map(drop), opened.behind_window(lost.start, lost.end))?;
        }
        for tokens in [0..lost.start, lost.end..length] {
            let want = &opened.tokens[tokens.clone()];
            let (k, v) = load(tokens).map_err(|error| format!("load: {error}"))?;
            same("K read back", want, &k[..])?;
            same("V read back", want, &v[..])?;
        }
        Ok(())
    }

    fn tables(&self) -> Checked {
        let batch = self.pool.begin_batch();
        let sequences = || self.sequences.iter().map(|opened| &opened.real);
        let (mut table, mut csr, mut lengths) = (BlockTable::new(), CsrTable::new(), Vec::new());
        batch.lengths(sequences(), &mut lengths).map_err(|error| error.to_string())?;
        batch.block_table(sequences(), &mut table).map_err(|error| error.to_string())?;
        batch.csr_table(sequences(), &mut csr).map_err(|error| error.to_string())?;
        same("rows", &self.sequences.len(), &table.rows())?;
        let block_tokens = self.block_tokens as i64;
        for (row, opened) in self.sequences.iter().enumerate() {
            // Frame 0 belongs to the null block.
            let frame = |block: &BlockId| self.model.frame(*block).get() as i32;
            let mut frames: Vec<i32> = opened.blocks.iter().map(frame).collect();
            same(
                "row of the compressed table",
                &frames[..],
                &csr.indices[csr.indptr[row] as usize..csr.indptr[row + 1] as usize],
            )?;
            frames.resize(table.width(), 0);
            same("row of the table", &frames[..], table.row(row))?;
            let length = opened.tokens.len();
            same("length in the table", &(length as i32), &table.lengths()[row])?;
            same("length", &(length as i32), &lengths[row])?;
            let in_last = length - opened.blocks.len().saturating_sub(1) * self.block_tokens;
            same("length of the last page", &(in_last as i32), &csr.last_page_len[row])?;
            let (mut slots, lost) = (Vec::new(), opened.given_up(self.block_tokens));
            if !lost.is_empty() {
                let got = batch.slot_mapping(&opened.real, 0..length, &mut slots);
                refused(got, opened.behind_window(lost.start, lost.end))?;
            }
            for tokens in [0..lost.start, lost.end..length] {
                batch.slot_mapping(&opened.real, tokens, &mut slots).map_err(|error| error.to_string())?;
            }
            let slot = |token: usize| {
                i64::from(self.model.frame(opened.blocks[token / self.block_tokens]).get()) * block_tokens
                    + token as i64 % block_tokens
            };
            let kept = (0..lost.start).chain(lost.end..length);
            same("slots", &kept.map(slot).collect::<Vec<_>>(), &slots)?;
        }
        Ok(())
    }
}

impl Opened {
    /// Returns the tokens in blocks that were given up.
    fn given_up(&self, block_tokens: usize) -> Range<usize> {
        let is_null = |block: &BlockId| *block == NULL;
        let Some(first) = self.blocks.iter().position(is_null) else { return 0..0 };
        let count = self.blocks[first..].iter().take_while(|block| is_null(block)).count();
        first * block_tokens..(first + count) * block_tokens
    }

    /// Returns the error of a truncation to `length` tokens, if the window of the first token of
    /// its last block, which may be written again, was given up.
    fn behind(&self, window: Option<Window>, length: usize, block_tokens: usize) -> Option<SequenceError> {
        let first = length / block_tokens * block_tokens;
        let begin = (first + 1).saturating_sub(window?.tokens()).min(length.checked_sub(1)?);
        let lost = self.given_up(block_tokens);
        let position = begin.max(lost.start);
        (position < length.min(lost.end)).then(|| self.behind_window(position, lost.end))
    }

    fn behind_window(&self, position: usize, kept_from: usize) -> SequenceError {
        SequenceError::BehindWindow { id: self.real.id(), position, kept_from }
    }
}

/// Returns whether the token at position `next` attends to the one at `position`.
fn sees(window: Option<Window>, next: usize, position: usize) -> bool {
    window.is_none_or(|window| position < window.sink_tokens() || position + window.tokens() > next)
}

fn share_of(length: usize, share: u8) -> usize {
    if share == u8::MAX { length + 1 } else { length * usize::from(share) / 254 }
}

fn invalid(id: SequenceId, what: &'static str, got: usize, limit: &str) -> SequenceError {
    SequenceError::Invalid { id, error: Invalid::new(what, got, limit) }
}

fn refused(got: Result<(), SequenceError>, expected: SequenceError) -> Checked {
    same("an error", &Err(expected), &got)
}

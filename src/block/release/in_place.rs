//! References by frame number, for an engine whose ids are frames.
//!
//! Such an engine's blocks are pinned while they have references, so a frame with references keeps
//! its block, and its number identifies the block. Only blocks without references move.
//!
//! A list is checked as a whole before anything changes. Each step then checks that the word that
//! it replaces has references and names the caller's frame. A second free of a frame is refused
//! while the frame is free or cached, but not after another owner got it.
//!
//! The transitions are those of lists and pins, with their models: `evictable` and `moves`.

use crate::error::FrameError;
use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run, Ticket};
use crate::sync::Ordering::*;

use super::give_back::Few;
use super::pass::Pass;
use super::reference::release_only_in;
use crate::block::core::{Blocks, Core, Evictable};
use crate::block::state::{BlockWord, Row, TableView};
use crate::block::thread_cache::INLINE_BLOCKS;

const KEPT_AHEAD: usize = 16;

impl Blocks {
    /// Drops one reference on each frame, in order: all or none, except that a frame that another
    /// thread frees concurrently is reported, and the others are freed.
    pub(crate) fn free_frames(
        &self,
        frames: &[u32],
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let (table, mut few) = (self.space.table.view(), Few::new());
        if frames.len() > INLINE_BLOCKS
            && let Some(runs) = self.only_in_place(table, frames)
        {
            for (done, &run) in runs.iter().enumerate() {
                let part = release_run(table, run);
                if part < run.len {
                    return self.free_rest_of_runs(frames, &runs, (done, part), tell);
                }
            }
            self.give_back_runs(&runs);
            return Ok(());
        }
        let cached = self.check_owned(table, frames)?;
        if let [frame] = *frames
            && cached == 0
            && let Some(frame) = free_only(table, frame)
        {
            self.give_back_one(frame);
            return Ok(());
        }
        let rest = if cached == 0 { few.fill(frames, |frame| free_only(table, frame)) } else { frames };
        if rest.is_empty() {
            self.give_back_few(few.frames());
            return Ok(());
        }
        self.free_rest(few, frames, rest, cached, tell)
    }

    /// Frees what is left of runs that [`only_in_place`](Core::only_in_place) checked. `released`:
    /// the number of runs that were released as a whole, and of frames of the next one.
    #[cold]
    fn free_rest_of_runs(
        &self,
        frames: &[u32],
        runs: &RunList,
        released: (usize, u32),
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let mut pass = Pass::new(self, Few::new());
        let outcome = pass.free_runs(self.space.table.view(), frames, runs, released);
        self.finish(&mut pass, 0, tell);
        outcome
    }

    #[inline(never)]
    fn free_rest(
        &self,
        few: Few,
        frames: &[u32],
        rest: &[u32],
        cached: usize,
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let (table, mut pass, mut outcome) = (self.space.table.view(), Pass::new(self, few), Ok(()));
        if cached > 0 {
            pass.expect_evictable(cached);
        }
        pass.release_all(
            rest,
            |frame| free_only(table, frame),
            |pass, frame| {
                outcome = outcome.and(pass.free(table, frames, FrameId(frame)));
            },
        );
        self.finish(&mut pass, 0, tell);
        outcome
    }

    /// Caches each frame, and drops one reference on it, in order: all or none, as
    /// [`free_frames`](Self::free_frames). `lock` is held until then: only its holder caches
    /// blocks.
    ///
    /// `note` prepares the row of a block that is cached and released in one step. `cache` caches
    /// any other: it has further references, is cached, or its generation wraps around.
    pub(crate) fn keep_frames<L>(
        &self,
        frames: &[u32],
        lock: L,
        prefetch: impl Fn(BlockId),
        note: impl Fn(BlockId),
        mut cache: impl FnMut(BlockId),
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let (table, mut pass, mut outcome) = (self.space.table.view(), Pass::new(self, Few::new()), Ok(()));
        self.check_owned(table, frames)?;
        pass.expect_evictable(frames.len());
        for (at, &frame) in frames.iter().enumerate() {
            if let Some(&next) = frames.get(at + KEPT_AHEAD) {
                prefetch(table.block_at(FrameId(next)));
            }
            let (frame, id) = (FrameId(frame), table.block_at(FrameId(frame)));
            let atomic = table.row(id).word;
            if BlockWord::from_bits(atomic.load(Relaxed)).is_only_in(frame) {
                note(id);
                if pass.keep_only(atomic, id, frame) {
                    continue;
                }
            }
            // Also one that another thread shared in between. Reached by the model
            // `kept_while_it_is_shared`.
            cache(id);
            outcome = outcome.and(pass.free(table, frames, frame));
        }
        drop(lock);
        self.finish(&mut pass, 0, tell);
        outcome
    }

    /// Adds a reference to each frame, which must be referenced or cached: all or none.
    pub(crate) fn share_frames(
        &self,
        frames: &[u32],
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        for (index, &frame) in frames.iter().enumerate() {
            let (_, word) = self.used_in_place(index, frame)?;
            check_shared(index, word)?;
        }
        let mut revived = 0;
        let mut outcome = Ok(());
        let mut count = 0;
        for (index, &frame) in frames.iter().enumerate() {
            match self.share_in_place(index, FrameId(frame)) {
                Ok(was_evictable) => revived += usize::from(was_evictable),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
            count += 1;
        }
        self.count_not_evictable(revived);
        self.count_further(count as isize);
        if outcome.is_err() && count > 0 {
            // Another thread freed one since the check, or the list repeats one too often.
            let _ = self.free_rest(Few::new(), frames, &frames[..count], 0, tell);
        }
        outcome
    }
}

impl Pass<'_> {
    /// As [`Blocks::free_rest_of_runs`].
    fn free_runs(
        &mut self,
        table: TableView<'_>,
        frames: &[u32],
        runs: &RunList,
        (done, part): (usize, u32),
    ) -> Result<(), FrameError> {
        let mut outcome = Ok(());
        for (index, &run) in runs.iter().enumerate() {
            let (mut rest, mut len) = (run, if index < done { run.len } else { part });
            if index > done {
                len = release_run(table, rest);
            }
            loop {
                self.freed_run(Run { len, ..rest });
                if len == rest.len {
                    break;
                }
                // Another thread shared or cached it after the check. Reached by the test
                // `threads_change_frames_of_a_list_that_is_freed_or_kept`.
                let frame = FrameId(rest.start.0 + len);
                outcome = outcome.and(self.free(table, frames, frame));
                rest = Run { start: FrameId(frame.0 + 1), len: rest.len - len - 1 };
                len = release_run(table, rest);
            }
        }
        outcome
    }

    #[cold]
    #[inline(never)]
    fn free(&mut self, table: TableView<'_>, frames: &[u32], frame: FrameId) -> Result<(), FrameError> {
        self.release(table.block_at(frame), Some(frame)).map_err(|_| {
            let index = frames.iter().position(|&listed| listed == frame.0);
            self.core.why_not_owned(index.unwrap_or(0), frame.0)
        })
    }
}

#[inline(always)]
fn free_only(table: TableView<'_>, frame: u32) -> Option<FrameId> {
    let frame = FrameId(frame);
    release_only_in(table.row(table.block_at(frame)).word, frame).then_some(frame)
}

/// Releases a run up to the first block that is cached or shared; returns the number of frames.
#[inline(never)]
fn release_run(table: TableView<'_>, run: Run) -> u32 {
    table.visit_run(run, |frame, _, row| release_only_in(row.word, frame))
}

#[inline(never)]
fn is_only_run(table: TableView<'_>, run: Run) -> bool {
    // Acquire, here and below: as in `word`.
    let word = |row: Row<'_>| BlockWord::from_bits(row.word.load(Acquire));
    table.visit_run(run, |frame, _, row| word(row).is_only_in(frame)) == run.len
}

impl Core {
    #[inline]
    fn only_in_place(&self, table: TableView<'_>, frames: &[u32]) -> Option<RunList> {
        let total = self.total_frames();
        if frames.iter().any(|&frame| frame as usize >= total) {
            return None;
        }
        let mut runs = RunList::new();
        runs.push_all(frames);
        (runs.iter().all(|&run| is_only_run(table, run)) && runs.are_disjoint()).then_some(runs)
    }

    fn share_in_place(&self, index: usize, frame: FrameId) -> Result<bool, FrameError> {
        let atomic = self.space.table.word(self.space.table.block_at(frame));
        // Acquire, and no Release: as in `hit`.
        let shared = atomic.fetch_update(Acquire, Relaxed, |bits| {
            let word = BlockWord::from_bits(bits);
            word.share_in_place().filter(|next| next.frame() == frame).map(BlockWord::to_bits)
        });
        let word = BlockWord::from_bits(shared.unwrap_or_else(|bits| bits));
        match shared {
            Ok(_) => Ok(word.is_evictable()),
            Err(_) if word.frame() == frame => check_shared(index, word).map(|()| false),
            Err(_) => Err(FrameError::Free { index, frame }),
        }
    }

    /// Checks that no frame is listed more often than referenced; counts the cached entries.
    #[inline]
    fn check_owned(&self, table: TableView<'_>, frames: &[u32]) -> Result<usize, FrameError> {
        let (total, mut cached) = (self.total_frames(), 0);
        for (index, &frame) in frames.iter().enumerate() {
            if frame as usize >= total {
                return Err(self.why_not_owned(index, frame));
            }
            let atomic = table.row(table.block_at(FrameId(frame))).word;
            let word = BlockWord::from_bits(atomic.load(Acquire));
            if !word.is_owned() || word.frame().0 != frame {
                return Err(self.why_not_owned(index, frame));
            }
            cached += usize::from(word.is_cached());
        }
        let is_sorted = frames.is_sorted_by(|a, b| a < b) || frames.is_sorted_by(|a, b| a > b);
        if !is_sorted {
            self.check_repeats(frames)?;
        }
        Ok(cached)
    }

    #[cold]
    #[inline(never)]
    fn why_not_owned(&self, index: usize, frame: u32) -> FrameError {
        self.used_in_place(index, frame)
            .err()
            .unwrap_or(FrameError::Unreferenced { index, frame: FrameId(frame) })
    }

    #[cold]
    fn check_repeats(&self, frames: &[u32]) -> Result<(), FrameError> {
        repeats(frames, |frame| self.frame_word(frame).refs())
    }

    pub(crate) fn used_in_place(&self, index: usize, frame: u32) -> Result<(BlockId, BlockWord), FrameError> {
        let id = self.block_in_place(index, frame)?;
        let word = self.word(id);
        // A block that moves away leaves a free one behind.
        let is_used = !word.is_free() && word.frame().0 == frame;
        if is_used { Ok((id, word)) } else { Err(FrameError::Free { index, frame: FrameId(frame) }) }
    }

    pub(crate) fn block_in_place(&self, index: usize, frame: u32) -> Result<BlockId, FrameError> {
        let (frame, frames) = (FrameId(frame), self.total_frames());
        if frame.index() >= frames {
            Err(FrameError::OutOfRange { index, frame, frames })
        } else if self.null_block().is_some() && frame.0 == 0 {
            Err(FrameError::Null { index, frame })
        } else {
            Ok(self.space.table.block_at(frame))
        }
    }

    pub(crate) fn frame_word(&self, frame: FrameId) -> BlockWord {
        self.word(self.space.table.block_at(frame))
    }
}

pub(in crate::block) fn repeats(frames: &[u32], most: impl Fn(FrameId) -> u32) -> Result<(), FrameError> {
    // An engine's lists are mostly in few runs.
    let mut runs = RunList::new();
    runs.push_all(frames);
    if runs.are_disjoint() {
        return Ok(());
    }
    let mut sorted: Vec<(u32, usize)> = frames.iter().copied().zip(0..).collect();
    sorted.sort_unstable();
    let mut outcome: Option<FrameError> = None;
    for same in sorted.chunk_by(|a, b| a.0 == b.0).filter(|same| same.len() > 1) {
        let frame = FrameId(same[0].0);
        let references = most(frame);
        if let Some(&(_, index)) = same.get(references as usize) {
            let is_first = outcome.is_none_or(
                |error| matches!(error, FrameError::Repeated { index: other, .. } if index < other),
            );
            if is_first {
                outcome = Some(FrameError::Repeated { index, frame, listed: same.len(), references });
            }
        }
    }
    outcome.map_or(Ok(()), Err)
}

fn check_shared(index: usize, word: BlockWord) -> Result<(), FrameError> {
    let frame = word.frame();
    if word.is_free() {
        Err(FrameError::Free { index, frame })
    } else if word.refs() == BlockWord::REFS_MAX {
        Err(FrameError::TooManyReferences { index, frame, max: BlockWord::REFS_MAX })
    } else {
        Ok(())
    }
}

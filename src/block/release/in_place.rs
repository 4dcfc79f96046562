//! Operations by frame number, for an engine whose ids are frames.
//!
//! Such an engine's blocks are pinned while they have references: allocations and hits
//! pin them, the last release unpins them. A frame with references therefore keeps its block, and
//! its number names the block as an id does. Only blocks without references move.
//!
//! A list is checked as a whole before anything is changed. Each step then checks the word that it
//! replaces: it has references, and names the caller's frame. What a frame number lacks
//! is a generation: a second free of a frame is refused while the frame is free or cached, and not
//! if another owner has got it meanwhile.
//!
//! The transitions are those of sequences' lists and of pins, and so are their models: `evictable`
//! for hits, releases and evictions, `moves` for pins against moves.

use smallvec::SmallVec;

use crate::error::FrameError;
use crate::frame::RunList;
use crate::ids::{BlockId, FrameId, Run, Ticket};
use crate::sync::{AtomicU64, Ordering::*};

use super::references::ListRelease;
use crate::block::core::Core;
use crate::block::state::{Row, TableView};
use crate::block::{BlockWord, Blocks, Evictable, INLINE_BLOCKS};

/// A list of frames that was checked.
struct Checked {
    /// Number of entries whose blocks are cached.
    cached: usize,
    /// Whether the frames ascend or descend, so that none occurs twice.
    is_sorted: bool,
}

impl Blocks {
    /// Drops one reference on each frame, in the given order. `tell` gets the blocks that became
    /// evictable, like [`Evictor::became_evictable`](crate::block::Evictor::became_evictable).
    ///
    /// # Errors
    ///
    /// [`FrameError`]; nothing has changed. Exception: a frame that another thread frees at the
    /// same moment, though only one reference is left, is reported, and the others are freed.
    pub(crate) fn free_frames(
        &self,
        frames: &[u32],
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let table = self.space.table.view();
        if frames.len() > INLINE_BLOCKS
            && let Some(runs) = self.only_in_place(table, frames)
        {
            return self.free_runs(table, frames, &runs, tell);
        }
        let checked = self.check_owned(table, frames)?;
        if !checked.is_sorted {
            self.check_repeats_in_place(frames)?;
        }
        if checked.cached > 0 {
            self.free_cached_frames(frames, checked.cached, tell)
        } else if frames.len() <= INLINE_BLOCKS {
            self.free_few_frames(table, frames, tell)
        } else {
            self.free_cached_frames_from(frames, 0, 0, tell)
        }
    }

    /// As [`free_frames`](Self::free_frames), for a checked list of at most [`INLINE_BLOCKS`]
    /// frames that are not cached.
    #[inline]
    fn free_few_frames(
        &self,
        table: TableView<'_>,
        frames: &[u32],
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let mut freed = [FrameId(0); INLINE_BLOCKS];
        for (index, &frame) in frames.iter().enumerate() {
            if !self.release_only_in_place(table, FrameId(frame)) {
                // Shared, or changed since it was checked.
                self.give_back_few(&freed[..index]);
                return self.free_cached_frames_from(frames, index, 0, tell);
            }
            freed[index] = FrameId(frame);
        }
        self.give_back_few(&freed[..frames.len()]);
        Ok(())
    }

    fn give_back_few(&self, freed: &[FrameId]) {
        let cache = self.recent_thread_cache();
        let is_done = match freed {
            [] => true,
            [frame] => self.give_back_one(cache, *frame),
            _ => self.give_back_inline(cache, freed),
        };
        if !is_done {
            self.give_back_frames(cache, freed);
        }
    }

    /// As [`free_frames`](Self::free_frames), for the runs of a list that
    /// [`only_in_place`](Core::only_in_place) checked.
    fn free_runs(
        &self,
        table: TableView<'_>,
        frames: &[u32],
        runs: &RunList,
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let mut stayed = RunList::new();
        for &run in runs.iter() {
            let mut rest = run;
            while rest.len > 0 {
                let released = Core::release_run(table, rest);
                rest = Run { start: FrameId(rest.start.0 + released), len: rest.len - released };
                if rest.len > 0 {
                    stayed.push(rest.start);
                    rest = Run { start: FrameId(rest.start.0 + 1), len: rest.len - 1 };
                }
            }
        }
        if stayed.is_empty() {
            self.with_thread_cache(|cache| self.give_back(cache, runs));
            return Ok(());
        }
        self.free_rest(frames, &stayed, tell)
    }

    /// Gives back the frames that [`free_runs`](Self::free_runs) released, and frees those that it
    /// did not: other threads shared or cached them after the check. Reached by the test
    /// `threads_change_frames_of_a_list_that_is_freed`.
    #[cold]
    fn free_rest(
        &self,
        frames: &[u32],
        stayed: &[Run],
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let has_stayed = |frame: u32| stayed.iter().any(|run| (run.start.0..run.end()).contains(&frame));
        let mut freed = RunList::new();
        let mut rest = Vec::new();
        for (index, &frame) in frames.iter().enumerate() {
            if has_stayed(frame) {
                rest.push((index, frame));
            } else {
                freed.push(FrameId(frame));
            }
        }
        self.with_thread_cache(|cache| self.give_back(cache, &freed));
        self.free_entries(rest.into_iter(), 0, tell)
    }

    #[inline(never)]
    fn free_cached_frames(
        &self,
        frames: &[u32],
        cached: usize,
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        // Counted before they are evictable, as in `release_cached`.
        self.count_evictable(cached);
        self.free_cached_frames_from(frames, 0, cached, tell)
    }

    /// As [`free_frames`](Self::free_frames), for the entries of a checked list from `from` on, of
    /// which `counted` are counted as evictable.
    #[inline(never)]
    fn free_cached_frames_from(
        &self,
        frames: &[u32],
        from: usize,
        counted: usize,
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        self.free_entries(frames.iter().copied().enumerate().skip(from), counted, tell)
    }

    /// Frees frames with their positions in the caller's list, of which `counted` are counted as
    /// evictable.
    fn free_entries(
        &self,
        entries: impl Iterator<Item = (usize, u32)>,
        mut counted: usize,
        tell: impl FnOnce(&[Evictable], Ticket),
    ) -> Result<(), FrameError> {
        let (mut freed, mut evictable) = (RunList::new(), SmallVec::<[Evictable; 64]>::new());
        let (mut outcome, mut kept) = (Ok(()), 0);
        for (index, frame) in entries {
            let id = self.space.table.block_at(FrameId(frame));
            let is_right = |word: BlockWord| word.frame() == FrameId(frame);
            let mut counts = || {
                // It was cached after the check.
                if counted == 0 {
                    self.count_evictable(1);
                    counted += 1;
                }
            };
            match self.release_listed_if(id, is_right, &mut counts) {
                Ok(ListRelease::Left) => {}
                Ok(ListRelease::Shared) => kept += 1,
                Ok(ListRelease::Freed(frame)) => freed.push(frame),
                Ok(ListRelease::Evictable(word)) => {
                    counted -= 1;
                    kept += 1;
                    evictable.push(Evictable { id, word });
                }
                // Another thread has freed it since the check.
                Err(word) => outcome = outcome.and(Err(not_owned(index, FrameId(frame), word))),
            }
        }
        self.count_further(-kept);
        self.count_not_evictable(counted);
        self.tag_evictable(&evictable, tell);
        if !freed.is_empty() {
            self.with_thread_cache(|cache| self.give_back(cache, &freed));
        } else if !evictable.is_empty() {
            self.announce();
        }
        outcome
    }

    /// Adds a reference to each frame, which is referenced or cached. `tell` as in
    /// [`free_frames`](Self::free_frames).
    ///
    /// # Errors
    ///
    /// [`FrameError`]; no frame has gained a reference.
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
            let _ = self.free_cached_frames_from(&frames[..count], 0, 0, tell);
        }
        outcome
    }
}

impl Core {
    /// Drops the only reference of a block that is not cached. False: nothing was done.
    #[inline(always)]
    fn release_only_in_place(&self, table: TableView<'_>, frame: FrameId) -> bool {
        Self::is_released_in(table.row(table.block_at(frame)).word, frame)
    }

    /// Returns the runs of a list of distinct frames, each with one reference and not cached, as
    /// nearly all lists are that engines free. `None`: another list, or a wrong one.
    #[inline]
    fn only_in_place(&self, table: TableView<'_>, frames: &[u32]) -> Option<RunList> {
        let total = self.total_frames();
        if frames.iter().any(|&frame| frame as usize >= total) {
            return None;
        }
        let mut runs = RunList::new();
        runs.push_all(frames);
        let are_distinct =
            runs.is_sorted_by(|a, b| a.end() <= b.start.0) || runs.is_sorted_by(|a, b| a.start.0 >= b.end());
        (are_distinct && runs.iter().all(|&run| Self::is_only_run(table, run))).then_some(runs)
    }

    #[inline(never)]
    fn is_only_run(table: TableView<'_>, run: Run) -> bool {
        // Acquire: as in `word`.
        let word = |row: Row<'_>| BlockWord::from_bits(row.word.load(Acquire));
        table.visit_run(run, |frame, _, row| word(row).is_only_in(frame)) == run.len
    }

    /// Drops the only references of a run's blocks that are not cached, up to the first block of
    /// another kind. Returns the number of frames released.
    #[inline(never)]
    fn release_run(table: TableView<'_>, run: Run) -> u32 {
        table.visit_run(run, |frame, _, row| Self::is_released_in(row.word, frame))
    }

    #[inline(always)]
    fn is_released_in(atomic: &AtomicU64, frame: FrameId) -> bool {
        let word = BlockWord::from_bits(atomic.load(Relaxed));
        word.release_only_in(frame).is_some_and(|next| Self::is_released(atomic, word, next))
    }

    /// Adds a reference; returns whether the block was evictable.
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

    /// Refuses a list with a frame that has no references.
    #[inline]
    fn check_owned(&self, table: TableView<'_>, frames: &[u32]) -> Result<Checked, FrameError> {
        let total = self.total_frames();
        let mut cached = 0;
        for (index, &frame) in frames.iter().enumerate() {
            if frame as usize >= total {
                return Err(FrameError::OutOfRange { index, frame: FrameId(frame), frames: total });
            }
            // Acquire: as in `word`.
            let atomic = table.row(table.block_at(FrameId(frame))).word;
            let word = BlockWord::from_bits(atomic.load(Acquire));
            if !word.is_owned() || word.frame().0 != frame {
                return Err(self.why_not_owned(index, FrameId(frame), word));
            }
            cached += usize::from(word.is_cached());
        }
        let is_sorted = frames.is_sorted_by(|a, b| a < b) || frames.is_sorted_by(|a, b| a > b);
        Ok(Checked { cached, is_sorted })
    }

    #[cold]
    #[inline(never)]
    fn why_not_owned(&self, index: usize, frame: FrameId, word: BlockWord) -> FrameError {
        if self.null_block().is_some() && frame.0 == 0 {
            FrameError::Null { index, frame }
        } else {
            not_owned(index, frame, word)
        }
    }

    /// Refuses a list that contains a frame more often than it has references.
    #[cold]
    fn check_repeats_in_place(&self, frames: &[u32]) -> Result<(), FrameError> {
        repeats(frames, |frame| self.frame_word(frame).refs())
    }

    /// Returns the block of a frame that is referenced or cached, and its word.
    ///
    /// # Errors
    ///
    /// [`FrameError::OutOfRange`], [`FrameError::Null`], [`FrameError::Free`].
    pub(crate) fn used_in_place(&self, index: usize, frame: u32) -> Result<(BlockId, BlockWord), FrameError> {
        let id = self.block_in_place(index, frame)?;
        let word = self.word(id);
        // A block that moves away leaves a free one behind.
        let is_used = !word.is_free() && word.frame().0 == frame;
        if is_used { Ok((id, word)) } else { Err(FrameError::Free { index, frame: FrameId(frame) }) }
    }

    /// Returns the block of a frame of this pool other than the null block's.
    ///
    /// # Errors
    ///
    /// [`FrameError::OutOfRange`], [`FrameError::Null`].
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

    /// Returns the word of the block in a frame.
    pub(crate) fn frame_word(&self, frame: FrameId) -> BlockWord {
        self.word(self.space.table.block_at(frame))
    }
}

/// Refuses a list that contains a frame more often than `most` allows.
pub(in crate::block) fn repeats(frames: &[u32], most: impl Fn(FrameId) -> u32) -> Result<(), FrameError> {
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

fn not_owned(index: usize, frame: FrameId, word: BlockWord) -> FrameError {
    if word.is_evictable() && word.frame() == frame {
        FrameError::Unreferenced { index, frame }
    } else {
        FrameError::Free { index, frame }
    }
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

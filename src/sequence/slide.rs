//! How sequences of layers with an attention [window](super::window) give up their first blocks.
//!
//! ```text
//! place      0 .. sinks      sinks .. front      front .. blocks
//! block      held            the null block      held
//!                            given up            the window of the next tokens, and later ones
//! ```
//!
//! Positions and places stay: a table shows the null block's frame for a place that was given up.
//!
//! # When a block is given up
//!
//! Before an append or a reservation takes blocks, every block of which no token is in the
//! window of
//!
//! ```text
//! base == min(committed, first position that a batch in flight wrote, of each such batch, first
//!         position of the blocks that are not settled), rounded down to the first one of its block
//! ```
//!
//! is given up, except the last block and those of sinks. So the tables of each batch in flight
//! show the windows of all tokens that it wrote, whatever was appended since; a draft can be
//! rejected, and an abandoned batch withdrawn: both cut at `base` or later, or at 0 (see
//! [`grouped`](super::grouped)). It is not behind the
//! first open block, because a batch may write all of that block again: it stores its tokens, or
//! the engine copies it. If that batch is abandoned, the cut is at the block's first token.
//!
//! Giving up replaces the id in the list, fences, and releases the block, as a truncation does:
//! either a reader of the list does not find the block, or the release sees its batch. Model:
//! `loom-tests/tests/sequences.rs`, `a_block_that_leaves_the_window_outlives_the_batch`.
//!
//! # Hits
//!
//! A hit at a boundary needs the blocks of the window before it, and those of the sinks, but none
//! between. A sequence that adopts such a hit begins with the others given up. The blocks that left
//! a window are cached like others: they were released earlier, so LRU evicts them first.

use std::ops::Range;

use smallvec::SmallVec;

use crate::error::SequenceError;
use crate::ids::{BlockId, FrameId};
use crate::sync::Ordering::{Acquire, Relaxed};

use super::registry::SequenceView;
use super::sequence::Sequence;
use super::window::{NULL, Window};

impl Sequence {
    /// Returns the number of its blocks that were given up, behind the window.
    pub fn blocks_given_up(&self) -> usize {
        let gap = self.gap();
        // An abandoned batch may have cut it in front of them.
        (gap.end.min(self.block_count() as u32)).saturating_sub(gap.start) as usize
    }

    /// Returns the places of blocks that were given up.
    pub(super) fn gap(&self) -> Range<u32> {
        let Some(window) = self.kind.window else { return 0..0 };
        let sinks = window.sink_blocks(self.kind.block_tokens);
        sinks.min(self.front)..self.front
    }

    /// Returns whether a block of its list is a null block, in place of one that was given up.
    pub(super) fn is_null(&self, id: BlockId) -> bool {
        self.sequences.is_null(id)
    }

    /// Returns the first position of `tokens` that was given up as an error.
    pub(super) fn check_kept(&self, tokens: Range<usize>) -> Result<(), SequenceError> {
        let (gap, block_tokens) = (self.gap(), self.kind.block_tokens as usize);
        let lost = gap.start as usize * block_tokens..gap.end as usize * block_tokens;
        let position = tokens.start.max(lost.start);
        if position < tokens.end.min(lost.end) {
            return Err(SequenceError::BehindWindow { id: self.id(), position, kept_from: lost.end });
        }
        Ok(())
    }

    /// Returns an error unless it can continue after the first `length` tokens.
    pub(super) fn check_continues(&self, length: usize) -> Result<(), SequenceError> {
        let Some(window) = self.kind.window.filter(|_| self.front > 0 && length > 0) else {
            return Ok(());
        };
        let block_tokens = self.kind.block_tokens;
        // As `base`, see the module. Also the last token: its block always stays.
        let begin = window.begin(length as u32 / block_tokens * block_tokens) as usize;
        self.check_kept(begin.min(length - 1)..length)
    }

    /// Gives up blocks behind the window, before an append takes blocks.
    #[inline]
    pub(super) fn slide(&mut self) {
        if let Some(window) = self.kind.window {
            let outside = self.outside(window, self.committed.min(self.list.tokens()));
            if outside.end > self.front.max(outside.start) {
                self.slide_in(window);
            }
        }
    }

    #[inline]
    fn outside(&self, window: Window, base: u32) -> Range<u32> {
        let block_tokens = self.kind.block_tokens;
        window.outside((base / block_tokens).min(self.seals.settled()) * block_tokens, block_tokens)
    }

    #[cold]
    fn slide_in(&mut self, window: Window) {
        let clock = self.pool_blocks().clock();
        let written = self.writes.iter().filter(|write| clock.is_in_flight(write.batch));
        let base = written.map(|write| write.from).min().unwrap_or(u32::MAX);
        // Only now: batches that were abandoned are in the log by then.
        if self.is_stale() {
            return;
        }
        let base = base.min(self.committed).min(self.list.tokens());
        let outside = self.outside(window, base);
        let gone = self.give_up(outside.start.max(self.front)..outside.end);
        self.release_of_chain(self.list.len(), &gone);
    }

    /// Replaces blocks by the null block, and returns them, the last one first.
    fn give_up(&mut self, places: Range<u32>) -> SmallVec<[BlockId; 64]> {
        let mut gone = SmallVec::new();
        for place in places.rev() {
            let at = place as usize;
            gone.push(BlockId(self.list.ids()[at].load(Relaxed)));
            self.list.replace(at, NULL);
            self.frames.set(at, FrameId(0));
            self.front = self.front.max(place + 1);
        }
        gone
    }
}

impl SequenceView {
    /// As [`Sequence::check_kept`], by the ids as they are now.
    pub(super) fn check_kept(&self, tokens: &Range<usize>) -> Result<(), SequenceError> {
        if !self.sequences.has_windows() {
            return Ok(());
        }
        let block_tokens = self.list.block_tokens() as usize;
        let places = tokens.start / block_tokens..tokens.end.div_ceil(block_tokens);
        self.list.read(|ids, _| {
            let is_null = |place: &usize| {
                // Acquire: see `BlockList::read`.
                ids.get(*place).is_some_and(|id| self.sequences.is_null(BlockId(id.load(Acquire))))
            };
            let Some(place) = places.clone().find(is_null) else { return Ok(()) };
            let position = tokens.start.max(place * block_tokens);
            let kept = (place..ids.len()).find(|place| !is_null(place)).unwrap_or(ids.len());
            Err(SequenceError::BehindWindow { id: self.id(), position, kept_from: kept * block_tokens })
        })
    }
}

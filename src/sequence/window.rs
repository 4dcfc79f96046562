//! Sliding windows: sequences of layers that attend to the last tokens only.
//!
//! ```text
//! place      0 .. sinks      sinks .. front      front .. blocks
//! block      held            the null block      held
//!                            given up            the window of the next tokens, and later ones
//! ```
//!
//! A token at position `p` attends to positions `p - window + 1 ..= p`, and to the sinks. Positions
//! and places stay: a table shows the null block's frame for a place that was given up.
//!
//! # When a block is given up
//!
//! Before an append takes blocks, every sealed block of which no token is in the window of
//!
//! ```text
//! base == min(committed, first position that a batch in flight wrote, of each such batch)
//! ```
//!
//! is given up, except the last block and those of sinks. So the tables of each batch in flight show
//! the windows of all tokens that it wrote, whatever was appended since; a draft can be rejected,
//! and an abandoned batch withdrawn: both cut at `base` or later.
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

use std::num::NonZeroU32;
use std::ops::Range;

use smallvec::SmallVec;

use crate::error::{Invalid, SequenceError};
use crate::ids::{BlockId, FrameId};
use crate::prefix::WindowBlocks;
use crate::sync::Ordering::{Acquire, Relaxed};

use super::TOKENS_MAX;
use super::registry::SequenceView;
use super::sequence::Sequence;

/// The attention window of a pool's layers, in tokens.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Window {
    tokens: NonZeroU32,
    sinks: u32,
}

impl Window {
    /// Creates a window of `tokens` tokens, the token itself included, without sinks.
    ///
    /// # Errors
    /// For 0 tokens, or more than [`TOKENS_MAX`].
    pub fn new(tokens: usize) -> Result<Self, Invalid> {
        let limit = || format_args!("from 1 to {TOKENS_MAX} tokens").to_string();
        let checked = u32::try_from(tokens).ok().filter(|_| tokens <= TOKENS_MAX);
        let tokens =
            checked.and_then(NonZeroU32::new).ok_or_else(|| Invalid::new("window", tokens, limit()))?;
        Ok(Self { tokens, sinks: 0 })
    }

    /// Sets the number of first tokens of a sequence that all later ones attend to.
    pub fn sinks(mut self, tokens: u32) -> Self {
        self.sinks = tokens;
        self
    }

    /// Returns the number of tokens, the token itself included.
    pub fn tokens(&self) -> usize {
        self.tokens.get() as usize
    }

    /// Returns the number of sinks.
    pub fn sink_tokens(&self) -> usize {
        self.sinks as usize
    }

    /// Returns the first position in the window of the token at `position`.
    const fn begin(self, position: u32) -> u32 {
        position.saturating_sub(self.tokens.get() - 1)
    }

    /// Returns the places that a sequence of `tokens` tokens can do without: those behind the sinks
    /// of which the next token sees no token.
    pub(super) fn outside(self, tokens: u32, block_tokens: u32) -> Range<u32> {
        let sinks = self.sinks.div_ceil(block_tokens);
        // The last block always stays.
        let end = (self.begin(tokens) / block_tokens).min(tokens.div_ceil(block_tokens).saturating_sub(1));
        sinks.min(end)..end
    }

    /// Returns the blocks that a hit needs. The last one of a prompt is always kept.
    pub(super) fn blocks(self, block_tokens: usize) -> WindowBlocks {
        let window = (self.tokens() - 1).div_ceil(block_tokens).max(1);
        WindowBlocks { sinks: self.sink_tokens().div_ceil(block_tokens), window }
    }

    /// Returns the maximum number of blocks of a sequence while an append of `chunk` tokens is in
    /// flight that fits its window: two blocks may have tokens on one side of an edge only.
    pub(super) fn blocks_for(self, chunk: usize, block_tokens: usize) -> usize {
        let sinks = self.sink_tokens().div_ceil(block_tokens);
        sinks + (self.tokens() - 1).saturating_add(chunk).div_ceil(block_tokens) + 1
    }
}

impl Sequence {
    /// Returns the number of its blocks that were given up, behind the window.
    pub fn blocks_given_up(&self) -> usize {
        self.gap().len()
    }

    /// Returns the places of blocks that were given up.
    pub(super) fn gap(&self) -> Range<u32> {
        let Some(window) = self.sequences.0.window else { return 0..0 };
        let sinks = window.sinks.div_ceil(self.sequences.0.block_tokens);
        sinks.min(self.front)..self.front
    }

    /// Returns whether a block of its list is a null block, in place of one that was given up.
    pub(super) fn is_null(&self, id: BlockId) -> bool {
        self.sequences.is_null(id)
    }

    /// Returns the first position of `tokens` that was given up as an error.
    pub(super) fn check_kept(&self, tokens: Range<usize>) -> Result<(), SequenceError> {
        let (gap, block_tokens) = (self.gap(), self.sequences.block_tokens());
        let lost = gap.start as usize * block_tokens..gap.end as usize * block_tokens;
        let position = tokens.start.max(lost.start);
        if position < tokens.end.min(lost.end) {
            return Err(SequenceError::BehindWindow { id: self.id(), position, kept_from: lost.end });
        }
        Ok(())
    }

    /// Returns an error unless it can continue after the first `length` tokens.
    pub(super) fn check_continues(&self, length: usize) -> Result<(), SequenceError> {
        let Some(window) = self.sequences.0.window.filter(|_| self.front > 0 && length > 0) else {
            return Ok(());
        };
        // Also the last token, whose block the next one may share.
        self.check_kept((window.begin(length as u32) as usize).min(length - 1)..length)
    }

    /// Gives up blocks behind the window, before an append takes blocks.
    #[inline]
    pub(super) fn slide(&mut self) {
        if let Some(window) = self.sequences.0.window {
            let outside =
                window.outside(self.committed.min(self.list.tokens()), self.sequences.0.block_tokens);
            if outside.end > self.front.max(outside.start) {
                self.slide_in(window);
            }
        }
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
        let outside = window.outside(base, self.sequences.0.block_tokens);
        let end = outside.end.min(self.seals.settled());
        let gone = self.give_up(outside.start.max(self.front)..end);
        self.release_unlinked(&gone);
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
        if self.sequences.0.window.is_none() {
            return Ok(());
        }
        let block_tokens = self.sequences.block_tokens();
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

/// The null block of a pool that has one.
pub(super) const NULL: BlockId = BlockId(0);

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_window_of_no_tokens_is_refused() {
        for tokens in [0, TOKENS_MAX + 1, usize::MAX] {
            let error = Window::new(tokens).unwrap_err().to_string();
            assert!(error.contains("window") && error.contains(&tokens.to_string()), "{error}");
        }
        assert_eq!(Window::new(TOKENS_MAX).unwrap().tokens(), TOKENS_MAX);
    }

    proptest! {
        /// Every place outside has no token that the next one sees, and the next place has one.
        #[test]
        fn outside_is_what_the_next_token_does_not_see(
            window in 1u32..70, sinks in 0u32..40, tokens in 0u32..300, block_tokens in 1u32..20,
        ) {
            let outside = Window::new(window as usize).unwrap().sinks(sinks).outside(tokens, block_tokens);
            let sees = |position: u32| position < sinks || position + window > tokens;
            let blocks = tokens.div_ceil(block_tokens);
            for place in 0..blocks {
                let sees_any = (place * block_tokens..tokens.min((place + 1) * block_tokens)).any(sees);
                let is_kept = sees_any || place + 1 == blocks;
                prop_assert_eq!(outside.contains(&place), !is_kept, "place {}", place);
            }
        }
    }
}

//! The attention window of a pool's layers: which blocks a sequence needs. Pure arithmetic.
//!
//! A token at position `p` attends to positions `p - window + 1 ..= p`, and to the sinks.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::config::FAN;
use crate::error::Invalid;
use crate::ids::BlockId;
use crate::prefix::WindowBlocks;

use super::TOKENS_MAX;

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
    pub(super) const fn begin(self, position: u32) -> u32 {
        position.saturating_sub(self.tokens.get() - 1)
    }

    /// Returns the places that a sequence of `tokens` tokens can do without: those behind the sinks
    /// of which the next token sees no token.
    pub(super) fn outside(self, tokens: u32, block_tokens: u32) -> Range<u32> {
        let sinks = self.sink_blocks(block_tokens);
        // The last block always stays.
        let end = (self.begin(tokens) / block_tokens).min(tokens.div_ceil(block_tokens).saturating_sub(1));
        sinks.min(end)..end
    }

    /// Returns the most first blocks that a list of this many tokens may state as given up: those that
    /// the final tokens leave, and in any case those of the sinks, which are kept.
    pub(super) fn front_max(self, committed: u32, tokens: u32, block_tokens: u32) -> u32 {
        // As `Sequence::check_continues`: the block of the last token always stays.
        let begin = self.begin(committed / block_tokens * block_tokens).min(tokens.saturating_sub(1));
        let sinks = self.sink_blocks(block_tokens).min(tokens.div_ceil(block_tokens));
        sinks.max(begin / block_tokens)
    }

    /// Returns the number of first blocks that hold the sinks.
    pub(super) fn sink_blocks(self, block_tokens: u32) -> u32 {
        self.sinks.div_ceil(block_tokens)
    }

    /// Returns the blocks that a hit needs. The last one of a prompt is always kept.
    pub(super) fn blocks(self, block_tokens: usize) -> WindowBlocks {
        let window = (self.tokens() - 1).div_ceil(block_tokens).max(1);
        WindowBlocks { sinks: self.sink_tokens().div_ceil(block_tokens), window }
    }

    /// Returns the maximum number of blocks of a sequence while an append of `chunk` tokens is in
    /// flight: those of a hit at the first token of its last block, and those of that token and the
    /// ones behind it, of which all but the last may be there already.
    pub fn blocks_for(self, chunk: usize, block_tokens: usize) -> usize {
        let WindowBlocks { sinks, window } = self.blocks(block_tokens);
        chunk.saturating_add(block_tokens - 1).div_ceil(block_tokens).saturating_add(sinks + window)
    }
}

/// What a list of blocks keeps, and the tokens of its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ListKind {
    pub(crate) window: Option<Window>,
    pub(crate) block_tokens: u32,
}

impl ListKind {
    /// Returns whether its blocks are given up so soon that they need not lie in whole units.
    fn is_short(self) -> bool {
        const BLOCKS_MAX: usize = FAN / 4;
        self.needs().is_some_and(|needs| needs.window + needs.sinks <= BLOCKS_MAX)
    }

    /// Returns which lists leave whole units to the others: none if all are short.
    pub(super) fn short_of(kinds: &[Self]) -> Box<[bool]> {
        let are_all = kinds.iter().all(|kind| kind.is_short());
        kinds.iter().map(|kind| kind.is_short() && !are_all).collect()
    }

    /// Returns the blocks that a hit needs, if not all.
    pub(super) fn needs(self) -> Option<WindowBlocks> {
        self.window.map(|window| window.blocks(self.block_tokens as usize))
    }

    /// Returns how many of the blocks before the boundary of a hit are taken.
    pub(super) fn held_of(self, hits: usize) -> usize {
        hits - self.needs().map_or(0, |needs| needs.gap(hits).len())
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

        /// A list may state what its final tokens leave, but never the block of its last token.
        #[test]
        fn the_last_block_is_never_stated_as_given_up(
            window in 1u32..40, sinks in 0u32..20, committed in 0u32..200, draft in 0u32..20,
            block_tokens in 1u32..20,
        ) {
            let (window, tokens) = (Window::new(window as usize).unwrap().sinks(sinks), committed + draft);
            let most = window.front_max(committed, tokens, block_tokens);
            let outside = window.outside(committed / block_tokens * block_tokens, block_tokens);
            prop_assert!(most >= outside.end);
            let kept = most <= window.sink_blocks(block_tokens) || most < tokens.div_ceil(block_tokens);
            prop_assert!(kept && most <= tokens.div_ceil(block_tokens), "{most}");
        }

        /// An append of a chunk to a sequence of any length holds at most the blocks of a chunk.
        #[test]
        fn a_chunk_fits_its_blocks(
            window in 1u32..40, sinks in 0u32..20, chunk in 1u32..40, block_tokens in 1u32..20,
        ) {
            let window = Window::new(window as usize).unwrap().sinks(sinks);
            let held = |tokens: u32| {
                let outside = window.outside(tokens / block_tokens * block_tokens, block_tokens);
                (tokens + chunk).div_ceil(block_tokens) - outside.len() as u32
            };
            let most = (0..200).map(held).max().unwrap_or(0);
            prop_assert_eq!(window.blocks_for(chunk as usize, block_tokens as usize), most as usize);
        }
    }
}

//! Which blocks an append writes: pure arithmetic.
//!
//! ```text
//! blocks(tokens) == ceil(tokens / block_tokens)
//! tail.is_some() == (length is not a whole number of blocks)
//! first + (tail ? 1 : 0) == blocks(length),  blocks(length) + fresh == blocks(length + tokens)
//! ```

use std::ops::Range;

use crate::error::SequenceError;
use crate::ids::SequenceId;

/// Maximum number of tokens of a sequence: the largest `i32` of a kernel.
pub const TOKENS_MAX: usize = i32::MAX as usize;

#[cold]
pub(super) fn too_long(id: SequenceId, tokens: usize, length: usize) -> SequenceError {
    let got = format_args!("{tokens} after {length}");
    SequenceError::invalid(id, "tokens", got, format_args!("at most {TOKENS_MAX} in all"))
}

#[cold]
pub(super) fn zero_tokens(id: SequenceId) -> SequenceError {
    SequenceError::invalid(id, "tokens", 0, "at least 1")
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Growth {
    pub from: u32,
    pub length: u32,
    /// Place of the first block written to.
    pub first: u32,
    /// Whether that block already has tokens.
    pub tail: bool,
    pub fresh: u32,
    pub full: u32,
}

impl Growth {
    /// Plans the growth by `tokens` that fit into the last block, else `None`. Does not divide.
    #[inline]
    pub(super) fn within_last(length: u32, blocks: u32, tokens: u32, block_tokens: u32) -> Option<Self> {
        let (after, room) = (length + tokens, u64::from(blocks) * u64::from(block_tokens));
        if u64::from(after) > room {
            return None;
        }
        let full = blocks - u32::from(u64::from(after) < room);
        Some(Self { from: length, length: after, first: blocks - 1, tail: true, fresh: 0, full })
    }

    /// Plans the growth of `length` tokens in `blocks` blocks by `tokens`. `None`: too long.
    #[inline]
    pub(super) fn plan(length: u32, blocks: u32, tokens: usize, block_tokens: u32) -> Option<Self> {
        debug_assert_eq!(blocks, length.div_ceil(block_tokens));
        if tokens > TOKENS_MAX - length as usize {
            return None;
        }
        let after = length + tokens as u32;
        if let Some(growth) = Self::within_last(length, blocks, tokens as u32, block_tokens) {
            return Some(growth);
        }
        let tail = !length.is_multiple_of(block_tokens);
        Some(Self {
            from: length,
            length: after,
            first: blocks - u32::from(tail),
            tail,
            fresh: after.div_ceil(block_tokens) - blocks,
            full: after / block_tokens,
        })
    }
}

/// Splits a range of tokens at block boundaries, into pairs of a block's place and token offsets.
pub(super) fn pieces(tokens: Range<u32>, block_tokens: u32) -> impl Iterator<Item = (u32, Range<u32>)> {
    let blocks =
        if tokens.is_empty() { 0..0 } else { tokens.start / block_tokens..tokens.end.div_ceil(block_tokens) };
    blocks.map(move |block| {
        let base = block * block_tokens;
        let from = tokens.start.saturating_sub(base);
        let to = (tokens.end - base).min(block_tokens);
        (block, from..to)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_counting(length in 0u32..200, tokens in 1usize..200, block_tokens in 1u32..40) {
            let blocks_before = length.div_ceil(block_tokens);
            let plan = Growth::plan(length, blocks_before, tokens, block_tokens).unwrap();
            let mut blocks: Vec<u32> = Vec::new();
            let put = |blocks: &mut Vec<u32>| match blocks.last_mut() {
                Some(last) if *last < block_tokens => *last += 1,
                _ => blocks.push(1),
            };
            (0..length).for_each(|_| put(&mut blocks));
            let before = blocks.clone();
            (0..tokens).for_each(|_| put(&mut blocks));
            let first = (0..).find(|&i| before.get(i) != blocks.get(i)).unwrap();
            prop_assert_eq!((plan.from, plan.length as usize), (length, length as usize + tokens));
            prop_assert_eq!(plan.first as usize, first);
            prop_assert_eq!(plan.tail, first < before.len());
            prop_assert_eq!(plan.fresh as usize, blocks.len() - before.len());
            prop_assert_eq!(plan.full as usize, blocks.iter().filter(|&&have| have == block_tokens).count());
        }

        #[test]
        fn pieces_are_the_range(start in 0u32..200, len in 0u32..200, block_tokens in 1u32..40) {
            let tokens: Vec<u32> = pieces(start..start + len, block_tokens)
                .flat_map(|(block, inside)| {
                    assert!(!inside.is_empty() && inside.end <= block_tokens);
                    inside.map(move |offset| block * block_tokens + offset)
                })
                .collect();
            prop_assert_eq!(tokens, (start..start + len).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_length_past_i32_is_refused() {
        assert_eq!(Growth::plan(1, 1, TOKENS_MAX, 16), None);
        assert_eq!(Growth::plan(1, 1, usize::MAX, 16), None);
        let longest = Growth::plan(1, 1, TOKENS_MAX - 1, 1).unwrap();
        assert_eq!((longest.length, longest.full), (i32::MAX as u32, i32::MAX as u32));
    }
}

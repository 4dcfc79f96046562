//! The choice of the frame, and of the tokens and frames of each block.
//!
//! Frames have one size. A frame of a block of tokens holds whole layers: of `n` layers in `k`
//! frames, each has the next `ceil(n / k)`. Groups that keep the same tokens share their blocks,
//! and each frame holds such a part of every one of them. The states of a group are one run of
//! frames, which divides layers anywhere, and so is a ring. What layers do not fill of the frames,
//! with the padding of tiles, is the waste. More tokens per block waste less; but the last block of
//! a sequence is half empty on average, and each frame of a block is a list in a pool, of which
//! there are not too many.
//!
//! Therefore the choice has the fewest tokens per block with which some frame keeps the waste of
//! every block within the limit. Of these frames it is the largest with a quarter of that waste, if
//! one has 64 KiB or more, and otherwise the largest.
//!
//! If no frame keeps to that limit, the bytes of a sequence of 4,096 tokens count: of the choices
//! within 2 % of the fewest, it is the one with the fewest frames of blocks of tokens.

use super::options::BLOCK_TOKENS;
use super::shared::{BLOCK_TOKENS_MAX, Block, LISTS_MAX, SharedBlock, Size};

/// Share of a block that may be padding.
const WASTE_MAX: f64 = 0.01;

/// Smallest frame in bytes, unless a block is smaller: every frame has a word and other state.
const FRAME_BYTES_MIN: u64 = 4096;

/// Size from which a smaller frame is taken to waste less.
const FRAME_BYTES_AMPLE: u64 = 64 << 10;

/// Length of the sequence that counts where the waste is above the limit.
const SEQUENCE_TOKENS: u64 = 4096;

/// Largest number of tokens of a block there, unless a ratio of compression needs more: half of the
/// last block of that sequence is then a 64th of it.
const SEQUENCE_BLOCK_TOKENS_MAX: u64 = 128;

/// Share of that sequence's bytes that fewer frames may add.
const SEQUENCE_BYTES_SPARE: f64 = 0.02;

/// A frame size, and the tokens and frames of each block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    pub(super) frame_bytes: u64,
    pub(super) blocks: Vec<Block>,
}

impl Choice {
    /// Picks one of each block for frames of this size; `None` if there is none, or if there are
    /// too many lists.
    fn of(
        shared: &[SharedBlock],
        frame_bytes: u64,
        pick: impl FnMut(&SharedBlock) -> Option<Block>,
    ) -> Option<Self> {
        let blocks: Vec<Block> = shared.iter().map(pick).collect::<Option<_>>()?;
        let choice = Self { frame_bytes, blocks };
        (choice.lists(shared) <= LISTS_MAX).then_some(choice)
    }

    /// Returns the number of frames of all blocks of tokens.
    fn lists(&self, shared: &[SharedBlock]) -> u64 {
        let of_tokens = self.blocks.iter().zip(shared).filter(|(_, of)| !of.reach.is_run());
        of_tokens.map(|(block, _)| block.frames).sum()
    }

    /// Returns the bytes of a sequence of [`SEQUENCE_TOKENS`].
    fn sequence_bytes(&self, shared: &[SharedBlock]) -> u64 {
        let frames = self.blocks.iter().zip(shared).map(|(block, of)| sequence_frames(of, block));
        frames.fold(0, u64::saturating_add).saturating_mul(self.frame_bytes)
    }

    /// Returns the largest waste of a block.
    fn waste(&self) -> f64 {
        self.blocks.iter().map(|block| block.waste(self.frame_bytes)).fold(0.0, f64::max)
    }
}

/// Chooses the frame for these blocks, of which there is at least one. Runs are longer than a
/// segment only if more would be wasted otherwise than the limit allows.
pub(super) fn choose(shared: &[SharedBlock], segment_frames: u64) -> Choice {
    if let [one] = shared {
        let size = &one.sizes[0];
        let frame_bytes = size.candidates()[0];
        let blocks = size.block(frame_bytes).into_iter().collect();
        return Choice { frame_bytes, blocks };
    }
    let candidates = candidates(shared);
    let within = |segment_frames| within_limit(shared, &candidates, segment_frames);
    let choice = within(segment_frames).or_else(|| within(u64::MAX));
    choice.unwrap_or_else(|| with_fewest_bytes(shared, &candidates, segment_frames))
}

/// Returns the frames to try: those that some block fills.
fn candidates(shared: &[SharedBlock]) -> Vec<u64> {
    let sizes = || shared.iter().flat_map(|of| &of.sizes).map(Size::candidates);
    let least = sizes().map(|frames| frames[0]).fold(FRAME_BYTES_MIN, u64::min);
    let mut all: Vec<u64> = sizes().flatten().filter(|&frame| frame >= least).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns the best choice of those that keep to the limit of waste.
fn within_limit(shared: &[SharedBlock], candidates: &[u64], segment_frames: u64) -> Option<Choice> {
    let tokens = std::iter::successors(Some(BLOCK_TOKENS), |most| Some(most * 2));
    tokens.take_while(|&most| most <= BLOCK_TOKENS_MAX).find_map(|most| {
        let choices: Vec<_> = candidates
            .iter()
            .filter_map(|&frame| Choice::of(shared, frame, |of| tightest(of, frame, most, segment_frames)))
            .collect();
        [(WASTE_MAX / 4.0, FRAME_BYTES_AMPLE), (WASTE_MAX, 0)].into_iter().find_map(|(limit, least)| {
            let is_within = |choice: &&Choice| choice.waste() <= limit && choice.frame_bytes >= least;
            choices.iter().filter(is_within).max_by_key(|choice| choice.frame_bytes).cloned()
        })
    })
}

/// Returns the block of the fewest tokens that keeps to the limit of waste, otherwise the one that
/// wastes least; `None` if none fits, or a run is longer than a segment.
fn tightest(of: &SharedBlock, frame_bytes: u64, most: u64, segment_frames: u64) -> Option<Block> {
    let mut best: Option<Block> = None;
    for block in fitting(of, frame_bytes, most, segment_frames) {
        if best.is_none_or(|best| block.waste(frame_bytes) < best.waste(frame_bytes)) {
            best = Some(block);
        }
        if block.waste(frame_bytes) <= WASTE_MAX {
            break;
        }
    }
    best
}

/// Returns a choice of about the fewest bytes for a sequence.
fn with_fewest_bytes(shared: &[SharedBlock], candidates: &[u64], segment_frames: u64) -> Choice {
    let most = SEQUENCE_BLOCK_TOKENS_MAX;
    let pick = |of: &SharedBlock, frame: u64| {
        fitting(of, frame, most, segment_frames)
            .min_by_key(|block| (sequence_frames(of, block), block.frames))
    };
    let choices: Vec<_> =
        candidates.iter().filter_map(|&frame| Choice::of(shared, frame, |of| pick(of, frame))).collect();
    let bytes = |choice: &Choice| choice.sequence_bytes(shared);
    let least = choices.iter().map(bytes).min().unwrap_or(0) as f64;
    let is_near = |choice: &Choice| bytes(choice) as f64 <= least * (1.0 + SEQUENCE_BYTES_SPARE);
    let near = choices.into_iter().filter(is_near);
    let best = near.min_by_key(|choice| (choice.lists(shared), bytes(choice)));
    best.expect("the largest block is one frame, and so are all others then")
}

/// Returns the frames of a sequence of [`SEQUENCE_TOKENS`], in these blocks.
fn sequence_frames(of: &SharedBlock, block: &Block) -> u64 {
    of.reach.blocks(SEQUENCE_TOKENS, block.tokens, 1).saturating_mul(block.frames)
}

/// Returns the blocks of at most `most` tokens that fit frames of this size, ascending.
fn fitting(
    of: &SharedBlock,
    frame_bytes: u64,
    most: u64,
    segment_frames: u64,
) -> impl Iterator<Item = Block> + '_ {
    let blocks = of.sizes(most).iter().filter_map(move |size| size.block(frame_bytes));
    blocks.filter(move |block| !of.reach.is_run() || block.frames <= segment_frames)
}

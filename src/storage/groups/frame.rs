//! The choice of the frame, and of the tokens of a block in each group.
//!
//! Frames have one size. A block of a group is a run of them, so its bytes are rounded up to a
//! multiple of the frame; that padding, with the padding of tiles, is the waste. More tokens per
//! block and smaller frames waste less. But the last block of a sequence is half empty on average,
//! small frames make long runs, and each frame has state.
//!
//! Therefore the choice has the fewest tokens per block with which some frame keeps the waste of
//! every group within the limit. Of these frames it is the largest with a quarter of that waste, if
//! one has 64 KiB or more, and otherwise the largest.

use crate::storage::plane::TILE_ALIGN;

use super::options::HASH_TOKENS;
use super::shape::Shape;

/// Share of a block that may be padding.
const WASTE_MAX: f64 = 0.01;

/// Smallest frame in bytes, unless a block is smaller: every frame has a word and other state.
const FRAME_BYTES_MIN: u64 = 4096;

/// Size from which a smaller frame is taken to waste less.
const FRAME_BYTES_AMPLE: u64 = 64 << 10;

/// Largest number of frames into which a block is divided to find a frame that others share.
const FRAMES_TRIED: u64 = 64;

/// Largest number of tokens of a block, unless a ratio of compression needs more.
const BLOCK_TOKENS_MAX: u64 = 256;

/// A frame size, and for each group the tokens and frames of a block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Choice {
    pub(super) frame_bytes: u64,
    pub(super) blocks: Vec<Block>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    pub(super) tokens: u64,
    pub(super) frames: u64,
}

/// Chooses the frame for these groups, of which there is at least one. Blocks are longer than a
/// segment only if more would be wasted otherwise than the limit allows.
pub(super) fn choose(shapes: &[Shape], segment_frames: u64) -> Choice {
    if let [shape] = shapes {
        let tokens = shape.block_tokens(BLOCK_TOKENS_MAX)[0];
        let blocks = vec![Block { tokens, frames: 1 }];
        return Choice { frame_bytes: shape.tiled_bytes(tokens), blocks };
    }
    let candidates = candidates(shapes);
    let (waste, choice) = search(shapes, &candidates, segment_frames);
    if waste <= WASTE_MAX {
        return choice;
    }
    let (without, longer) = search(shapes, &candidates, u64::MAX);
    if without <= WASTE_MAX { longer } else { choice }
}

/// Returns the best choice, and the largest waste of a group.
fn search(shapes: &[Shape], candidates: &[u64], segment_frames: u64) -> (f64, Choice) {
    let mut most = HASH_TOKENS;
    loop {
        let choices: Vec<_> =
            candidates.iter().filter_map(|&frame| with_frame(shapes, frame, most, segment_frames)).collect();
        for (limit, least) in [(WASTE_MAX / 4.0, FRAME_BYTES_AMPLE), (WASTE_MAX, 0)] {
            let is_within = |(waste, choice): &&(f64, Choice)| *waste <= limit && choice.frame_bytes >= least;
            let within = choices.iter().filter(is_within);
            if let Some(best) = within.max_by_key(|(_, choice)| choice.frame_bytes) {
                return best.clone();
            }
        }
        most *= 2;
        if most > BLOCK_TOKENS_MAX {
            let least = choices.into_iter().min_by(|(a, _), (b, _)| a.total_cmp(b));
            return least.expect("one frame is as large as the largest block");
        }
    }
}

/// Returns the frames to try: fractions of blocks.
fn candidates(shapes: &[Shape]) -> Vec<u64> {
    let blocks_of = |shape: &Shape| {
        let all = shape.block_tokens(BLOCK_TOKENS_MAX).into_iter();
        all.map(|tokens| shape.tiled_bytes(tokens)).collect::<Vec<u64>>()
    };
    let blocks: Vec<u64> = shapes.iter().flat_map(blocks_of).collect();
    let least = blocks.iter().copied().fold(FRAME_BYTES_MIN, u64::min);
    let fractions = |&bytes: &u64| {
        (1..=FRAMES_TRIED).map(move |parts| bytes.div_ceil(parts).next_multiple_of(TILE_ALIGN as u64))
    };
    let mut all: Vec<u64> = blocks.iter().flat_map(fractions).filter(|&frame| frame >= least).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns the blocks of at most `most` tokens in frames of this size, and the largest waste of a
/// group; `None` if a block is longer than a segment. Each group has the fewest tokens that keep it
/// within the limit, otherwise those that waste least.
fn with_frame(shapes: &[Shape], frame_bytes: u64, most: u64, segment_frames: u64) -> Option<(f64, Choice)> {
    let mut worst = 0.0_f64;
    let mut blocks = Vec::with_capacity(shapes.len());
    for shape in shapes {
        let mut best: Option<(f64, Block)> = None;
        for tokens in shape.block_tokens(most) {
            let frames = shape.tiled_bytes(tokens).div_ceil(frame_bytes);
            let waste = waste(shape.packed_bytes(tokens), frames.saturating_mul(frame_bytes));
            if frames <= segment_frames && best.is_none_or(|(least, _)| waste < least) {
                best = Some((waste, Block { tokens, frames }));
            }
            if best.is_some_and(|(least, _)| least <= WASTE_MAX) {
                break;
            }
        }
        let (waste, block) = best?;
        worst = worst.max(waste);
        blocks.push(block);
    }
    Some((worst, Choice { frame_bytes, blocks }))
}

/// Returns the share of `held` bytes that is padding.
pub(super) fn waste(packed: u64, held: u64) -> f64 {
    held.saturating_sub(packed) as f64 / held.max(1) as f64
}

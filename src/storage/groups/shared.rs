//! The blocks that groups share, and how large a frame must be for them.

use super::layer::Reach;
use super::options::BLOCK_TOKENS;
use super::shape::{Shape, tiled};

/// Largest number of tokens of a block, unless a ratio of compression needs more.
pub(super) const BLOCK_TOKENS_MAX: u64 = 256;

/// Largest number of frames of the blocks of tokens of all groups together. In a pool each is a
/// list of its own, and an append pays for every list.
pub(super) const LISTS_MAX: u64 = 32;

/// Largest number of frames into which a run is divided to find a frame that others share.
const RUN_FRAMES_TRIED: u64 = 64;

/// The blocks of one group, or of several that keep the same tokens.
#[derive(Debug)]
pub(super) struct SharedBlock {
    /// What the first group keeps.
    pub(super) reach: Reach,
    /// The groups, ascending.
    pub(super) groups: Vec<usize>,
    /// The numbers of tokens to choose from, ascending. There is at least one.
    pub(super) sizes: Vec<Size>,
}

/// A block of one number of tokens.
#[derive(Debug)]
pub(super) struct Size {
    tokens: u64,
    packed_bytes: u64,
    frames: Frames,
}

/// A block in frames of a chosen size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    pub(super) tokens: u64,
    pub(super) frames: u64,
    /// Bytes without padding.
    pub(super) packed_bytes: u64,
}

#[derive(Debug)]
enum Frames {
    /// Consecutive frames for so many bytes.
    Run(u64),
    /// Frames of whole layers: the bytes of each if there is one, two, and so on.
    Layers(Vec<u64>),
}

impl SharedBlock {
    /// Returns the blocks of these groups, in the order of their first groups.
    ///
    /// A group shares the blocks of others if their tokens remain a multiple of all ratios of
    /// compression, and at most [`BLOCK_TOKENS_MAX`].
    pub(super) fn all(shapes: &[Shape]) -> Vec<Self> {
        let mut all: Vec<(u64, Vec<usize>)> = Vec::new();
        for (group, shape) in shapes.iter().enumerate() {
            let ratio = shape.reach.ratio();
            let joined = all.iter_mut().find_map(|(step, groups)| {
                let multiple = common_multiple(*step, ratio);
                let is_one = shares(shapes[groups[0]].reach, shape.reach) && multiple <= BLOCK_TOKENS_MAX;
                is_one.then_some((step, multiple, groups))
            });
            match joined {
                Some((step, multiple, groups)) => {
                    *step = multiple;
                    groups.push(group);
                }
                None => all.push((common_multiple(BLOCK_TOKENS, ratio), vec![group])),
            }
        }
        all.into_iter().map(|(step, groups)| Self::of(shapes, step, groups)).collect()
    }

    fn of(shapes: &[Shape], step: u64, groups: Vec<usize>) -> Self {
        let reach = shapes[groups[0]].reach;
        let shared: Vec<&Shape> = groups.iter().map(|&group| &shapes[group]).collect();
        let sum =
            |of: &dyn Fn(&Shape) -> u64| shared.iter().map(|shape| of(shape)).fold(0, u64::saturating_add);
        let layers = shared.iter().map(|shape| shape.layers.len() as u64).max().unwrap_or(1);
        // Frames of equal numbers of layers need the same bytes only if the layers do.
        let most = if shared.iter().all(|shape| shape.is_even) { layers.min(LISTS_MAX) } else { 1 };
        let size = |tokens| Size {
            tokens,
            packed_bytes: sum(&|shape| shape.packed_bytes(tokens)),
            frames: if reach.is_run() {
                Frames::Run(sum(&|shape| shape.tiled_bytes(tokens)))
            } else {
                let bytes = |frames| sum(&|shape| shape.frame_bytes(tokens, frames));
                Frames::Layers((1..=most).map(bytes).collect())
            },
        };
        let sizes = block_tokens(reach, step).into_iter().map(size).collect();
        Self { reach, groups, sizes }
    }

    /// Returns the sizes of at most so many tokens; the first if all have more.
    pub(super) fn sizes(&self, most: u64) -> &[Size] {
        &self.sizes[..self.sizes.partition_point(|size| size.tokens <= most).max(1)]
    }
}

impl Size {
    /// Returns the block in frames of this size; `None` if no number of frames is enough.
    pub(super) fn block(&self, frame_bytes: u64) -> Option<Block> {
        let frames = match &self.frames {
            Frames::Run(bytes) => bytes.div_ceil(frame_bytes),
            // More frames hold fewer layers each.
            Frames::Layers(needed) => {
                let too_few = needed.partition_point(|&bytes| bytes > frame_bytes);
                (too_few < needed.len()).then_some(too_few as u64 + 1)?
            }
        };
        Some(Block { tokens: self.tokens, frames, packed_bytes: self.packed_bytes })
    }

    /// Returns the frames that this block fills, the largest first: the whole block, and parts of
    /// it.
    pub(super) fn candidates(&self) -> Vec<u64> {
        match &self.frames {
            Frames::Run(bytes) => (1..=RUN_FRAMES_TRIED).map(|parts| tiled(bytes.div_ceil(parts))).collect(),
            Frames::Layers(needed) => needed.clone(),
        }
    }
}

impl Block {
    /// Returns the bytes of the block in frames of this size.
    pub(super) fn bytes(&self, frame_bytes: u64) -> u64 {
        self.frames.saturating_mul(frame_bytes)
    }

    /// Returns the share of these bytes that is padding.
    pub(super) fn waste(&self, frame_bytes: u64) -> f64 {
        let held = self.bytes(frame_bytes);
        held.saturating_sub(self.packed_bytes) as f64 / held.max(1) as f64
    }
}

/// Returns whether sequences keep these entries for the same tokens.
fn shares(one: Reach, other: Reach) -> bool {
    match one {
        Reach::All | Reach::Compressed { .. } => matches!(other, Reach::All | Reach::Compressed { .. }),
        Reach::Window { .. } | Reach::Chunk { .. } => one == other,
        _ => false,
    }
}

/// Returns the numbers of tokens of a block, ascending. All tokens are kept in multiples of `step`.
fn block_tokens(reach: Reach, step: u64) -> Vec<u64> {
    let doubled = |first: u64, most: u64| {
        let up = std::iter::successors(Some(first), |tokens| tokens.checked_mul(2));
        let mut up: Vec<u64> = up.take_while(|&tokens| tokens <= most).collect();
        if up.is_empty() {
            up.push(first);
        }
        up
    };
    match reach {
        // One block, which is not a number of tokens.
        Reach::State => vec![BLOCK_TOKENS],
        Reach::Ring { tokens } => vec![tokens],
        // In blocks of a hash unit, such a window would hold twice its bytes and more.
        Reach::Window { tokens, .. } if tokens < BLOCK_TOKENS => {
            doubled(1 << (tokens / 2).max(1).ilog2(), BLOCK_TOKENS)
        }
        Reach::Window { tokens, .. } | Reach::Chunk { tokens } => {
            doubled(BLOCK_TOKENS, BLOCK_TOKENS_MAX.min(tokens))
        }
        _ => doubled(step, BLOCK_TOKENS_MAX),
    }
}

pub(crate) fn common_divisor(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { common_divisor(other, one % other) }
}

/// Returns the least common multiple of positive numbers, or the largest number.
pub(crate) fn common_multiple(one: u64, other: u64) -> u64 {
    (one / common_divisor(one, other)).saturating_mul(other)
}

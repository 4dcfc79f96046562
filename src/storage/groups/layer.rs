//! What a layer caches: the bytes of an entry, and the entries that a sequence keeps.

use crate::dtype::Dtype;
use crate::error::LayersError;

/// Maximum number of bytes of an entry in one layer.
const ROW_BYTES_MAX: u64 = 1 << 32;
/// Maximum number of tokens of a window, a chunk or a ring.
const TOKENS_MAX: u64 = 1 << 32;
/// Maximum number of tokens per entry, and of entries in a ring.
const RATIO_MAX: u64 = 1 << 12;

/// Bytes of one entry of one layer: of a token, of several with [`Reach::Compressed`], or of a
/// state.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Row {
    /// K and V of a number of heads, in the dtype of the options.
    Heads {
        /// Number of KV heads.
        kv_heads: u64,
        /// Elements of K per head.
        k_dim: u64,
        /// Elements of V per head; 0 if V is not stored.
        v_dim: u64,
    },
    /// One vector that all heads share, in the dtype of the options.
    Latent {
        /// Number of elements.
        elements: u64,
        /// Bytes beside it under the same block id, such as the keys of a sparse index; can be 0.
        side_bytes: u64,
    },
    /// A number of bytes of any form.
    Bytes {
        /// Number of bytes.
        bytes: u64,
        /// Bytes beside them under the same block id; can be 0.
        side_bytes: u64,
    },
}

impl Row {
    /// Returns the row of a state or another run of bytes, with nothing beside it.
    pub const fn bytes(bytes: u64) -> Self {
        Self::Bytes { bytes, side_bytes: 0 }
    }

    /// Returns the bytes of K (or of the one vector), of V, and of what is beside them. Those that
    /// the row does not have are 0.
    pub(super) fn widths(self, dtype: Dtype) -> [u64; 3] {
        let element = dtype.bytes() as u64;
        let bytes = |heads: u64, dim: u64| heads.saturating_mul(dim).saturating_mul(element);
        match self {
            Self::Heads { kv_heads, k_dim, v_dim } => [bytes(kv_heads, k_dim), bytes(kv_heads, v_dim), 0],
            Self::Latent { elements, side_bytes } => [bytes(1, elements), 0, side_bytes],
            Self::Bytes { bytes, side_bytes } => [bytes, 0, side_bytes],
        }
    }
}

/// Entries of a layer that a sequence keeps.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Reach {
    /// An entry for every token.
    All,
    /// An entry for every `ratio` tokens.
    Compressed {
        /// Number of tokens per entry.
        ratio: u64,
    },
    /// The last tokens, and the first ones.
    Window {
        /// Number of tokens that a token attends to, with itself.
        tokens: u64,
        /// Number of first tokens that are kept too (attention sinks).
        sinks: u64,
    },
    /// The tokens since the last multiple of a length.
    Chunk {
        /// Number of tokens of a chunk.
        tokens: u64,
    },
    /// One state, whatever the number of tokens.
    State,
    /// The last tokens, in one block that is overwritten in a circle.
    Ring {
        /// Number of tokens.
        tokens: u64,
    },
    /// An entry for every token, and for tokens that are drafted ahead of it.
    Draft {
        /// Number of tokens ahead.
        ahead: u64,
    },
    /// No blocks of its own. A row of zero bytes reads the other layer's; one of more bytes is a
    /// column beside it, under the same block ids.
    Follows {
        /// The layer that is followed, which must keep blocks of its own.
        layer: usize,
    },
}

/// One cache of a layer. Most layers have one; a layer with none caches nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayerCache {
    /// Bytes of an entry.
    pub row: Row,
    /// Entries that a sequence keeps.
    pub reach: Reach,
}

impl LayerCache {
    /// Returns a cache with an entry for every token.
    pub const fn all(row: Row) -> Self {
        Self { row, reach: Reach::All }
    }

    /// Checks all numbers, so that no sum of bytes overflows later.
    pub(super) fn check(self, layer: usize, dtype: Dtype) -> Result<(), LayersError> {
        let within = |field, got, min, max| {
            let error = LayersError::OutOfBounds { field, layer, got, min, max };
            if (min..=max).contains(&got) { Ok(()) } else { Err(error) }
        };
        let [first, second, side] = self.row.widths(dtype);
        let least = if matches!(self.reach, Reach::Follows { .. }) { 0 } else { 1 };
        within("bytes of an entry", first, least, ROW_BYTES_MAX)?;
        within("bytes of V", second, 0, ROW_BYTES_MAX)?;
        within("bytes beside an entry", side, 0, ROW_BYTES_MAX)?;
        match self.reach {
            Reach::All | Reach::State | Reach::Follows { .. } => Ok(()),
            Reach::Compressed { ratio } => within("ratio", ratio, 1, RATIO_MAX),
            Reach::Window { tokens, sinks } => {
                within("window", tokens, 1, TOKENS_MAX)?;
                within("sinks", sinks, 0, TOKENS_MAX)
            }
            Reach::Chunk { tokens } => within("chunk", tokens, 1, TOKENS_MAX),
            Reach::Ring { tokens } => within("ring", tokens, 1, RATIO_MAX),
            Reach::Draft { ahead } => within("tokens ahead", ahead, 1, TOKENS_MAX),
        }
    }
}

impl Reach {
    /// Returns whether a sequence has one block, whatever its length: a run of consecutive frames.
    pub(super) fn is_run(self) -> bool {
        matches!(self, Self::State | Self::Ring { .. })
    }

    /// Returns the number of tokens per entry.
    pub(super) fn ratio(self) -> u64 {
        match self {
            Self::Compressed { ratio } => ratio,
            _ => 1,
        }
    }

    /// Returns the number of entries that a block of `tokens` tokens has.
    pub(super) fn entries(self, block_tokens: u64) -> u64 {
        match self {
            Self::Compressed { ratio } => block_tokens / ratio,
            Self::State => 1,
            Self::Ring { tokens } => tokens,
            _ => block_tokens,
        }
    }

    /// Returns the number of entries that every sequence needs in the end, without rounding to
    /// blocks; `None` if there is no bound.
    pub(super) fn entries_max(self) -> Option<u64> {
        match self {
            Self::Window { tokens, sinks } => Some(tokens + sinks),
            Self::Chunk { tokens } | Self::Ring { tokens } => Some(tokens),
            Self::State => Some(1),
            _ => None,
        }
    }

    /// Returns the largest number of blocks that a sequence has held by the time that it has
    /// `tokens` tokens, if it grows by up to `step` at a time.
    ///
    /// A window of `w` tokens moves over the blocks, and lies in one more of them than its length
    /// needs when it begins at the last token of a block.
    pub(super) fn blocks(self, tokens: u64, block_tokens: u64, step: u64) -> u64 {
        if tokens == 0 {
            return 0;
        }
        let all = tokens.div_ceil(block_tokens);
        // Before the first tokens of a step are computed, what they attend to is kept as well.
        let with_step = |kept: u64| kept.saturating_add(step.saturating_sub(1));
        match self {
            Self::All | Self::Compressed { .. } | Self::Follows { .. } => all,
            Self::Draft { ahead } => tokens.saturating_add(ahead).div_ceil(block_tokens),
            Self::State | Self::Ring { .. } => 1,
            Self::Window { tokens, sinks } => {
                let moving = (with_step(tokens) - 1).div_ceil(block_tokens) + 1;
                all.min(moving + sinks.div_ceil(block_tokens))
            }
            Self::Chunk { tokens } => {
                let misaligned = if tokens.is_multiple_of(block_tokens) { 0 } else { 1 };
                all.min(with_step(tokens).div_ceil(block_tokens) + misaligned)
            }
        }
    }
}

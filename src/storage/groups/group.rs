use super::frame::{self, Block};
use super::layer::Reach;
use super::shape::{Column, Shape};

/// Number of a group of layers, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct GroupId(pub usize);

/// Place of a layer's cache: a group, and the position of the layer in it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// The group.
    pub group: GroupId,
    /// Position among the layers of the group, from 0.
    pub plane: usize,
}

/// Layers that keep the same entries with the same bytes, so that one block id serves all.
#[derive(Clone, Debug)]
pub struct LayerGroup {
    pub(super) shape: Shape,
    pub(super) layers: Vec<usize>,
    pub(super) block: Block,
    pub(super) frame_bytes: u64,
    pub(super) step_tokens: u64,
}

impl LayerGroup {
    /// Returns the entries that a sequence keeps.
    pub fn reach(&self) -> Reach {
        self.shape.reach
    }

    /// Returns the layers, ascending. Layers that only read another's cache are not among them.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Returns the bytes of an entry, by column.
    pub fn columns(&self) -> &[Column] {
        &self.shape.columns
    }

    /// Returns the bytes of an entry over all layers and columns.
    pub fn entry_bytes(&self) -> u64 {
        self.shape.entry_bytes()
    }

    /// Returns the number of tokens of a block; `None` if a block is a state or a ring.
    pub fn block_tokens(&self) -> Option<u64> {
        let is_one = matches!(self.reach(), Reach::State | Reach::Ring { .. });
        (!is_one).then_some(self.block.tokens)
    }

    /// Returns the number of frames of a block.
    pub fn block_frames(&self) -> u64 {
        self.block.frames
    }

    /// Returns the bytes of a block with padding.
    pub fn block_bytes(&self) -> u64 {
        self.block.frames.saturating_mul(self.frame_bytes)
    }

    /// Returns the bytes of a block without padding.
    pub fn packed_bytes(&self) -> u64 {
        self.shape.packed_bytes(self.block.tokens)
    }

    /// Returns the share of a block that is padding, from 0 to 1.
    pub fn waste(&self) -> f64 {
        frame::waste(self.packed_bytes(), self.block_bytes())
    }

    /// Returns the bytes per token that a sequence keeps for as long as it grows; 0 if its entries
    /// have a bound.
    pub fn bytes_per_token(&self) -> f64 {
        match self.reach() {
            Reach::All | Reach::Draft { .. } => self.entry_bytes() as f64,
            Reach::Compressed { ratio } => self.entry_bytes() as f64 / ratio as f64,
            _ => 0.0,
        }
    }

    /// Returns the bytes of a sequence's entries in the end, without rounding to blocks; 0 if they
    /// grow without a bound.
    pub fn fixed_bytes(&self) -> u64 {
        self.reach().entries_max().map_or(0, |entries| self.entry_bytes().saturating_mul(entries))
    }

    /// Returns the largest number of blocks that a sequence has held by the time that it has
    /// `tokens` tokens.
    pub fn blocks_held(&self, tokens: u64) -> u64 {
        self.reach().blocks(tokens, self.block.tokens, self.step_tokens)
    }
}

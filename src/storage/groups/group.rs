use super::layer::Reach;
use super::shape::{Column, Shape};
use super::shared::Block;

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
    pub(super) block: Block,
    pub(super) shares_blocks_of: Option<GroupId>,
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
        &self.shape.layers
    }

    /// Returns the bytes of an entry, by column.
    pub fn columns(&self) -> &[Column] {
        &self.shape.columns
    }

    /// Returns the bytes of an entry over all layers and columns.
    pub fn entry_bytes(&self) -> u64 {
        self.shape.entry_bytes()
    }

    /// Returns the earlier group in whose blocks the entries of this one lie, because a sequence
    /// keeps both for the same tokens; the first one if there are several. `None`: no earlier
    /// group.
    ///
    /// Such blocks are counted once, with the earlier group. What this one says of a block is said
    /// of that of all groups that share it.
    pub fn shares_blocks_of(&self) -> Option<GroupId> {
        self.shares_blocks_of
    }

    /// Returns the number of tokens of a block; `None` if a block is a state or a ring.
    pub fn block_tokens(&self) -> Option<u64> {
        (!self.reach().is_run()).then_some(self.block.tokens)
    }

    /// Returns the number of frames of a block. Of `n` layers in `k` frames, each has the next
    /// `ceil(n / k)`, and the last ones fewer or none. The frames of a state or a ring are
    /// consecutive, and divide layers anywhere.
    pub fn block_frames(&self) -> u64 {
        self.block.frames
    }

    /// Returns the bytes of a block with padding.
    pub fn block_bytes(&self) -> u64 {
        self.block.bytes(self.frame_bytes)
    }

    /// Returns the bytes of a block without padding.
    pub fn packed_bytes(&self) -> u64 {
        self.block.packed_bytes
    }

    /// Returns the share of a block that is padding, from 0 to 1.
    pub fn waste(&self) -> f64 {
        self.block.waste(self.frame_bytes)
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

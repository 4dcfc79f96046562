//! The bytes of a group of layers, before blocks and frames are chosen.

use crate::storage::plane::TILE_ALIGN;

use super::layer::Reach;

/// Bytes of an entry in some layers of a group, such as K, V, or an index beside them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Column {
    /// Bytes of an entry in one layer.
    pub bytes: u64,
    /// Number of planes of this width: one per layer, and two where K and V are equally wide.
    pub planes: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) reach: Reach,
    /// The layers, ascending.
    pub(super) layers: Vec<usize>,
    pub(super) columns: Vec<Column>,
    /// Whether all layers have the same columns.
    pub(super) is_even: bool,
}

impl Shape {
    /// Returns the shape of layers with planes of these widths.
    pub(super) fn new(reach: Reach, layers: Vec<usize>, mut widths: Vec<Vec<u64>>) -> Self {
        let mut columns: Vec<Column> = Vec::new();
        for &bytes in widths.iter().flatten() {
            match columns.iter_mut().find(|column| column.bytes == bytes) {
                Some(column) => column.planes += 1,
                None => columns.push(Column { bytes, planes: 1 }),
            }
        }
        widths.iter_mut().for_each(|of_layer| of_layer.sort_unstable());
        let is_even = widths.windows(2).all(|two| two[0] == two[1]);
        Self { reach, layers, columns, is_even }
    }

    /// Returns the bytes of an entry over all layers.
    pub(super) fn entry_bytes(&self) -> u64 {
        self.columns.iter().map(|column| column.bytes * column.planes).sum()
    }

    /// Returns the bytes of a block without padding.
    pub(super) fn packed_bytes(&self, block_tokens: u64) -> u64 {
        self.entry_bytes().saturating_mul(self.reach.entries(block_tokens))
    }

    /// Returns the bytes of a block, in which each layer's part of a column is padded to a tile.
    pub(super) fn tiled_bytes(&self, block_tokens: u64) -> u64 {
        let entries = self.reach.entries(block_tokens);
        let bytes =
            self.columns.iter().map(|column| tiled(column.bytes * entries).saturating_mul(column.planes));
        bytes.fold(0, u64::saturating_add)
    }

    /// Returns the bytes of a frame that holds all layers, if there is one frame, or else the next
    /// of them in equal numbers. In several frames, all layers must have the same columns.
    pub(super) fn frame_bytes(&self, block_tokens: u64, frames: u64) -> u64 {
        let (bytes, layers) = (self.tiled_bytes(block_tokens), self.layers.len() as u64);
        match frames {
            1 => bytes,
            _ => bytes / layers * layers.div_ceil(frames),
        }
    }
}

/// Returns a number of bytes padded to a tile.
pub(super) fn tiled(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(TILE_ALIGN as u64).unwrap_or(u64::MAX)
}

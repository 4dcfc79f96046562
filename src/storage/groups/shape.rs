//! The bytes of a group of layers, before blocks and frames are chosen.

use crate::storage::plane::TILE_ALIGN;

use super::layer::Reach;
use super::options::HASH_TOKENS;

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
    pub(super) columns: Vec<Column>,
}

impl Shape {
    /// Adds planes of these widths, each to the column of its width.
    pub(super) fn add(&mut self, widths: [u64; 3]) {
        for bytes in widths.into_iter().filter(|&bytes| bytes > 0) {
            match self.columns.iter_mut().find(|column| column.bytes == bytes) {
                Some(column) => column.planes += 1,
                None => self.columns.push(Column { bytes, planes: 1 }),
            }
        }
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
        let tile = |column: &Column| (column.bytes * entries).next_multiple_of(TILE_ALIGN as u64);
        let bytes = self.columns.iter().map(|column| tile(column).saturating_mul(column.planes));
        bytes.fold(0, u64::saturating_add)
    }

    /// Returns the numbers of tokens per block to choose from, ascending and up to `most`; the
    /// first if all are above.
    pub(super) fn block_tokens(&self, most: u64) -> Vec<u64> {
        let doubled = |first: u64, most: u64| {
            let up = std::iter::successors(Some(first), |tokens| tokens.checked_mul(2));
            let mut up: Vec<u64> = up.take_while(|&tokens| tokens <= most).collect();
            if up.is_empty() {
                up.push(first);
            }
            up
        };
        match self.reach {
            // One block, which is not a number of tokens.
            Reach::State => vec![HASH_TOKENS],
            Reach::Ring { tokens } => vec![tokens],
            // In blocks of a hash unit, such a window would hold twice its bytes and more.
            Reach::Window { tokens, .. } if tokens < HASH_TOKENS => {
                doubled(1 << (tokens / 2).max(1).ilog2(), HASH_TOKENS)
            }
            Reach::Window { tokens, .. } | Reach::Chunk { tokens } => doubled(HASH_TOKENS, most.min(tokens)),
            Reach::Compressed { ratio } => {
                let step = (1..).map(|times| times * HASH_TOKENS).find(|tokens| tokens % ratio == 0);
                doubled(step.unwrap_or(ratio * HASH_TOKENS), most)
            }
            _ => doubled(HASH_TOKENS, most),
        }
    }
}

//! The plane table: the position of every layer's K and V in memory.
//!
//! A *plane* holds one kind of data of one layer (K, V, both, the latent vector, or their scales).
//! In it, frame `f` has one contiguous *tile* of `tile_bytes` bytes at `base + f * frame_stride`:
//!
//! ```text
//! LayerFirst   | plane 0: tile of frame 0, 1, 2 ... | plane 1: tile of frame 0, 1, 2 ... | ...
//! BlockFirst   | frame 0: tile of plane 0, 1, 2 ... | frame 1: tile of plane 0, 1, 2 ... | ...
//! ```
//!
//! A tile is `[K rows, V rows if joined][block_tokens][heads][head_dim]`, and for scales
//! `[...][block_tokens][heads]` of f32. Tiles are aligned to [`TILE_ALIGN`], for 16-byte vectors.

use crate::error::Invalid;

use super::layout::{Arrangement, KvLayout, too_large};
use super::plane::{Plane, TILE_ALIGN};

/// Size of a huge page, to which planes of at least this size are aligned.
pub(super) const HUGE_PAGE: usize = 2 << 20;

const PLANE_ALIGN: usize = 64;

/// All planes of a layout in one reservation of memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlaneTable {
    /// The planes in canonical order: by layer, values before scales, K before V.
    pub planes: Vec<Plane>,
    /// Size of the reservation in bytes.
    pub bytes: usize,
}

impl KvLayout {
    /// Returns the planes' positions in a reservation for `frames_max` frames, if addressable.
    pub fn planes(&self, frames_max: usize) -> Result<PlaneTable, Invalid> {
        PlaneTable::new(self, frames_max)
    }
}

impl PlaneTable {
    fn new(layout: &KvLayout, frames_max: usize) -> Result<Self, Invalid> {
        let refused = || too_large("reservation", format_args!("{frames_max} frames of {layout}"));
        let mut planes = Vec::with_capacity(layout.planes_per_layer() * layout.layers());
        let mut end = 0usize;
        for layer in 0..layout.layers() {
            for (kind, part, tile_bytes) in layout.tiles_of_layer() {
                let tile_span = tile_bytes.next_multiple_of(TILE_ALIGN);
                let (base, frame_stride, span) = match layout.arrangement() {
                    Arrangement::BlockFirst => (end, layout.bytes_per_block(), tile_span),
                    Arrangement::LayerFirst => {
                        let span = tile_span.checked_mul(frames_max).ok_or_else(refused)?;
                        let align = if span >= HUGE_PAGE { HUGE_PAGE } else { PLANE_ALIGN };
                        (end.checked_next_multiple_of(align).ok_or_else(refused)?, tile_span, span)
                    }
                };
                end = base.checked_add(span).ok_or_else(refused)?;
                planes.push(Plane { layer, kind, part, base, frame_stride, tile_bytes });
            }
        }
        let bytes = match layout.arrangement() {
            Arrangement::BlockFirst => end.checked_mul(frames_max).ok_or_else(refused)?,
            Arrangement::LayerFirst => end,
        };
        if bytes > isize::MAX as usize {
            return Err(refused());
        }
        Ok(Self { planes, bytes })
    }
}

//! The plane table: where in memory every layer's K and V are, as numbers that one copy routine can follow.
//!
//! A *plane* is what one layer keeps of one kind (K, V, both, the latent vector, or their scales) for all frames. In
//! plane `p`, frame `f` has one contiguous *tile*, at `base + f * frame_stride`, of `tile_bytes` bytes:
//!
//! ```text
//! LayerFirst   | plane 0: tile of frame 0, 1, 2 ...        | plane 1: tile of frame 0, 1, 2 ... | ...
//! BlockFirst   | frame 0: tile of plane 0, 1, 2 ... | frame 1: tile of plane 0, 1, 2 ...        | ...
//! ```
//!
//! Inside a tile: `[K rows, V rows if joined][block_tokens][heads][head_dim]`, and for scales `[...][block_tokens][heads]`
//! of f32. Tiles start on multiples of [`TILE_ALIGN`], so that a device may move 16-byte vectors.

use crate::error::LayoutError;

use super::layout::{Arrangement, KvLayout};

/// Every tile starts on a multiple of this many bytes.
pub const TILE_ALIGN: usize = 16;

/// Planes of at least this size start on a multiple of it, which is the size of a huge page.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Small planes start on a multiple of a cache line.
const PLANE_ALIGN: usize = 64;

/// What a plane holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum PlaneKind {
    /// K, V, both, or the latent vector: elements of the layout's dtype.
    Values,
    /// One f32 a token and head: the dynamic scales of the values plane with the same layer and part.
    Scales,
}

/// Which half of K and V a plane holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum PlanePart {
    /// K alone.
    K,
    /// V alone.
    V,
    /// K, and V after it.
    Joined,
    /// The latent vector of multi-head latent attention.
    Latent,
}

/// One plane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Plane {
    /// The layer, from 0.
    pub layer: usize,
    /// Values or scales.
    pub kind: PlaneKind,
    /// Which half.
    pub part: PlanePart,
    /// Where frame 0's tile starts, in bytes from the start of the memory.
    pub base: usize,
    /// Bytes from one frame's tile to the next frame's.
    pub frame_stride: usize,
    /// Bytes of a tile, without padding.
    pub tile_bytes: usize,
}

/// All planes of a layout in one reservation of memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlaneTable {
    /// The planes, in canonical order: by layer; values before scales; K before V.
    pub planes: Vec<Plane>,
    /// Bytes of the reservation.
    pub bytes: usize,
}

impl PlaneTable {
    /// The table of `layout` for at most `frames_max` frames.
    pub(super) fn new(layout: &KvLayout, frames_max: usize) -> Result<Self, LayoutError> {
        let too_large = || LayoutError::TooLarge { what: "the reservation" };
        let mut planes = Vec::with_capacity(layout.planes_per_layer() * layout.layers());
        let mut end = 0usize;
        for layer in 0..layout.layers() {
            for (kind, part, tile_bytes) in layout.tiles_of_layer() {
                let tile_span = tile_bytes.next_multiple_of(TILE_ALIGN);
                let (base, frame_stride, span) = match layout.arrangement() {
                    Arrangement::BlockFirst => (end, layout.bytes_per_block(), tile_span),
                    Arrangement::LayerFirst => {
                        let span = tile_span.checked_mul(frames_max).ok_or_else(too_large)?;
                        let align = if span >= HUGE_PAGE { HUGE_PAGE } else { PLANE_ALIGN };
                        (end.checked_next_multiple_of(align).ok_or_else(too_large)?, tile_span, span)
                    }
                };
                end = base.checked_add(span).ok_or_else(too_large)?;
                planes.push(Plane { layer, kind, part, base, frame_stride, tile_bytes });
            }
        }
        let bytes = match layout.arrangement() {
            Arrangement::BlockFirst => end.checked_mul(frames_max).ok_or_else(too_large)?,
            Arrangement::LayerFirst => end,
        };
        if bytes > isize::MAX as usize {
            return Err(too_large());
        }
        Ok(Self { planes, bytes })
    }
}

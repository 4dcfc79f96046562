/// Alignment of every tile in bytes.
pub const TILE_ALIGN: usize = 16;

/// Contents of a plane.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum PlaneKind {
    /// K, V, both, or the latent vector: elements of the layout's dtype.
    Values,
    /// The dynamic scales of a values plane: one f32 per token and head.
    Scales,
}

/// The part of K and V that a plane holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum PlanePart {
    /// K alone.
    K,
    /// V alone.
    V,
    /// K, followed by V.
    Joined,
    /// The latent vector of multi-head latent attention.
    Latent,
}

/// One plane of a layout: its contents and position.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Plane {
    /// Layer, from 0.
    pub layer: usize,
    /// Whether it holds values or scales.
    pub kind: PlaneKind,
    /// The part of K and V.
    pub part: PlanePart,
    /// Offset of frame 0's tile from the start of the memory, in bytes.
    pub base: usize,
    /// Bytes from one frame's tile to the next frame's.
    pub frame_stride: usize,
    /// Bytes of a tile, without padding.
    pub tile_bytes: usize,
}

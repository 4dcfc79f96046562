//! Kernel parameters: one struct per launch, passed by value, identical to those in
//! `kernels/params.h`.
//!
//! | kernel | params | unit of work |
//! |---|---|---|
//! | `kvp_copy` | [`CopyParams`] | one piece of one move per 128 threads |
//! | `kvp_copy_bulk` | [`CopyParams`] | one piece of one move per CTA; compute capability 9.0 |
//! | `kvp_zero` | [`ZeroParams`] | one piece of one frame per CTA |
//! | `kvp_pack` | [`PackParams`] | one piece of one frame per CTA |
//! | `kvp_rows` | [`RowsParams`] | K or V of one token per warp |
//! | `kvp_quantise`, `kvp_dequantise` | [`QuantParams`] | one head of K or V of a token per part of a warp |
//! | `kvp_patch` | [`PatchParams`] | one entry per thread |
//!
//! CTAs have [`THREADS`] threads in one dimension; any number of CTAs is valid.
//!
//! A *piece* is at most [`PIECE_BYTES_MAX`] of one plane's tile. Planes are cut into pieces once,
//! so that layer-first and block-first layouts, joined and separate planes, planes of scales and
//! adopted tensors all look like one table to a kernel. A *lane* is the position of K or V of one
//! layer (or of their scales) in frame 0.
//!
//! Kernels check nothing. A launch has to guarantee:
//! - `unit` is 16, 4 or 1, and divides every address, stride and length of the moved bytes
//!   ([`unit()`]). For the converting kernels these are the addresses of codes and of the caller's
//!   rows, and the head dimension counts as a length;
//! - elements longer than a byte, and scales, are at multiples of their size;
//! - slots and frames exist; `frames * block_tokens` is below 2^32; `tokens * 2 * heads`, the
//!   number of moves, and the number of packed frames are below 2^31;
//! - written memory is not accessed by anyone else; destinations of moves are distinct and not
//!   sources; stored slots are distinct; no two entries of a patch are for the same place.

use std::mem::offset_of;

use cudarc::driver::DeviceRepr;

use kvpool::{Dtype, MovedEntry};

/// Threads per CTA.
pub const THREADS: u32 = 256;

/// Threads that copy one piece in `kvp_copy`; a CTA has one to eight such teams.
pub const COPY_TEAM: u32 = 128;

/// Threads per CTA of `kvp_copy_bulk`, one of which issues the copies.
pub const BULK_THREADS: u32 = 32;

/// Dynamic shared memory per CTA of `kvp_copy_bulk`: a ring of four pieces.
pub const BULK_SHARED_BYTES: u32 = 4 * PIECE_BYTES_MAX;

/// Maximum size of a piece: four vectors of 16 bytes per thread.
pub const PIECE_BYTES_MAX: u32 = 16 * 1024;

/// Returns the largest unit that divides all `numbers`: addresses, strides and lengths in bytes.
#[must_use]
pub fn unit(numbers: impl IntoIterator<Item = u64>) -> u32 {
    let bits = numbers.into_iter().fold(0, |bits, number| bits | number);
    match bits.trailing_zeros() {
        4.. => 16,
        2..4 => 4,
        _ => 1,
    }
}

/// A part of one plane's tile, in every frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Piece {
    /// Address in frame 0.
    pub base: u64,
    /// Bytes from one frame's piece to the next frame's.
    pub frame_stride: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Offset in a frame's packed form.
    pub packed_at: u32,
}

/// A copy of one frame's bytes to another frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Move {
    /// Frame to read.
    pub src: u32,
    /// Frame to write.
    pub dst: u32,
}

/// Position of K or V of one layer, or of their scales.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Lane {
    /// Address in frame 0.
    pub base: u64,
    /// Bytes from one frame's lane to the next frame's.
    pub frame_stride: u64,
}

/// Number of moves that a launch passes as parameters.
pub const MOVES_INLINE: usize = 256;

/// Parameters of `kvp_copy` and `kvp_copy_bulk`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct CopyParams {
    /// Address of [`Piece`]s.
    pub pieces: u64,
    /// Address of [`Move`]s; 0 if they are in `few`.
    pub moves: u64,
    /// Number of pieces.
    pub n_pieces: u32,
    /// Number of moves.
    pub n_moves: u32,
    /// Unit of access; see [`unit()`].
    pub unit: u32,
    /// Zero.
    pub reserved: u32,
    /// Up to [`MOVES_INLINE`] moves.
    pub few: [Move; MOVES_INLINE],
}

impl CopyParams {
    /// Describes `moves` of `pieces`: the address and the length of each table. Moves at address 0
    /// are those that the caller puts into `few`.
    #[must_use]
    pub fn new(pieces: (u64, usize), moves: (u64, usize), unit: u32) -> Self {
        Self {
            pieces: pieces.0,
            moves: moves.0,
            n_pieces: pieces.1 as u32,
            n_moves: moves.1 as u32,
            unit,
            reserved: 0,
            few: [Move { src: 0, dst: 0 }; MOVES_INLINE],
        }
    }
}

/// Parameters of `kvp_zero`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct ZeroParams {
    /// Address of [`Piece`]s.
    pub pieces: u64,
    /// Address of frame numbers, u32.
    pub frames: u64,
    /// Number of pieces.
    pub n_pieces: u32,
    /// Number of frames.
    pub n_frames: u32,
    /// Unit of access; see [`unit()`].
    pub unit: u32,
    /// Zero.
    pub reserved: u32,
}

/// Direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub enum Way {
    /// To the frames: unpack, store.
    In = 0,
    /// From the frames: pack, load.
    Out = 1,
}

/// Parameters of `kvp_pack`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct PackParams {
    /// Address of [`Piece`]s.
    pub pieces: u64,
    /// Address of frame numbers, u32.
    pub frames: u64,
    /// Address of the first packed frame.
    pub packed: u64,
    /// Bytes from one packed frame to the next.
    pub packed_stride: u64,
    /// Number of pieces.
    pub n_pieces: u32,
    /// Number of frames.
    pub n_frames: u32,
    /// Unit of access; see [`unit()`].
    pub unit: u32,
    /// Direction.
    pub way: Way,
}

/// Parameters of `kvp_rows`, which moves rows of one layer, `[tokens][row]`, without conversion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct RowsParams {
    /// Address of the caller's rows of K.
    pub k: u64,
    /// Address of the caller's rows of V; 0 for a latent layout, which has K alone.
    pub v: u64,
    /// Bytes from one token's row of K to the next token's.
    pub k_stride: u64,
    /// Bytes from one token's row of V to the next token's.
    pub v_stride: u64,
    /// Address of slots, i64, one per token; negative slots are skipped.
    pub slots: u64,
    /// Position of the rows of K in the frames.
    pub k_lane: Lane,
    /// Position of the rows of V in the frames; with joined planes, half a tile behind K.
    pub v_lane: Lane,
    /// Bytes of a row in a frame.
    pub row_bytes: u32,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Number of tokens.
    pub n_tokens: u32,
    /// Unit of access; see [`unit()`].
    pub unit: u32,
    /// Direction of `kvp_rows`.
    pub way: Way,
    /// Type of the caller's rows, for the converting kernels: [`row_type`].
    pub row_type: u32,
}

/// Returns the number of the type of rows that are converted; `None` for other types.
#[must_use]
pub fn row_type(dtype: Dtype) -> Option<u32> {
    (0..).zip([Dtype::Bf16, Dtype::F16, Dtype::F32]).find_map(|(at, has)| (has == dtype).then_some(at))
}

/// Returns the number of a type of codes; `None` for other types.
#[must_use]
pub fn code_type(dtype: Dtype) -> Option<u32> {
    let types = [Dtype::Fp8E4M3, Dtype::Fp8E5M2, Dtype::Int8];
    (0..).zip(types).find_map(|(at, has)| (has == dtype).then_some(at))
}

/// Mode of [`QuantParams`]: `value = code`.
pub const SCALES_UNIT: u32 = 0;
/// Mode of [`QuantParams`]: `value = code * scale[head]`, from [`QuantParams::k_scales`] and
/// `v_scales`.
pub const SCALES_PER_HEAD: u32 = 1;
/// Mode of [`QuantParams`]: `value = code * scale[token][head]`, from the scale lanes, which a
/// store writes.
pub const SCALES_PER_TOKEN_HEAD: u32 = 2;

/// Parameters of the converting kernels: rows of values outside, codes and scales in the frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct QuantParams {
    /// The rows; `row_bytes` is `heads * head_dim`.
    pub rows: RowsParams,
    /// Address of this layer's scales of K, f32, one per head; for [`SCALES_PER_HEAD`] only.
    pub k_scales: u64,
    /// The same for V.
    pub v_scales: u64,
    /// Position of the scales of K, `[block_tokens][heads]` of f32 in a tile; for
    /// [`SCALES_PER_TOKEN_HEAD`] only.
    pub k_scale_lane: Lane,
    /// The same for V; with joined planes, half a tile behind K.
    pub v_scale_lane: Lane,
    /// Heads per row.
    pub heads: u32,
    /// Elements per head.
    pub head_dim: u32,
    /// [`SCALES_UNIT`], [`SCALES_PER_HEAD`] or [`SCALES_PER_TOKEN_HEAD`].
    pub mode: u32,
    /// Type of the codes: [`code_type`].
    pub code_type: u32,
}

impl QuantParams {
    /// Leaves K alone, as in a latent layout; the kernels test the address of V.
    pub(super) fn take_k(&mut self) {
        (self.rows.v, self.rows.v_stride) = (0, 0);
        (self.rows.v_lane, self.v_scale_lane) = Default::default();
    }

    /// Leaves V alone, in the place of K.
    pub(super) fn take_v(&mut self) {
        (self.rows.k, self.rows.k_stride) = (self.rows.v, self.rows.v_stride);
        (self.rows.k_lane, self.k_scale_lane) = (self.rows.v_lane, self.v_scale_lane);
        self.k_scales = self.v_scales;
        self.take_k();
    }
}

/// Parameters of `kvp_patch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct PatchParams {
    /// Address of the block table, i32.
    pub table: u64,
    /// Address of [`MovedEntry`]s.
    pub entries: u64,
    /// Entries of the table from one row to the next.
    pub row_stride: u32,
    /// Number of entries to patch.
    pub n: u32,
}

/// Asserts the sizes and offsets that `kernels/params.h` asserts, too.
macro_rules! layouts {
    ($($name:ident: $bytes:literal { $($field:ident: $at:literal),* })*) => {
        const _: () = {
            $(
                assert!(size_of::<$name>() == $bytes);
                $(assert!(offset_of!($name, $field) == $at);)*
            )*
        };
    };
}

layouts! {
    Piece: 24 { frame_stride: 8, bytes: 16, packed_at: 20 }
    Move: 8 { dst: 4 }
    Lane: 16 { frame_stride: 8 }
    CopyParams: 2080 { moves: 8, n_pieces: 16, n_moves: 20, unit: 24, few: 32 }
    ZeroParams: 32 { frames: 8, n_pieces: 16, n_frames: 20, unit: 24 }
    PackParams: 48 { frames: 8, packed: 16, packed_stride: 24, n_pieces: 32, n_frames: 36, unit: 40, way: 44 }
    RowsParams: 96 {
        v: 8, k_stride: 16, v_stride: 24, slots: 32, k_lane: 40, v_lane: 56, row_bytes: 72, block_tokens: 76,
        n_tokens: 80, unit: 84, way: 88, row_type: 92
    }
    QuantParams: 160 {
        k_scales: 96, v_scales: 104, k_scale_lane: 112, v_scale_lane: 128, heads: 144, head_dim: 148, mode: 152,
        code_type: 156
    }
    MovedEntry: 12 { column: 4, frame: 8 }
    PatchParams: 24 { entries: 8, row_stride: 16, n: 20 }
}

// SAFETY: C layout without references, identical on the device, as asserted above.
unsafe impl DeviceRepr for CopyParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for ZeroParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for PackParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for RowsParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for QuantParams {}
// SAFETY: as above.
unsafe impl DeviceRepr for PatchParams {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_is_the_largest_that_divides_all() {
        assert_eq!(unit([]), 16);
        assert_eq!(unit([0, 32, 1 << 40]), 16);
        assert_eq!(unit([32, 8]), 4);
        assert_eq!(unit([4, 1 << 63]), 4);
        assert_eq!(unit([16, 2]), 1);
        assert_eq!(unit([16, 5]), 1);
    }
}

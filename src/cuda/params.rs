//! What a launch passes to a kernel: one struct by value, the same as in `kernels/params.h`.
//!
//! | kernel | params | one CTA or warp does |
//! |---|---|---|
//! | `kvp_copy` | [`CopyParams`] | a CTA one piece of one move |
//! | `kvp_zero` | [`ZeroParams`] | a CTA one piece of one frame |
//! | `kvp_pack`, `kvp_unpack` | [`PackParams`] | a CTA one piece of one frame |
//! | `kvp_store`, `kvp_load` | [`RowsParams`] | a warp K or V of one token |
//! | `kvp_quantise_CODE_ROW`, `kvp_dequantise_CODE_ROW` | [`QuantParams`] | part of a warp one head of K or V of one token |
//! | `kvp_patch` | [`PatchParams`] | a thread one entry |
//!
//! `CODE` is `e4m3`, `e5m2` or `int8`, `ROW` is `bf16`, `f16` or `f32`. CTAs have [`THREADS`] threads in one dimension; there
//! may be any number of them.
//!
//! A *piece* is at most [`PIECE_BYTES_MAX`] of one plane's tile; planes are cut into pieces once, so that layer-first and
//! block-first, joined and separate planes, planes of scales and adopted tensors are all one table to a kernel. A *lane*
//! is where K or V of one layer (or their scales) begins in frame 0.
//!
//! Kernels check nothing. Whoever launches one promises:
//! - `unit` is 16, 4 or 1, and divides every address, stride and length of bytes that is moved ([`unit()`]); for the converting
//!   kernels that is of codes and of the caller's rows, and the head dimension is a length;
//! - elements of more than a byte, and scales, lie at multiples of their size;
//! - slots and frames exist; `frames * block_tokens` is below 2^32, `tokens * 2 * heads`, moves and packed frames below 2^31;
//! - what is written is nobody else's, destinations of moves are unique and are no sources, slots that are stored to are
//!   unique, and no two entries of a patch are of one place.

use std::mem::offset_of;

use cudarc::driver::DeviceRepr;

use crate::sequence::MovedEntry;

/// Threads of a CTA.
pub const THREADS: u32 = 256;

/// The most bytes of a piece: four vectors of 16 bytes a thread.
pub const PIECE_BYTES_MAX: u32 = 16 * 1024;

/// The largest unit that divides all of `numbers`: addresses, strides and lengths in bytes.
#[must_use]
pub fn unit(numbers: impl IntoIterator<Item = u64>) -> u32 {
    let bits = numbers.into_iter().fold(0, |bits, number| bits | number);
    match bits.trailing_zeros() {
        4.. => 16,
        2..4 => 4,
        _ => 1,
    }
}

/// Bytes of one plane's tile, in every frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Piece {
    /// Its address in frame 0.
    pub base: u64,
    /// Bytes from one frame's to the next frame's.
    pub frame_stride: u64,
    /// Its length.
    pub bytes: u32,
    /// Its place in a frame's packed form.
    pub packed_at: u32,
}

/// One frame's bytes to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct Move {
    /// The frame that is read.
    pub src: u32,
    /// The frame that is written.
    pub dst: u32,
}

/// Where K or V of one layer, or their scales, begin: at `base` in frame 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct Lane {
    /// The address in frame 0.
    pub base: u64,
    /// Bytes from one frame's to the next frame's.
    pub frame_stride: u64,
}

/// Of `kvp_copy`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct CopyParams {
    /// Address of [`Piece`]s.
    pub pieces: u64,
    /// Address of [`Move`]s.
    pub moves: u64,
    /// How many.
    pub n_pieces: u32,
    /// How many.
    pub n_moves: u32,
    /// See [`unit()`].
    pub unit: u32,
    /// 0.
    pub reserved: u32,
}

/// Of `kvp_zero`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct ZeroParams {
    /// Address of [`Piece`]s.
    pub pieces: u64,
    /// Address of frames, u32.
    pub frames: u64,
    /// How many.
    pub n_pieces: u32,
    /// How many.
    pub n_frames: u32,
    /// See [`unit()`].
    pub unit: u32,
    /// 0.
    pub reserved: u32,
}

/// Of `kvp_pack` and `kvp_unpack`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct PackParams {
    /// Address of [`Piece`]s.
    pub pieces: u64,
    /// Address of frames, u32.
    pub frames: u64,
    /// Address of the packed form of the first.
    pub packed: u64,
    /// Bytes from one packed frame to the next.
    pub packed_stride: u64,
    /// How many.
    pub n_pieces: u32,
    /// How many.
    pub n_frames: u32,
    /// See [`unit()`].
    pub unit: u32,
    /// 0.
    pub reserved: u32,
}

/// Of `kvp_store` and `kvp_load`: rows of one layer, `[tokens][row]`, moved as they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct RowsParams {
    /// Address of the caller's rows of K.
    pub k: u64,
    /// Address of the caller's rows of V; 0 for a latent layout, which has K alone.
    pub v: u64,
    /// Bytes from one token's row of K to the next token's.
    pub k_stride: u64,
    /// The same of V.
    pub v_stride: u64,
    /// Address of slots, i64, one a token; a negative one is skipped.
    pub slots: u64,
    /// Where the rows of K are kept.
    pub k_lane: Lane,
    /// Where the rows of V are kept; with joined planes K's, half a tile on.
    pub v_lane: Lane,
    /// Bytes of a row as it is kept.
    pub row_bytes: u32,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// How many tokens.
    pub n_tokens: u32,
    /// See [`unit()`].
    pub unit: u32,
}

/// `value = code`.
pub const SCALES_UNIT: u32 = 0;
/// `value = code * scale[head]`, from [`QuantParams::k_scales`] and `v_scales`.
pub const SCALES_PER_HEAD: u32 = 1;
/// `value = code * scale[token][head]`, from the scale lanes, which a store writes.
pub const SCALES_PER_TOKEN_HEAD: u32 = 2;

/// Of the kernels that convert: rows of values outside, codes and scales inside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct QuantParams {
    /// The rows; `row_bytes` is `heads * head_dim`.
    pub rows: RowsParams,
    /// Address of this layer's scales of K, f32, one a head; for [`SCALES_PER_HEAD`] only.
    pub k_scales: u64,
    /// The same of V.
    pub v_scales: u64,
    /// Where the scales of K are kept, `[block_tokens][heads]` of f32 in a tile; for [`SCALES_PER_TOKEN_HEAD`] only.
    pub k_scale_lane: Lane,
    /// The same of V; with joined planes K's, half a tile on.
    pub v_scale_lane: Lane,
    /// Heads of a row.
    pub heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// [`SCALES_UNIT`], [`SCALES_PER_HEAD`] or [`SCALES_PER_TOKEN_HEAD`].
    pub mode: u32,
    /// 0.
    pub reserved: u32,
}

/// Of `kvp_patch`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct PatchParams {
    /// Address of the block table, i32.
    pub table: u64,
    /// Address of [`MovedEntry`]s.
    pub entries: u64,
    /// Entries of the table from one row to the next.
    pub row_stride: u32,
    /// How many entries are patched.
    pub n: u32,
}

// The other side of the assertions in `kernels/params.h`.
const _: () = {
    assert!(size_of::<Piece>() == 24);
    assert!(offset_of!(Piece, frame_stride) == 8);
    assert!(offset_of!(Piece, bytes) == 16);
    assert!(offset_of!(Piece, packed_at) == 20);
    assert!(size_of::<Move>() == 8);
    assert!(offset_of!(Move, dst) == 4);
    assert!(size_of::<Lane>() == 16);
    assert!(offset_of!(Lane, frame_stride) == 8);
    assert!(size_of::<CopyParams>() == 32);
    assert!(offset_of!(CopyParams, moves) == 8);
    assert!(offset_of!(CopyParams, n_pieces) == 16);
    assert!(offset_of!(CopyParams, n_moves) == 20);
    assert!(offset_of!(CopyParams, unit) == 24);
    assert!(size_of::<ZeroParams>() == 32);
    assert!(offset_of!(ZeroParams, frames) == 8);
    assert!(offset_of!(ZeroParams, n_pieces) == 16);
    assert!(offset_of!(ZeroParams, n_frames) == 20);
    assert!(offset_of!(ZeroParams, unit) == 24);
    assert!(size_of::<PackParams>() == 48);
    assert!(offset_of!(PackParams, frames) == 8);
    assert!(offset_of!(PackParams, packed) == 16);
    assert!(offset_of!(PackParams, packed_stride) == 24);
    assert!(offset_of!(PackParams, n_pieces) == 32);
    assert!(offset_of!(PackParams, n_frames) == 36);
    assert!(offset_of!(PackParams, unit) == 40);
    assert!(size_of::<RowsParams>() == 88);
    assert!(offset_of!(RowsParams, v) == 8);
    assert!(offset_of!(RowsParams, k_stride) == 16);
    assert!(offset_of!(RowsParams, v_stride) == 24);
    assert!(offset_of!(RowsParams, slots) == 32);
    assert!(offset_of!(RowsParams, k_lane) == 40);
    assert!(offset_of!(RowsParams, v_lane) == 56);
    assert!(offset_of!(RowsParams, row_bytes) == 72);
    assert!(offset_of!(RowsParams, block_tokens) == 76);
    assert!(offset_of!(RowsParams, n_tokens) == 80);
    assert!(offset_of!(RowsParams, unit) == 84);
    assert!(size_of::<QuantParams>() == 152);
    assert!(offset_of!(QuantParams, k_scales) == 88);
    assert!(offset_of!(QuantParams, v_scales) == 96);
    assert!(offset_of!(QuantParams, k_scale_lane) == 104);
    assert!(offset_of!(QuantParams, v_scale_lane) == 120);
    assert!(offset_of!(QuantParams, heads) == 136);
    assert!(offset_of!(QuantParams, head_dim) == 140);
    assert!(offset_of!(QuantParams, mode) == 144);
    assert!(size_of::<MovedEntry>() == 12);
    assert!(offset_of!(MovedEntry, column) == 4);
    assert!(offset_of!(MovedEntry, frame) == 8);
    assert!(size_of::<PatchParams>() == 24);
    assert!(offset_of!(PatchParams, entries) == 8);
    assert!(offset_of!(PatchParams, row_stride) == 16);
    assert!(offset_of!(PatchParams, n) == 20);
};

// SAFETY: of C's layout, without references, and the same on the device, as asserted above.
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
// SAFETY: as above.
unsafe impl DeviceRepr for Piece {}
// SAFETY: as above.
unsafe impl DeviceRepr for Move {}

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

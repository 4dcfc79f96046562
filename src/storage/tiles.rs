//! Routines that move bytes by addresses, strides and sizes. The table determines the order of
//! layers and blocks; [`check`](super::check) has validated all arguments, except for the frame
//! rule.
//!
//! Two views of the same memory:
//! - *tiles*, for rows of single tokens: one base, stride and size per plane;
//! - *extents*, for whole frames: planes with adjacent tiles form one extent. A block-first frame
//!   is one copy, and consecutive frames of a run are one copy per extent if they are contiguous.

use std::ops::Range;
use std::ptr::NonNull;

use crate::ids::Run;

use super::FrameMove;
use super::adopted::AdoptedPlane;
use super::elements::{Elements, ElementsMut};
use super::host_tile::HostTile;
use super::layout::{KvLayout, KvPlanes, Scales};
use super::plane::{Plane, PlaneKind};
use super::quant::{self, RowScales};
use super::stream::Copier;

mod receive;

#[derive(Clone, Copy, Debug)]
struct Tile {
    base: *mut u8,
    frame_stride: usize,
    bytes: usize,
}

/// One contiguous part of each frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Address in frame 0.
    pub base: u64,
    /// Bytes from one frame's part to the next.
    pub frame_stride: usize,
    /// Size of the part.
    pub bytes: usize,
}

impl Tile {
    /// # Safety
    /// The frame exists.
    #[inline]
    unsafe fn of(&self, frame: usize) -> *mut u8 {
        // SAFETY: frames that exist lie within the plane.
        unsafe { self.base.add(frame * self.frame_stride) }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Half {
    K,
    V,
}

/// Consecutive slots of one frame, and the corresponding rows of the caller's buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Rows {
    index: usize,
    frame: usize,
    offset: usize,
    len: usize,
}

#[derive(Debug)]
pub(super) struct Tiles {
    planes: Box<[Tile]>,
    extents: Box<[Tile]>,
}

// SAFETY: only unsafe functions use the addresses, and their callers keep the frame rule.
unsafe impl Send for Tiles {}
// SAFETY: as above.
unsafe impl Sync for Tiles {}

impl Tiles {
    /// Builds the tiles from the planes' addresses, in the layout's order. Planes are joined only
    /// if their tiles interleave, which proves that both belong to one allocation. A single frame
    /// gives no such evidence.
    pub(super) fn new(planes: impl Iterator<Item = (*mut u8, Plane)>, frames_max: usize) -> Self {
        let planes: Box<[Tile]> = planes
            .map(|(base, plane)| Tile { base, frame_stride: plane.frame_stride, bytes: plane.tile_bytes })
            .collect();
        let mut extents: Vec<Tile> = Vec::new();
        for &tile in &planes {
            match extents.last_mut() {
                Some(last)
                    if frames_max > 1
                        && last.frame_stride == tile.frame_stride
                        && last.base.wrapping_add(last.bytes).addr() == tile.base.addr()
                        && last.bytes + tile.bytes <= last.frame_stride =>
                {
                    last.bytes += tile.bytes;
                }
                _ => extents.push(tile),
            }
        }
        Self { planes, extents: extents.into() }
    }

    /// Returns base and stride of each plane, in the layout's order.
    pub(super) fn planes(&self) -> impl Iterator<Item = AdoptedPlane> {
        self.planes.iter().map(|tile| AdoptedPlane { base: tile.base, frame_stride: tile.frame_stride })
    }

    /// Returns the extents in packed order. Exposes their addresses, through which a device writes.
    pub(super) fn extents(&self) -> impl Iterator<Item = Extent> {
        self.extents.iter().map(|&Tile { base, frame_stride, bytes }| Extent {
            base: base.expose_provenance() as u64,
            frame_stride,
            bytes,
        })
    }

    /// # Safety
    /// The layer and the frame exist; the frame rule, for every access through the result.
    pub(super) unsafe fn host_tile(&self, layout: &KvLayout, layer: usize, frame: usize) -> HostTile {
        let part = |kind: PlaneKind, half: Half| {
            let (tile, lane) = self.lane(layout, layer, kind, half);
            let bytes = layout.block_tokens() * layout.row_bytes(kind);
            // SAFETY: the frame exists, and its tile has this part.
            let start = unsafe { NonNull::new_unchecked(tile.of(frame).add(lane)) };
            NonNull::slice_from_raw_parts(start, bytes)
        };
        let parts = |kind: PlaneKind| {
            let none = NonNull::slice_from_raw_parts(NonNull::dangling(), 0);
            [part(kind, Half::K), if halves(layout) == 2 { part(kind, Half::V) } else { none }]
        };
        let values = parts(PlaneKind::Values);
        let mut scales = [NonNull::slice_from_raw_parts(NonNull::dangling(), 0); 2];
        if layout.has_scale_planes() {
            scales = parts(PlaneKind::Scales)
                .map(|bytes| NonNull::slice_from_raw_parts(bytes.cast(), bytes.len() / size_of::<f32>()));
        }
        // SAFETY: distinct parts of distinct tiles, initialised when the memory was reserved or
        // adopted, and aligned: the bases and strides of planes are, and a tile's K has whole
        // elements. This storage has no streams.
        unsafe { HostTile::new(layout.dtype(), layout.block_tokens(), values, scales) }
    }

    pub(super) fn spans(&self, frames: usize) -> impl Iterator<Item = Range<usize>> {
        self.extents.iter().map(move |extent| {
            let start = extent.base.addr();
            start..start + (frames - 1) * extent.frame_stride + extent.bytes
        })
    }

    /// Returns the plane of K's or V's rows, and their offset in a frame's tile.
    #[inline]
    fn lane(&self, layout: &KvLayout, layer: usize, kind: PlaneKind, half: Half) -> (Tile, usize) {
        let separate = layout.parts() == KvPlanes::Separate;
        let parts = if separate { 2 } else { 1 };
        let kind_at = if kind == PlaneKind::Scales { parts } else { 0 };
        let part_at = usize::from(separate && half == Half::V);
        let offset = match half {
            Half::V if !separate => layout.block_tokens() * layout.row_bytes(kind),
            _ => 0,
        };
        (self.planes[layer * layout.planes_per_layer() + kind_at + part_at], offset)
    }

    /// # Safety
    /// The layer and the slots exist; `k` and `v` have one row per slot, of the layout's dtype or
    /// one that it converts; the frame rule.
    pub(super) unsafe fn store(
        &self,
        layout: &KvLayout,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: &[i64],
    ) {
        for (half, source) in [(Half::K, k), (Half::V, v)].into_iter().take(halves(layout)) {
            let (tile, lane) = self.lane(layout, layer, PlaneKind::Values, half);
            let row_bytes = layout.row_bytes(PlaneKind::Values);
            // Only a quantised layout admits another dtype.
            if source.dtype() == layout.dtype() {
                for rows in rows_of(slots, layout.block_tokens()) {
                    let from = source.as_bytes()[rows.index * row_bytes..][..rows.len * row_bytes].as_ptr();
                    // SAFETY: the rows lie within the tile of an existing frame that the caller
                    // owns; the check has shown that the buffer lies elsewhere.
                    unsafe {
                        let to = tile.of(rows.frame).add(lane + rows.offset * row_bytes);
                        from.copy_to_nonoverlapping(to, rows.len * row_bytes);
                    }
                }
                continue;
            }
            let mut scratch = vec![0f32; layout.head_dim()];
            for rows in rows_of(slots, layout.block_tokens()) {
                for row in 0..rows.len {
                    // SAFETY: as above; the caller owns a row exclusively, and so its scale row.
                    unsafe {
                        let offset = rows.offset + row;
                        let scales = self.row_scales(layout, layer, half, rows.frame, offset);
                        let to = tile.of(rows.frame).add(lane + offset * row_bytes);
                        let codes = std::slice::from_raw_parts_mut(to, row_bytes);
                        let first = (rows.index + row) * layout.row_elements();
                        quant::store_row(layout.dtype(), source, first, &scales, &mut scratch, codes);
                    }
                }
            }
        }
    }

    /// # Safety
    /// As for [`store`](Self::store).
    pub(super) unsafe fn load(
        &self,
        layout: &KvLayout,
        layer: usize,
        slots: &[i64],
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) {
        for (half, mut target) in [(Half::K, k), (Half::V, v)].into_iter().take(halves(layout)) {
            let (tile, lane) = self.lane(layout, layer, PlaneKind::Values, half);
            let row_bytes = layout.row_bytes(PlaneKind::Values);
            if target.as_elements().dtype() == layout.dtype() {
                for rows in rows_of(slots, layout.block_tokens()) {
                    let to = &mut target.as_bytes_mut()[rows.index * row_bytes..][..rows.len * row_bytes];
                    // SAFETY: as in `store`.
                    unsafe {
                        let from = tile.of(rows.frame).add(lane + rows.offset * row_bytes);
                        from.copy_to_nonoverlapping(to.as_mut_ptr(), to.len());
                    }
                }
                continue;
            }
            let mut scratch = vec![0f32; layout.head_dim()];
            for rows in rows_of(slots, layout.block_tokens()) {
                for row in 0..rows.len {
                    // SAFETY: as in `store`; no one writes the row meanwhile.
                    unsafe {
                        let offset = rows.offset + row;
                        let scales = self.row_scales(layout, layer, half, rows.frame, offset);
                        let from = tile.of(rows.frame).add(lane + offset * row_bytes);
                        let codes = std::slice::from_raw_parts(from, row_bytes);
                        let first = (rows.index + row) * layout.row_elements();
                        quant::load_row(layout.dtype(), codes, &scales, &mut scratch, &mut target, first);
                    }
                }
            }
        }
    }

    /// # Safety
    /// The layer, the frame and the offset exist.
    unsafe fn row_scales<'a>(
        &self,
        layout: &'a KvLayout,
        layer: usize,
        half: Half,
        frame: usize,
        offset: usize,
    ) -> RowScales<'a> {
        match layout.scales() {
            Scales::Unit => RowScales::Unit,
            Scales::PerHead { k, v } => {
                let scales = if half == Half::K { k } else { v };
                RowScales::PerHead(&scales[layer * layout.kv_heads()..][..layout.kv_heads()])
            }
            Scales::PerTokenHead => {
                let (tile, lane) = self.lane(layout, layer, PlaneKind::Scales, half);
                // SAFETY: the scale tile has a row for each token of the block.
                RowScales::InTile(unsafe {
                    tile.of(frame).add(lane + offset * layout.row_bytes(PlaneKind::Scales))
                })
            }
        }
    }

    /// # Safety
    /// The frames exist; destinations are distinct and no destination is a source; the frame rule.
    pub(super) unsafe fn copy(&self, moves: &[FrameMove]) {
        let mut copier = Copier::new(self.bytes_of(moves.len()));
        for extent in &self.extents {
            for (step, len) in joined_moves(moves) {
                // SAFETY: the frames exist and the caller owns them. Sources and destinations are
                // distinct, and a joined move advances through both in step, so the two pieces
                // cannot overlap.
                unsafe {
                    let (from, to) = (extent.of(step.src.index()), extent.of(step.dst.index()));
                    each_piece(extent, len, |at, bytes| copier.copy(from.add(at), to.add(at), bytes));
                }
            }
        }
        copier.finish();
    }

    fn bytes_of(&self, frames: usize) -> usize {
        self.extents.iter().map(|extent| extent.bytes * frames).sum()
    }

    /// # Safety
    /// The frames exist; `out` has room for all of them; the frame rule.
    pub(super) unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) {
        let mut copier = Copier::new(out.len());
        let mut rest = out;
        self.each_packed(runs, |from, bytes| {
            let (to, after) = std::mem::take(&mut rest).split_at_mut(bytes);
            // SAFETY: a piece of existing frames that no one writes; the check has shown that the
            // buffer lies elsewhere.
            unsafe { copier.copy(from, to.as_mut_ptr(), bytes) };
            rest = after;
        });
        copier.finish();
    }

    /// # Safety
    /// The frames exist and are distinct; `packed` holds the bytes of all of them; the frame rule.
    pub(super) unsafe fn unpack(&self, runs: &[Run], packed: &[u8]) {
        let mut copier = Copier::new(packed.len());
        let mut rest = packed;
        self.each_packed(runs, |to, bytes| {
            let (from, after) = rest.split_at(bytes);
            // SAFETY: a piece of existing frames that the caller owns; the check has shown that the
            // buffer lies elsewhere.
            unsafe { copier.copy(from.as_ptr(), to, bytes) };
            rest = after;
        });
        copier.finish();
    }

    /// # Safety
    /// The frames exist; the frame rule.
    pub(super) unsafe fn zero(&self, runs: &[Run]) {
        for extent in &self.extents {
            for run in runs.iter().filter(|run| run.len > 0) {
                // SAFETY: the frames exist, and the caller owns them.
                unsafe {
                    let start = extent.of(run.start.index());
                    each_piece(extent, run.len as usize, |at, bytes| start.add(at).write_bytes(0, bytes));
                }
            }
        }
    }

    /// Calls `f` with the pieces of memory in packed order: frame by frame, plane by plane.
    fn each_packed(&self, runs: &[Run], mut f: impl FnMut(*mut u8, usize)) {
        // Frames with a single extent are already in packed order.
        if let [extent] = &*self.extents {
            for run in runs.iter().filter(|run| run.len > 0) {
                let start = extent.base.wrapping_add(run.start.index() * extent.frame_stride);
                each_piece(extent, run.len as usize, |at, bytes| f(start.wrapping_add(at), bytes));
            }
            return;
        }
        for frame in runs.iter().flat_map(|run| run.frames()) {
            for extent in &self.extents {
                f(extent.base.wrapping_add(frame.index() * extent.frame_stride), extent.bytes);
            }
        }
    }
}

fn halves(layout: &KvLayout) -> usize {
    if layout.parts() == KvPlanes::Latent { 1 } else { 2 }
}

/// Calls `f` with offset and size of the contiguous pieces of consecutive frames of an extent.
#[inline]
fn each_piece(extent: &Tile, frames: usize, mut f: impl FnMut(usize, usize)) {
    if extent.bytes == extent.frame_stride {
        f(0, frames * extent.bytes);
    } else {
        (0..frames).for_each(|frame| f(frame * extent.frame_stride, extent.bytes));
    }
}

/// Splits a slot list into consecutive rows of one frame each. Skips negative slots.
fn rows_of(slots: &[i64], block_tokens: usize) -> impl Iterator<Item = Rows> {
    let mut next = 0;
    std::iter::from_fn(move || {
        while *slots.get(next)? < 0 {
            next += 1;
        }
        let index = next;
        let first = slots[index] as usize;
        let (frame, offset) = (first / block_tokens, first % block_tokens);
        let room = block_tokens - offset;
        let len = 1 + slots[index + 1..]
            .iter()
            .zip(first as i64 + 1..)
            .take(room - 1)
            .take_while(|&(&slot, expected)| slot == expected)
            .count();
        next += len;
        Some(Rows { index, frame, offset, len })
    })
}

/// Splits a list of moves into runs of consecutive frames, as first move and length.
fn joined_moves(moves: &[FrameMove]) -> impl Iterator<Item = (FrameMove, usize)> {
    moves
        .chunk_by(|a, b| a.src.0 + 1 == b.src.0 && a.dst.0 + 1 == b.dst.0)
        .map(|chunk| (chunk[0], chunk.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::FrameId;

    #[test]
    fn rows_stop_at_frames_gaps_and_padding() {
        let rows = |slots| -> Vec<_> {
            rows_of(slots, 4).map(|rows| (rows.index, rows.frame, rows.offset, rows.len)).collect()
        };
        assert_eq!(rows(&[]), []);
        assert_eq!(rows(&[-1, -1]), []);
        assert_eq!(rows(&[2, 3, 4, 5, 6, 7, 8]), [(0, 0, 2, 2), (2, 1, 0, 4), (6, 2, 0, 1)]);
        assert_eq!(rows(&[-1, 5, 6, -1, 7, 1, 0]), [(1, 1, 1, 2), (4, 1, 3, 1), (5, 0, 1, 1), (6, 0, 0, 1)]);
    }

    #[test]
    fn neighbours_that_go_to_neighbours_are_one_move() {
        let step = |src, dst| FrameMove::new(FrameId(src), FrameId(dst));
        let moves = [step(0, 8), step(1, 9), step(2, 11), step(4, 12), step(5, 13), step(6, 14)];
        let joined: Vec<_> = joined_moves(&moves).collect();
        assert_eq!(joined, [(step(0, 8), 2), (step(2, 11), 1), (step(4, 12), 3)]);
    }
}

//! Planes cut for kernels: a table of pieces in packed order, built once per storage.
//!
//! ```text
//! plane:  tile of frame 0 | tile of frame 1 | ...      at base + frame * frame_stride
//! pieces: [<= 16 KiB][<= 16 KiB][rest]                  the same cuts in every frame
//! ```
//!
//! A kernel's unit of work is one piece of one frame, so that it needs no knowledge of layers,
//! arrangements, parts or scales. The table is in the device's memory while the storage lives, and
//! never changes, because planes do not move.

use kvpool::Invalid;
use kvpool::storage::backend::Extent;
use kvpool::storage::{KvLayout, Plane, PlaneKind, PlanePart};

use super::params::{Lane, PIECE_BYTES_MAX, Piece, unit};

/// A plane and its address in the device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Placed {
    pub(super) base: u64,
    pub(super) plane: Plane,
}

impl Placed {
    pub(super) fn extent(&self) -> Extent {
        let Plane { frame_stride, tile_bytes, .. } = self.plane;
        Extent { base: self.base, frame_stride, bytes: tile_bytes }
    }
}

/// The table of pieces; see the [module](self).
#[derive(Debug)]
pub(super) struct Pieces {
    pub(super) list: Vec<Piece>,
    /// Unit of access for copies between frames.
    pub(super) copy_unit: u32,
    /// Unit of access for the packed form, which has no padding.
    pub(super) pack_unit: u32,
}

impl Pieces {
    /// Cuts the planes, given in the layout's order.
    ///
    /// # Errors
    /// A block that is too large: kernels use 32-bit offsets in a packed frame.
    pub(super) fn new(placed: &[Placed]) -> Result<Self, Invalid> {
        Self::of(placed.iter().map(Placed::extent))
    }

    /// Cuts extents, given in packed order.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub(super) fn of(extents: impl IntoIterator<Item = Extent>) -> Result<Self, Invalid> {
        let too_large = || Invalid::new("packed block", "4 GiB or more", "less");
        let (mut list, mut packed_at) = (Vec::new(), 0u32);
        for Extent { base, frame_stride, bytes: whole } in extents {
            let mut at = 0;
            while at < whole {
                let bytes = (whole - at).min(PIECE_BYTES_MAX as usize) as u32;
                list.push(Piece {
                    base: base + at as u64,
                    frame_stride: frame_stride as u64,
                    bytes,
                    packed_at,
                });
                packed_at = packed_at.checked_add(bytes).ok_or_else(too_large)?;
                at += bytes as usize;
            }
        }
        let copied = list.iter().flat_map(|piece| [piece.base, piece.frame_stride, piece.bytes.into()]);
        let copy_unit = unit(copied);
        // The end of a packed frame is the start of the next one.
        let packed = list.iter().map(|piece| piece.packed_at.into()).chain([packed_at.into()]);
        let pack_unit = copy_unit.min(unit(packed));
        Ok(Self { list, copy_unit, pack_unit })
    }

    /// Returns the number of pieces from `first` on that pack to at most `bytes` bytes, and their
    /// size.
    ///
    /// The number is at least one.
    pub(super) fn group(&self, first: usize, bytes: usize) -> (usize, usize) {
        let mut sum = 0;
        let fits = self.list[first..].iter().take_while(|piece| {
            sum += piece.bytes as usize;
            sum <= bytes
        });
        let count = fits.count().max(1);
        (count, self.list[first..first + count].iter().map(|piece| piece.bytes as usize).sum())
    }
}

/// Lanes of K and V of one layer, and of their scales; V's are unused in a latent layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct LayerLanes {
    pub(super) values: [Lane; 2],
    pub(super) scales: [Lane; 2],
}

/// Returns the lanes by layer, or a plane of which no kernel knows the lanes.
pub(super) fn lanes(placed: &[Placed], layout: &KvLayout) -> Result<Vec<LayerLanes>, Plane> {
    let mut layers = vec![LayerLanes::default(); layout.layers()];
    for Placed { base, plane } in placed {
        let lane =
            |offset: usize| Lane { base: base + offset as u64, frame_stride: plane.frame_stride as u64 };
        let of_layer = &mut layers[plane.layer];
        let lanes = match plane.kind {
            PlaneKind::Values => &mut of_layer.values,
            PlaneKind::Scales => &mut of_layer.scales,
            _ => return Err(*plane),
        };
        match plane.part {
            PlanePart::K | PlanePart::Latent => lanes[0] = lane(0),
            PlanePart::V => lanes[1] = lane(0),
            PlanePart::Joined => {
                *lanes = [lane(0), lane(layout.block_tokens() * layout.row_bytes(plane.kind))];
            }
            _ => return Err(*plane),
        }
    }
    Ok(layers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool::storage::{Arrangement, Dtype, KvPlanes, Scales};

    fn placed(layout: &KvLayout) -> Vec<Placed> {
        let planes = layout.planes(7).unwrap().planes;
        planes.into_iter().map(|plane| Placed { base: 4096 + plane.base as u64, plane }).collect()
    }

    fn layout(heads: usize, head_dim: usize) -> kvpool::storage::KvLayoutBuilder {
        KvLayout::builder().layers(3).kv_heads(heads).head_dim(head_dim)
    }

    #[test]
    fn pieces_are_the_tiles_and_the_packed_form_without_gaps() {
        for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
            for parts in [KvPlanes::Separate, KvPlanes::Joined] {
                let builder = layout(8, 128).dtype(Dtype::Fp8E4M3).scales(Scales::PerTokenHead);
                let layout = builder.block_tokens(48).arrangement(arrangement).parts(parts).build().unwrap();
                let pieces = Pieces::new(&placed(&layout)).unwrap();
                let mut at = 0;
                for piece in &pieces.list {
                    assert_eq!(piece.packed_at, at);
                    assert!((1..=PIECE_BYTES_MAX).contains(&piece.bytes));
                    at += piece.bytes;
                }
                assert_eq!(at as usize, layout.packed_bytes());
                assert_eq!((pieces.copy_unit, pieces.pack_unit), (16, 16));
                // 48 KiB of values are three full pieces.
                assert!(pieces.list.iter().any(|piece| piece.bytes == PIECE_BYTES_MAX));
            }
        }
    }

    #[test]
    fn odd_sizes_make_narrow_units() {
        for (heads, head_dim, dtype, unit) in
            [(1, 5, Dtype::Int8, 1), (1, 3, Dtype::F32, 4), (2, 4, Dtype::F32, 16)]
        {
            let layout = layout(heads, head_dim).block_tokens(1).dtype(dtype).build().unwrap();
            let pieces = Pieces::new(&placed(&layout)).unwrap();
            assert_eq!((pieces.copy_unit, pieces.pack_unit), (unit, unit), "{layout}");
        }
    }

    #[test]
    fn groups_cover_all_pieces_and_keep_to_the_limit() {
        let layout = layout(8, 128).block_tokens(40).build().unwrap();
        let pieces = Pieces::new(&placed(&layout)).unwrap();
        for limit in [1, 16 << 10, 100_000, 1 << 30] {
            let (mut first, mut sum) = (0, 0);
            while first < pieces.list.len() {
                let (count, bytes) = pieces.group(first, limit);
                assert!(count == 1 || bytes <= limit);
                (first, sum) = (first + count, sum + bytes);
            }
            assert_eq!((first, sum), (pieces.list.len(), layout.packed_bytes()));
        }
    }

    #[test]
    fn lanes_of_joined_planes_are_half_a_tile_apart() {
        let joined = layout(2, 8).dtype(Dtype::Int8).scales(Scales::PerTokenHead).parts(KvPlanes::Joined);
        let joined = joined.build().unwrap();
        let layer = lanes(&placed(&joined), &joined).unwrap()[1];
        for (kind, [k, v]) in [(PlaneKind::Values, layer.values), (PlaneKind::Scales, layer.scales)] {
            assert_eq!(v.base - k.base, (16 * joined.row_bytes(kind)) as u64);
            assert_eq!(k.frame_stride, v.frame_stride);
        }
        let latent = KvLayout::builder().layers(2).latent(24).build().unwrap();
        let [k, v] = lanes(&placed(&latent), &latent).unwrap()[1].values;
        assert!(k.base > 0 && v == Lane::default());
    }
}

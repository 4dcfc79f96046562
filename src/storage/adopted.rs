//! Memory allocated by an engine: its KV tensors, given as base pointers and strides.

use std::ops::Range;

use crate::error::StorageError;

use super::layout::KvLayout;
use super::plane::{Plane, PlaneKind};

/// One plane of an engine's own memory.
///
/// Planes are listed in the order of [`KvLayout::planes`]: by layer, values before scales, K before
/// V.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdoptedPlane {
    /// Address of frame 0's tile.
    pub base: *mut u8,
    /// Bytes from one frame's tile to the next frame's. At least the tile's size; it may differ
    /// between planes.
    pub frame_stride: usize,
}

/// Checks an engine's planes, and returns them with the tile sizes of the layout.
///
/// # Errors
/// [`StorageError::Layout`], [`StorageError::PlaneCount`]; a plane that is null, misaligned, too
/// long, or overlaps another one.
pub fn check_planes(
    layout: &KvLayout,
    adopted: &[AdoptedPlane],
    frames: usize,
) -> Result<Vec<(*mut u8, Plane)>, StorageError> {
    let table = layout.planes(frames)?.planes;
    if adopted.len() != table.len() {
        return Err(StorageError::PlaneCount { got: adopted.len(), want: table.len() });
    }
    let mut spans = Vec::with_capacity(table.len());
    let planes: Vec<_> = adopted
        .iter()
        .zip(table)
        .map(|(adopted, plane)| {
            (adopted.base, Plane { frame_stride: adopted.frame_stride, base: 0, ..plane })
        })
        .collect();
    for (index, (base, plane)) in planes.iter().enumerate() {
        spans.push(checked_span(layout, index, base.addr(), plane, frames)?);
    }

    let mut order: Vec<usize> = (0..planes.len()).collect();
    order.sort_unstable_by_key(|&index| spans[index].start);
    for (at, &a) in order.iter().enumerate() {
        // Later spans begin after this one has ended, so that no further overlap is possible.
        for &b in order[at + 1..].iter().take_while(|&&b| spans[b].start < spans[a].end) {
            let gap = spans[b].start - spans[a].start;
            if !interleave(gap, &planes[a].1, &planes[b].1) {
                let (first, second) = (a.min(b), a.max(b));
                return Err(StorageError::PlanesOverlap { first, second });
            }
        }
    }
    Ok(planes)
}

/// Checks a plane, and returns the addresses from its first byte to its last.
fn checked_span(
    layout: &KvLayout,
    index: usize,
    base: usize,
    plane: &Plane,
    frames: usize,
) -> Result<Range<usize>, StorageError> {
    let Plane { frame_stride, tile_bytes, .. } = *plane;
    let align = match plane.kind {
        PlaneKind::Values => layout.dtype().bytes(),
        PlaneKind::Scales => align_of::<f32>(),
    };
    if base == 0 {
        return Err(StorageError::PlaneNull { plane: index });
    }
    if !base.is_multiple_of(align) || !frame_stride.is_multiple_of(align) {
        return Err(StorageError::PlaneMisaligned { plane: index, base, frame_stride, align });
    }
    if frame_stride < tile_bytes {
        return Err(StorageError::PlaneStride { plane: index, frame_stride, tile_bytes });
    }
    let too_large = StorageError::PlaneTooLarge { plane: index };
    let span = frame_stride.checked_mul(frames - 1).and_then(|bytes| bytes.checked_add(tile_bytes));
    let end = span.filter(|&bytes| bytes <= isize::MAX as usize).and_then(|bytes| base.checked_add(bytes));
    Ok(base..end.ok_or(too_large)?)
}

/// Returns true if the second plane's tiles lie between the first's.
///
/// They are `gap` bytes behind the first's, as in a block-first tensor or one of
/// `[frames][2][...]`.
fn interleave(gap: usize, first: &Plane, second: &Plane) -> bool {
    let stride = first.frame_stride;
    let phase = gap % stride;
    stride == second.frame_stride && phase >= first.tile_bytes && stride - phase >= second.tile_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{Arrangement, Dtype, KvPlanes};

    /// A layout of two layers of K and V, with tiles of 32 bytes.
    fn layout() -> KvLayout {
        KvLayout::builder()
            .layers(2)
            .kv_heads(1)
            .head_dim(4)
            .block_tokens(2)
            .dtype(Dtype::F32)
            .build()
            .unwrap()
    }

    fn at(planes: [(usize, usize); 4]) -> Vec<AdoptedPlane> {
        planes
            .map(|(base, frame_stride)| AdoptedPlane {
                base: std::ptr::without_provenance_mut(base),
                frame_stride,
            })
            .to_vec()
    }

    fn refused(planes: [(usize, usize); 4], frames: usize) -> StorageError {
        check_planes(&layout(), &at(planes), frames).unwrap_err()
    }

    #[test]
    fn usual_tensors_are_taken() {
        // [layers][2][frames][...], [frames][layers][2][...], and planes in any order with gaps.
        for tensors in [
            [(4096, 32), (4224, 32), (4352, 32), (4480, 32)],
            [(4096, 128), (4128, 128), (4160, 128), (4192, 128)],
            [(9000, 48), (4096, 64), (4128, 64), (8000, 32)],
        ] {
            assert!(check_planes(&layout(), &at(tensors), 4).is_ok(), "{tensors:?}");
        }
        for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
            for parts in [KvPlanes::Separate, KvPlanes::Joined] {
                let layout = KvLayout::named_builder("tiny").unwrap().arrangement(arrangement).parts(parts);
                let layout = layout.build().unwrap();
                let own: Vec<_> = layout.planes(5).unwrap().planes;
                let adopted: Vec<_> = own
                    .iter()
                    .map(|plane| AdoptedPlane {
                        base: std::ptr::without_provenance_mut(4096 + plane.base),
                        frame_stride: plane.frame_stride,
                    })
                    .collect();
                assert!(check_planes(&layout, &adopted, 5).is_ok());
            }
        }
    }

    #[test]
    fn impossible_tensors_are_named() {
        assert_eq!(
            check_planes(&layout(), &at([(64, 32); 4])[..3], 4),
            Err(StorageError::PlaneCount { got: 3, want: 4 })
        );
        assert_eq!(
            refused([(4096, 32), (0, 32), (4352, 32), (4480, 32)], 4),
            StorageError::PlaneNull { plane: 1 }
        );
        assert_eq!(
            refused([(4096, 32), (4224, 32), (4354, 32), (4480, 32)], 4),
            StorageError::PlaneMisaligned { plane: 2, base: 4354, frame_stride: 32, align: 4 }
        );
        assert_eq!(
            refused([(4096, 32), (4224, 32), (4352, 34), (4480, 32)], 4),
            StorageError::PlaneMisaligned { plane: 2, base: 4352, frame_stride: 34, align: 4 }
        );
        assert_eq!(
            refused([(4096, 32), (4224, 32), (4352, 28), (4480, 32)], 4),
            StorageError::PlaneStride { plane: 2, frame_stride: 28, tile_bytes: 32 }
        );
        assert_eq!(
            refused([(4096, 32), (4224, 32), (4352, usize::MAX - 3), (4480, 32)], 4),
            StorageError::PlaneTooLarge { plane: 2 }
        );
        // Consecutive planes one tile too close; the same plane twice; a tile that crosses
        // another's gap; different strides.
        for tensors in [
            [(4096, 32), (4192, 32), (4352, 32), (4480, 32)],
            [(4096, 32), (4096, 32), (4352, 32), (4480, 32)],
            [(4096, 64), (4112, 64), (8352, 32), (8480, 32)],
            [(4096, 64), (4128, 96), (8352, 32), (8480, 32)],
        ] {
            assert_eq!(
                refused(tensors, 4),
                StorageError::PlanesOverlap { first: 0, second: 1 },
                "{tensors:?}"
            );
        }
    }
}

use std::fmt;
use std::ops::Range;

use crate::error::Invalid;

use super::layout::KvLayout;
use super::plane::{Plane, PlaneKind};

/// One plane of an engine's memory, listed in the order of [`KvLayout::planes`]: by layer, values
/// before scales, K before V.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdoptedPlane {
    /// Address of frame 0's tile.
    pub base: *mut u8,
    /// Bytes from one frame's tile to the next, at least the tile's size; planes may differ.
    pub frame_stride: usize,
}

/// Checks an engine's planes, and returns them with the tile sizes of the layout. Fails for a wrong
/// number of planes, and a plane that is null, misaligned, too long, or overlaps another one.
pub fn check_planes(
    layout: &KvLayout,
    adopted: &[AdoptedPlane],
    frames: usize,
) -> Result<Vec<(*mut u8, Plane)>, Invalid> {
    let table = layout.planes(frames)?.planes;
    if adopted.len() != table.len() {
        return Err(Invalid::new("number of planes", adopted.len(), table.len()));
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
        // Later spans begin after this one has ended, so no further overlap is possible.
        for &b in order[at + 1..].iter().take_while(|&&b| spans[b].start < spans[a].end) {
            let gap = spans[b].start - spans[a].start;
            if !interleave(gap, &planes[a].1, &planes[b].1) {
                let got = format_args!("memory of the plane at index {}", a.min(b));
                return Err(Invalid::new("plane", got, "memory of its own").at(a.max(b)));
            }
        }
    }
    Ok(planes)
}

fn checked_span(
    layout: &KvLayout,
    index: usize,
    base: usize,
    plane: &Plane,
    frames: usize,
) -> Result<Range<usize>, Invalid> {
    let Plane { frame_stride, tile_bytes, .. } = *plane;
    let align = match plane.kind {
        PlaneKind::Values => layout.dtype().bytes(),
        PlaneKind::Scales => align_of::<f32>(),
    };
    let got = format_args!("base {base:#x} with a stride of {frame_stride} bytes");
    let refused = |limit: fmt::Arguments<'_>| Err(Invalid::new("plane", got, limit).at(index));
    if base == 0 {
        return refused(format_args!("a base that is not null"));
    }
    if !base.is_multiple_of(align) || !frame_stride.is_multiple_of(align) {
        return refused(format_args!("multiples of {align} bytes"));
    }
    if frame_stride < tile_bytes {
        return refused(format_args!("a stride of at least {tile_bytes}, the bytes of a tile"));
    }
    let span = frame_stride.checked_mul(frames - 1).and_then(|bytes| bytes.checked_add(tile_bytes));
    match span.filter(|&bytes| bytes <= isize::MAX as usize).and_then(|bytes| base.checked_add(bytes)) {
        Some(end) => Ok(base..end),
        None => refused(format_args!("{frames} frames within the address space")),
    }
}

/// Returns whether the second plane's tiles, `gap` bytes behind the first's, lie between them, as
/// in a block-first tensor or one of `[frames][2][...]`.
fn interleave(gap: usize, first: &Plane, second: &Plane) -> bool {
    let stride = first.frame_stride;
    let phase = gap % stride;
    stride == second.frame_stride && phase >= first.tile_bytes && stride - phase >= second.tile_bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{Arrangement, Dtype, KvPlanes};

    /// Two layers of K and V, with tiles of 32 bytes.
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

    fn refused(planes: [(usize, usize); 4]) -> String {
        check_planes(&layout(), &at(planes), 4).unwrap_err().to_string()
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
        let few = check_planes(&layout(), &at([(64, 32); 4])[..3], 4).unwrap_err();
        assert_eq!(few.to_string(), "number of planes: got 3, expected 4");
        for ((base, stride), limit) in [
            ((0, 32), "a base that is not null"),
            ((4354, 32), "multiples of 4 bytes"),
            ((4352, 34), "multiples of 4 bytes"),
            ((4352, 28), "a stride of at least 32, the bytes of a tile"),
            ((4352, usize::MAX - 3), "4 frames within the address space"),
        ] {
            assert_eq!(
                refused([(4096, 32), (4224, 32), (base, stride), (4480, 32)]),
                format!(
                    "plane at index 2: got base {base:#x} with a stride of {stride} bytes, expected {limit}"
                )
            );
        }
        // Consecutive planes one tile too close; the same plane twice; a tile that crosses
        // another's gap; different strides.
        for tensors in [
            [(4096, 32), (4192, 32), (4352, 32), (4480, 32)],
            [(4096, 32), (4096, 32), (4352, 32), (4480, 32)],
            [(4096, 64), (4112, 64), (8352, 32), (8480, 32)],
            [(4096, 64), (4128, 96), (8352, 32), (8480, 32)],
        ] {
            assert_eq!(
                refused(tensors),
                "plane at index 1: got memory of the plane at index 0, expected memory of its own",
                "{tensors:?}"
            );
        }
    }
}

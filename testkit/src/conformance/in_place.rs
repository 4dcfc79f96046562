//! Planes and tiles: every byte is where they say.

use kvpool::storage::{Dtype, KvPlanes, PlaneTensor, Scales, Storage};
use kvpool::{DeviceId, FrameId, StorageError};

use super::receive::fill;

/// Shapes and strides follow from the layout, and frames do not overlap. On the host, the bytes at
/// these addresses are the packed frames.
pub(super) fn planes(storage: &dyn Storage) {
    let layout = storage.layout().clone();
    let planes = storage.planes().expect("a backend gives out its planes");
    assert_eq!((planes.device(), planes.frames()), (storage.device(), storage.frames()));
    assert_eq!((planes.frames_max(), planes.layers().len()), (storage.frames_max(), layout.layers()));
    let is_latent = layout.parts() == KvPlanes::Latent;
    let is_scaled = *layout.scales() == Scales::PerTokenHead;
    for layer in planes.layers() {
        assert_eq!(layer.v.is_none(), is_latent);
        assert_eq!(
            (layer.k_scales.is_some(), layer.v_scales.is_some()),
            (is_scaled, is_scaled && !is_latent)
        );
        let values = [Some(layer.k), layer.v].map(|tensor| (tensor, layout.head_dim(), layout.dtype()));
        let scales = [layer.k_scales, layer.v_scales].map(|tensor| (tensor, 1, Dtype::F32));
        for (tensor, inner, dtype) in values.into_iter().chain(scales) {
            let Some(tensor) = tensor else { continue };
            let [tokens, heads] = [layout.block_tokens(), layout.kv_heads()];
            assert_eq!((tensor.shape, tensor.dtype), ([storage.frames(), tokens, heads, inner], dtype));
            assert_eq!(tensor.strides[1..], [heads * inner, inner, 1]);
            assert_eq!(tensor.frame_stride(), tensor.strides[0] * dtype.bytes());
            assert_eq!(tensor.frame_bytes(), tokens * heads * inner * dtype.bytes());
            assert!(tensor.data.addr().is_multiple_of(dtype.bytes()), "{tensor:?} is not aligned");
        }
    }
    let frame: usize = planes.tensors().map(|tensor| tensor.frame_bytes()).sum();
    assert_eq!(frame, layout.packed_bytes(), "all bytes of a block, without padding");
    let mut ranges: Vec<_> = planes
        .tensors()
        .flat_map(|tensor| (0..storage.frames()).map(move |frame| at(&tensor, frame)))
        .collect();
    ranges.sort_unstable();
    assert!(ranges.is_sorted_by(|a, b| a.0 + a.1 <= b.0), "frames of {layout} overlap");

    if storage.device() == DeviceId::Host {
        let packed = fill(storage, 5);
        let mut found: Vec<u8> = Vec::new();
        for frame in 0..storage.frames() {
            for tensor in planes.tensors() {
                let start = tensor.data.wrapping_add(frame * tensor.frame_stride());
                // SAFETY: memory of a usable frame, which no thread writes; this is the test's.
                found.extend(unsafe { std::slice::from_raw_parts(start, tensor.frame_bytes()) });
            }
        }
        assert_eq!(found, packed, "the planes of {layout}");
    }
}

fn at(tensor: &PlaneTensor, frame: usize) -> (usize, usize) {
    (tensor.data.addr() + frame * tensor.frame_stride(), tensor.frame_bytes())
}

/// Tiles are the packed frames, in pieces; a storage that has none says so.
pub(super) fn tiles(storage: &dyn Storage) {
    let layout = storage.layout().clone();
    let tile = |layer, frame| {
        // SAFETY: one thread.
        unsafe { storage.tile(layer, FrameId(frame as u32)) }
    };
    if let Err(error) = tile(0, 0) {
        return assert!(
            matches!(error, StorageError::Unsupported { device, .. } if device == storage.device())
        );
    }
    let (layers, frames) = (layout.layers(), storage.frames());
    let packed = fill(storage, 9);
    let mut found: Vec<u8> = Vec::new();
    for frame in 0..frames {
        for layer in 0..layers {
            let tile = tile(layer, frame).expect("a tile in range");
            assert_eq!(tile.dtype(), layout.dtype());
            // SAFETY: memory of a usable frame, which no thread writes.
            unsafe {
                tile.values().iter().for_each(|values| found.extend_from_slice(values.as_ref()));
                let scales = tile.scales().into_iter().flat_map(|scales| scales.as_ref().iter());
                scales.for_each(|scale| found.extend(scale.to_ne_bytes()));
            }
        }
    }
    assert_eq!(found, packed, "the tiles of {layout}");
    let refused = |layer, frame| tile(layer, frame).unwrap_err().to_string();
    assert_eq!(refused(layers, 0), format!("layer: got {layers}, expected less than {layers}"));
    assert_eq!(refused(0, frames), format!("frame at index 0: got {frames}, expected less than {frames}"));
}

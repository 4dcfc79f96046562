//! A storage's planes as tensors, for other libraries.
//!
//! ```text
//! values    [frames, block_tokens, heads, head_dim]     of the layout's dtype
//! scales    [frames, block_tokens, heads, 1]            of f32, if the layout has dynamic scales
//! ```
//!
//! Within a frame, elements are contiguous and row-major. The stride between frames depends on the
//! arrangement: in a joined plane, K and V are two tensors that interleave by frame. Quantised
//! codes are one byte each; their scales are in separate tensors or in the
//! [layout](KvLayout::scales).
//!
//! # Accessible frames
//! | | reserved host memory | adopted memory | mapped device memory |
//! |---|---|---|---|
//! | addresses and strides | fixed | fixed | fixed |
//! | the memory lives | until storage and owner are dropped | as long as the engine's own owner, which both keep | until storage and owner are dropped |
//! | frames below [`frames`](StoragePlanes::frames) | usable | usable | usable |
//! | frames that a growth adds | usable | (it cannot grow) | usable |
//! | frames that a shrink removes | readable, unspecified bytes | readable, no longer written by the pool | unmapped: an access fails the device |
//!
//! The number of frames in a shape is from the moment of the call. [The frame
//! rule](super::Storage#the-frame-rule) governs every access; in a pool, a [batch](crate::Batch)
//! ensures it.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::dtype::Dtype;
use crate::ids::DeviceId;

use super::adopted::AdoptedPlane;
use super::layout::{KvLayout, KvPlanes};
use super::plane::PlaneKind;

/// One plane as a tensor over all frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct PlaneTensor {
    /// Host or device address of the first element.
    pub data: *mut u8,
    /// Type of the elements.
    pub dtype: Dtype,
    /// `[frames, block_tokens, heads, head_dim]`; the last is 1 for scales.
    pub shape: [usize; 4],
    /// Elements from one index to the next, by dimension.
    pub strides: [usize; 4],
}

// SAFETY: a description. Dereferencing the address is the user's unsafe code.
unsafe impl Send for PlaneTensor {}
// SAFETY: as above.
unsafe impl Sync for PlaneTensor {}

impl PlaneTensor {
    fn new(data: *mut u8, dtype: Dtype, shape: [usize; 4], frame_stride: usize) -> Self {
        let [_, _, heads, inner] = shape;
        let strides = [frame_stride / dtype.bytes(), heads * inner, inner, 1];
        Self { data, dtype, shape, strides }
    }

    /// Returns the bytes of one frame, which are contiguous.
    pub fn frame_bytes(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * self.dtype.bytes()
    }

    /// Returns the bytes from one frame to the next.
    pub fn frame_stride(&self) -> usize {
        self.strides[0] * self.dtype.bytes()
    }

    /// Returns whether frames follow each other without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.frame_bytes() == self.frame_stride()
    }
}

/// K and V of one layer, as tensors over all frames.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct LayerPlanes {
    /// K, or the latent vectors.
    pub k: PlaneTensor,
    /// V; absent in a latent layout.
    pub v: Option<PlaneTensor>,
    /// Dynamic scales of K, or of the latent vectors, in a layout that has them.
    pub k_scales: Option<PlaneTensor>,
    /// Dynamic scales of V.
    pub v_scales: Option<PlaneTensor>,
}

impl LayerPlanes {
    /// Returns the tensors in canonical order: values before scales, K before V.
    pub fn tensors(&self) -> impl Iterator<Item = PlaneTensor> + use<> {
        [Some(self.k), self.v, self.k_scales, self.v_scales].into_iter().flatten()
    }
}

/// The planes of a storage and an owner of their memory; see [`planes`](super::Storage::planes).
#[derive(Clone)]
pub struct StoragePlanes {
    layers: Box<[LayerPlanes]>,
    frames: usize,
    frames_max: usize,
    device: DeviceId,
    owner: Arc<dyn Any + Send + Sync>,
}

impl StoragePlanes {
    /// For backends: describes planes given by base and stride, in the order of
    /// [`KvLayout::planes`]. Panics if their number is not the layout's.
    ///
    /// # Safety
    /// As long as `owner` lives, the planes are memory of the device, for all frames that the
    /// storage has: readable, writable, and on the host also initialised.
    pub unsafe fn new(
        layout: &KvLayout,
        planes: &[AdoptedPlane],
        (frames, frames_max): (usize, usize),
        device: DeviceId,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        let per_layer = layout.planes_per_layer();
        assert_eq!(planes.len(), per_layer * layout.layers(), "one base for each plane of {layout}");
        let layers = planes.chunks(per_layer).map(|planes| of_layer(layout, planes, frames)).collect();
        Self { layers, frames, frames_max, device, owner }
    }

    /// Returns K and V of each layer.
    pub fn layers(&self) -> &[LayerPlanes] {
        &self.layers
    }

    /// Returns all tensors, layer by layer.
    pub fn tensors(&self) -> impl Iterator<Item = PlaneTensor> + '_ {
        self.layers.iter().flat_map(LayerPlanes::tensors)
    }

    /// Returns the number of frames that were usable when the planes were requested.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Returns the maximum number of frames, for which there are addresses.
    pub fn frames_max(&self) -> usize {
        self.frames_max
    }

    /// Returns the device that holds the memory.
    pub fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the owner: while a clone of it lives, the memory is neither returned nor reused.
    pub fn owner(&self) -> &Arc<dyn Any + Send + Sync> {
        &self.owner
    }
}

fn of_layer(layout: &KvLayout, planes: &[AdoptedPlane], frames: usize) -> LayerPlanes {
    let tensors = |kind: PlaneKind, planes: &[AdoptedPlane]| {
        let (dtype, inner) = match kind {
            PlaneKind::Values => (layout.dtype(), layout.head_dim()),
            PlaneKind::Scales => (Dtype::F32, 1),
        };
        let shape = [frames, layout.block_tokens(), layout.kv_heads(), inner];
        let tensor = |plane: &AdoptedPlane, offset: usize| {
            PlaneTensor::new(plane.base.wrapping_add(offset), dtype, shape, plane.frame_stride)
        };
        let second = layout.block_tokens() * layout.row_bytes(kind);
        let v = match layout.parts() {
            KvPlanes::Separate => Some(tensor(&planes[1], 0)),
            KvPlanes::Joined => Some(tensor(&planes[0], second)),
            KvPlanes::Latent => None,
        };
        (tensor(&planes[0], 0), v)
    };
    let (k, v) = tensors(PlaneKind::Values, planes);
    let (k_scales, v_scales) = match layout.has_scale_planes() {
        true => {
            let (k, v) = tensors(PlaneKind::Scales, &planes[planes.len() / 2..]);
            (Some(k), v)
        }
        false => (None, None),
    };
    LayerPlanes { k, v, k_scales, v_scales }
}

impl fmt::Debug for StoragePlanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoragePlanes")
            .field("device", &self.device)
            .field("frames", &self.frames)
            .field("frames_max", &self.frames_max)
            .field("layers", &self.layers)
            .finish_non_exhaustive()
    }
}

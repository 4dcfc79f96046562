//! Contiguous tensors of an engine, from which the planes of a storage are computed.

use crate::error::StorageError;

use super::adopted::{self, AdoptedPlane};
use super::layout::{KvLayout, KvPlanes, Scales};
use super::plane::{Plane, PlaneKind};

/// One contiguous tensor of an engine's own memory, on the host or a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AdoptedTensor {
    /// Address of the first element.
    pub base: *mut u8,
    /// Size in bytes.
    pub bytes: usize,
}

impl AdoptedTensor {
    /// Describes a slice of elements.
    pub const fn of<T>(elements: &mut [T]) -> Self {
        Self { base: elements.as_mut_ptr().cast(), bytes: size_of_val(elements) }
    }
}

/// An engine's tensors.
///
/// Except for [planes](Self::Planes), there is one per layer in each list, contiguous and
/// row-major, without gaps between frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum AdoptedTensors<'a> {
    /// K and V apart: `[frames, block_tokens, heads, head_dim]` each.
    Separate {
        /// K of each layer.
        k: &'a [AdoptedTensor],
        /// V of each layer.
        v: &'a [AdoptedTensor],
    },
    /// `[2, frames, block_tokens, heads, head_dim]`: K of all frames, followed by V of all frames.
    KvFirst(&'a [AdoptedTensor]),
    /// `[frames, 2, block_tokens, heads, head_dim]`: K and V of each frame. Fits layouts with
    /// separate and with joined planes.
    FramesFirst(&'a [AdoptedTensor]),
    /// `[frames, block_tokens, latent]`: the latent vectors.
    Latent(&'a [AdoptedTensor]),
    /// Planes in the order of [`KvLayout::planes`]: for layouts with dynamic scales, block-first
    /// tensors over all layers, and tensors with gaps.
    Planes(&'a [AdoptedPlane]),
}

impl AdoptedTensors<'_> {
    /// Checks the planes of a layout in these tensors, for `frames` frames, and returns them with
    /// the tile sizes of the layout.
    ///
    /// # Errors
    /// [`StorageError::TensorForm`] if tensors of this form cannot hold the layout,
    /// [`StorageError::TensorCount`] if there is not one per layer, [`StorageError::TensorLength`]
    /// for one of the wrong size, [`StorageError::Layout`] if no address space has room; and an
    /// error that names an impossible plane.
    pub fn checked(&self, layout: &KvLayout, frames: usize) -> Result<Vec<(*mut u8, Plane)>, StorageError> {
        adopted::check_planes(layout, &self.planes(layout, frames)?, frames)
    }

    fn planes(&self, layout: &KvLayout, frames: usize) -> Result<Vec<AdoptedPlane>, StorageError> {
        // The table also shows that no size below overflows.
        layout.planes(frames)?;
        self.check_form(layout)?;
        let tile = layout.block_tokens() * layout.row_bytes(PlaneKind::Values);
        let half = tile * frames;
        let check = |which, tensors: &[AdoptedTensor], want| check_sizes(which, tensors, layout, want);
        let plane = |tensor: &AdoptedTensor, offset, frame_stride| AdoptedPlane {
            base: tensor.base.wrapping_add(offset),
            frame_stride,
        };
        match *self {
            Self::Separate { k, v } => {
                check("k", k, half)?;
                check("v", v, half)?;
                Ok(k.iter().zip(v).flat_map(|(k, v)| [plane(k, 0, tile), plane(v, 0, tile)]).collect())
            }
            Self::KvFirst(both) => {
                check("k and v", both, 2 * half)?;
                Ok(both.iter().flat_map(|both| [plane(both, 0, tile), plane(both, half, tile)]).collect())
            }
            Self::FramesFirst(both) => {
                check("k and v", both, 2 * half)?;
                let parts = if layout.parts() == KvPlanes::Joined { 1 } else { 2 };
                let planes = |both| (0..parts).map(move |part| plane(both, part * tile, 2 * tile));
                Ok(both.iter().flat_map(planes).collect())
            }
            Self::Latent(latent) => {
                check("k", latent, half)?;
                Ok(latent.iter().map(|latent| plane(latent, 0, tile)).collect())
            }
            Self::Planes(planes) => Ok(planes.to_vec()),
        }
    }

    fn check_form(&self, layout: &KvLayout) -> Result<(), StorageError> {
        let parts = layout.parts();
        let (form, fits) = match self {
            Self::Separate { .. } => ("separate", parts == KvPlanes::Separate),
            Self::KvFirst(_) => ("[2, frames, ...]", parts == KvPlanes::Separate),
            Self::FramesFirst(_) => ("[frames, 2, ...]", parts != KvPlanes::Latent),
            Self::Latent(_) => ("latent", parts == KvPlanes::Latent),
            Self::Planes(_) => return Ok(()),
        };
        if *layout.scales() == Scales::PerTokenHead {
            return Err(StorageError::TensorForm {
                form,
                reason: "it has dynamic scales, in planes of their own",
            });
        }
        let reason = match parts {
            _ if fits => return Ok(()),
            KvPlanes::Separate => "its planes hold K and V apart",
            KvPlanes::Joined => "its planes hold K and V of each frame together",
            KvPlanes::Latent => "its planes are latent vectors",
        };
        Err(StorageError::TensorForm { form, reason })
    }
}

/// Checks that there is one tensor of `want` bytes for each layer.
fn check_sizes(
    which: &'static str,
    tensors: &[AdoptedTensor],
    layout: &KvLayout,
    want: usize,
) -> Result<(), StorageError> {
    if tensors.len() != layout.layers() {
        return Err(StorageError::TensorCount { which, got: tensors.len(), want: layout.layers() });
    }
    match tensors.iter().position(|tensor| tensor.bytes != want) {
        Some(layer) => Err(StorageError::TensorLength { which, layer, got: tensors[layer].bytes, want }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{Arrangement, Dtype};

    const FRAMES: usize = 3;

    /// A layout of two layers, with 32 bytes of K in a frame.
    fn layout(parts: KvPlanes) -> KvLayout {
        let layout = KvLayout::builder().layers(2).block_tokens(2).dtype(Dtype::F32);
        let layout =
            if parts == KvPlanes::Latent { layout.latent(4) } else { layout.kv_heads(1).head_dim(4) };
        layout.parts(parts).arrangement(Arrangement::LayerFirst).build().unwrap()
    }

    fn at(bases: [usize; 2], bytes: usize) -> [AdoptedTensor; 2] {
        bases.map(|base| AdoptedTensor { base: std::ptr::without_provenance_mut(base), bytes })
    }

    fn planes(tensors: AdoptedTensors<'_>, parts: KvPlanes) -> Result<Vec<(usize, usize)>, StorageError> {
        let planes = tensors.planes(&layout(parts), FRAMES)?;
        Ok(planes.iter().map(|plane| (plane.base.addr(), plane.frame_stride)).collect())
    }

    #[test]
    fn planes_are_found_in_the_tensors_of_engines() {
        let (k, v, both) = (at([1024, 2048], 96), at([3072, 4096], 96), at([1024, 2048], 192));
        assert_eq!(
            planes(AdoptedTensors::Separate { k: &k, v: &v }, KvPlanes::Separate).unwrap(),
            [(1024, 32), (3072, 32), (2048, 32), (4096, 32)]
        );
        assert_eq!(
            planes(AdoptedTensors::KvFirst(&both), KvPlanes::Separate).unwrap(),
            [(1024, 32), (1120, 32), (2048, 32), (2144, 32)]
        );
        assert_eq!(
            planes(AdoptedTensors::FramesFirst(&both), KvPlanes::Separate).unwrap(),
            [(1024, 64), (1056, 64), (2048, 64), (2080, 64)]
        );
        assert_eq!(
            planes(AdoptedTensors::FramesFirst(&both), KvPlanes::Joined).unwrap(),
            [(1024, 64), (2048, 64)]
        );
        assert_eq!(planes(AdoptedTensors::Latent(&k), KvPlanes::Latent).unwrap(), [(1024, 32), (2048, 32)]);
    }

    #[test]
    fn tensors_that_do_not_fit_are_named() {
        let (k, both) = (at([1024, 2048], 96), at([1024, 2048], 192));
        for (tensors, parts) in [
            (AdoptedTensors::KvFirst(&both), KvPlanes::Joined),
            (AdoptedTensors::Separate { k: &k, v: &k }, KvPlanes::Latent),
            (AdoptedTensors::FramesFirst(&both), KvPlanes::Latent),
            (AdoptedTensors::Latent(&k), KvPlanes::Separate),
        ] {
            assert!(matches!(planes(tensors, parts), Err(StorageError::TensorForm { .. })), "{tensors:?}");
        }
        assert_eq!(
            planes(AdoptedTensors::Separate { k: &k, v: &k[..1] }, KvPlanes::Separate),
            Err(StorageError::TensorCount { which: "v", got: 1, want: 2 })
        );
        assert_eq!(
            planes(AdoptedTensors::KvFirst(&k), KvPlanes::Separate),
            Err(StorageError::TensorLength { which: "k and v", layer: 0, got: 96, want: 192 })
        );
        let scaled = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::Int8);
        let scaled = scaled.scales(Scales::PerTokenHead).build().unwrap();
        let form = AdoptedTensors::KvFirst(&both).planes(&scaled, 1);
        assert!(matches!(form, Err(StorageError::TensorForm { .. })), "{form:?}");
    }
}

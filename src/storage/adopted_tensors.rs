use crate::error::Invalid;

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

/// An engine's tensors: one per layer in each list, contiguous and row-major, without gaps between
/// frames, except for [planes](Self::Planes).
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
    /// `[frames, 2, block_tokens, heads, head_dim]`, for separate or joined planes.
    FramesFirst(&'a [AdoptedTensor]),
    /// `[frames, block_tokens, latent]`: the latent vectors.
    Latent(&'a [AdoptedTensor]),
    /// Planes in the order of [`KvLayout::planes`]: for dynamic scales, block-first tensors over
    /// all layers, and tensors with gaps.
    Planes(&'a [AdoptedPlane]),
}

impl AdoptedTensors<'_> {
    /// Checks these tensors for `frames` frames of a layout, and returns the planes with the tile
    /// sizes of the layout. Fails if the form, number or sizes of tensors do not fit, the frames
    /// exceed the address space, or a plane is invalid.
    pub fn checked(&self, layout: &KvLayout, frames: usize) -> Result<Vec<(*mut u8, Plane)>, Invalid> {
        adopted::check_planes(layout, &self.planes(layout, frames)?, frames)
    }

    fn planes(&self, layout: &KvLayout, frames: usize) -> Result<Vec<AdoptedPlane>, Invalid> {
        // Also proves that no size below overflows.
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

    fn check_form(&self, layout: &KvLayout) -> Result<(), Invalid> {
        let parts = layout.parts();
        let (form, fits) = match self {
            Self::Separate { .. } => ("separate", parts == KvPlanes::Separate),
            Self::KvFirst(_) => ("[2, frames, ...]", parts == KvPlanes::Separate),
            Self::FramesFirst(_) => ("[frames, 2, ...]", parts != KvPlanes::Latent),
            Self::Latent(_) => ("latent", parts == KvPlanes::Latent),
            Self::Planes(_) => return Ok(()),
        };
        let limit = match parts {
            _ if *layout.scales() == Scales::PerTokenHead => "planes, for a layout with dynamic scales",
            _ if fits => return Ok(()),
            KvPlanes::Separate => "K and V apart, as in the layout",
            KvPlanes::Joined => "K and V of each frame together, as in the layout",
            KvPlanes::Latent => "latent vectors, as in the layout",
        };
        Err(Invalid::new("form of the tensors", form, limit))
    }
}

fn check_sizes(
    which: &'static str,
    tensors: &[AdoptedTensor],
    layout: &KvLayout,
    want: usize,
) -> Result<(), Invalid> {
    if tensors.len() != layout.layers() {
        let limit = format_args!("one for each of {} layers", layout.layers());
        return Err(Invalid::new(which, format_args!("{} tensors", tensors.len()), limit));
    }
    let Some(layer) = tensors.iter().position(|tensor| tensor.bytes != want) else { return Ok(()) };
    let got = format_args!("a tensor of {} bytes", tensors[layer].bytes);
    Err(Invalid::new(which, got, format_args!("{want} bytes for the frames of a layer")).at(layer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storage::{Arrangement, Dtype};

    const FRAMES: usize = 3;

    /// Two layers, with 32 bytes of K in a frame.
    fn layout(parts: KvPlanes) -> KvLayout {
        let layout = KvLayout::builder().layers(2).block_tokens(2).dtype(Dtype::F32);
        let layout =
            if parts == KvPlanes::Latent { layout.latent(4) } else { layout.kv_heads(1).head_dim(4) };
        layout.parts(parts).arrangement(Arrangement::LayerFirst).build().unwrap()
    }

    fn at(bases: [usize; 2], bytes: usize) -> [AdoptedTensor; 2] {
        bases.map(|base| AdoptedTensor { base: std::ptr::without_provenance_mut(base), bytes })
    }

    fn planes(tensors: AdoptedTensors<'_>, parts: KvPlanes) -> Result<Vec<(usize, usize)>, Invalid> {
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
            assert_eq!(planes(tensors, parts).unwrap_err().what, "form of the tensors", "{tensors:?}");
        }
        let refused = |tensors| planes(tensors, KvPlanes::Separate).unwrap_err().to_string();
        assert_eq!(
            refused(AdoptedTensors::Separate { k: &k, v: &k[..1] }),
            "v: got 1 tensors, expected one for each of 2 layers"
        );
        assert_eq!(
            refused(AdoptedTensors::KvFirst(&k)),
            "k and v at index 0: got a tensor of 96 bytes, expected 192 bytes for the frames of a layer"
        );
        let scaled = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::Int8);
        let scaled = scaled.scales(Scales::PerTokenHead).build().unwrap();
        let form = AdoptedTensors::KvFirst(&both).planes(&scaled, 1);
        assert_eq!(form.unwrap_err().what, "form of the tensors");
    }
}

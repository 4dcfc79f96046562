//! Rectangular copies between a device's memory and page-locked memory of the host.

use std::ptr;

use cudarc::driver::sys::{CUDA_MEMCPY2D, CUmemorytype};

use kvpool::storage::backend::Extent;

use super::params::Way;

/// Largest distance between two rows: the driver's limit on every device so far.
const PITCH_MAX: usize = i32::MAX as usize;

/// `height` rows of `width` bytes, at equal distances on each side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rows {
    pub(super) device: u64,
    pub(super) device_pitch: usize,
    pub(super) host: u64,
    pub(super) host_pitch: usize,
    pub(super) width: usize,
    pub(super) height: usize,
}

impl Rows {
    /// Returns true if the rows are contiguous on both sides.
    pub(super) fn is_dense(&self) -> bool {
        self.height == 1 || (self.device_pitch == self.width && self.host_pitch == self.width)
    }

    /// Describes a copy that is not [dense](Self::is_dense) to the driver.
    pub(super) fn description(&self, way: Way) -> CUDA_MEMCPY2D {
        let host = ptr::with_exposed_provenance_mut(self.host as usize);
        // One side is the device, the other one the host; the address of the other kind is unused.
        let (device, none) = (CUmemorytype::CU_MEMORYTYPE_DEVICE, CUmemorytype::CU_MEMORYTYPE_HOST);
        let (from, to) = if way == Way::Out { (device, none) } else { (none, device) };
        let (from_pitch, to_pitch) = match way {
            Way::Out => (self.device_pitch, self.host_pitch),
            Way::In => (self.host_pitch, self.device_pitch),
        };
        CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from,
            srcHost: host,
            srcDevice: self.device,
            srcArray: ptr::null_mut(),
            srcPitch: from_pitch,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to,
            dstHost: host,
            dstDevice: self.device,
            dstArray: ptr::null_mut(),
            dstPitch: to_pitch,
            WidthInBytes: self.width,
            Height: self.height,
        }
    }
}

/// Pairs of frames to copy: on the device, and on the host.
pub(super) type Pairs<'a> = &'a [(u32, u32)];

/// Returns the pairs, cut into those whose frames are neighbours on both sides.
fn runs(pairs: Pairs<'_>) -> impl Iterator<Item = Pairs<'_>> {
    pairs.chunk_by(|a, b| a.0 + 1 == b.0 && a.1 + 1 == b.1)
}

/// Returns true if both sides cut a frame's packed form at the same places, and the copies of its
/// rows can be described to the driver.
pub(super) fn fit(device: &[Extent], host: &[Extent]) -> bool {
    let bytes = |extents: &[Extent]| extents.iter().map(|extent| extent.bytes).collect::<Vec<_>>();
    let is_near = |extents: &[Extent]| extents.iter().all(|extent| extent.frame_stride <= PITCH_MAX);
    bytes(device) == bytes(host) && is_near(device) && is_near(host)
}

/// Returns the number of copies for these pairs.
pub(super) fn count(pairs: Pairs<'_>, extents: usize) -> usize {
    runs(pairs).count() * extents
}

/// Returns the copies for pairs of frames whose extents [fit](fit). Frames of the host are copied
/// together if they are of one piece, whose number `piece_of` returns for an address.
pub(super) fn between<'a>(
    device: &'a [Extent],
    host: &'a [Extent],
    pairs: Pairs<'a>,
    piece_of: &'a impl Fn(u64) -> usize,
) -> impl Iterator<Item = Rows> + 'a {
    let at = |extent: &Extent, frame: u32| extent.base + u64::from(frame) * extent.frame_stride as u64;
    let both = move || device.iter().zip(host);
    runs(pairs).flat_map(move |run| both().map(move |sides| (run, sides))).flat_map(
        move |(run, (device, host))| {
            let is_one =
                move |a: &(u32, u32), b: &(u32, u32)| piece_of(at(host, a.1)) == piece_of(at(host, b.1));
            run.chunk_by(is_one).map(move |run| Rows {
                device: at(device, run[0].0),
                device_pitch: device.frame_stride,
                host: at(host, run[0].1),
                host_pitch: host.frame_stride,
                width: host.bytes,
                height: run.len(),
            })
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(base: u64, frame_stride: usize, bytes: usize) -> Extent {
        Extent { base, frame_stride, bytes }
    }

    #[test]
    fn neighbours_on_both_sides_are_one_copy_per_extent() {
        let device = [extent(0, 100, 100), extent(4000, 50, 50)];
        let host = [extent(10_000, 160, 100), extent(10_100, 160, 50)];
        assert!(fit(&device, &host) && !fit(&device, &host[..1]) && !fit(&device, &device[..1]));
        let pairs = [(3, 7), (4, 8), (5, 2), (6, 3)];
        let copies: Vec<Rows> = between(&device, &host, &pairs, &|_| 0).collect();
        assert_eq!(copies.len(), count(&pairs, 2));
        let at = |copy: &Rows| (copy.device, copy.host, copy.width, copy.height);
        assert_eq!(
            copies.iter().map(at).collect::<Vec<_>>(),
            [(300, 11_120, 100, 2), (4150, 11_220, 50, 2), (500, 10_320, 100, 2), (4250, 10_420, 50, 2)]
        );
        assert!(copies.iter().all(|copy| !copy.is_dense()));
        assert!(between(&device, &device, &[(0, 1), (1, 2)], &|_| 0).all(|copy| copy.is_dense()));
        // A border between the frames 7 and 8 of the first extent, and none in the second one.
        let piece_of = |at: u64| usize::from((11_280..11_300).contains(&at));
        let copies: Vec<Rows> = between(&device, &host, &pairs[..2], &piece_of).collect();
        assert_eq!(
            copies.iter().map(at).collect::<Vec<_>>(),
            [(300, 11_120, 100, 1), (400, 11_280, 100, 1), (4150, 11_220, 50, 2)]
        );
    }
}

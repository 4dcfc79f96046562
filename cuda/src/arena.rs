//! The frames' memory, mapped here: one address range for the maximum number of frames, with memory
//! behind its first part.
//!
//! ```text
//! addresses   | region of plane 0          | region of plane 1          | ...   layer-first
//!             | one region: block after block                           |       block-first
//! in a region | chunk 0 | chunk 1 | chunk 2 | not mapped from here on   |
//! ```
//!
//! A *chunk* holds one region's part of a segment's frames, rounded up to whole granules, the
//! device's unit of mapping. Chunks of different regions therefore hold different numbers of
//! frames: `mapped(region) == chunks * chunk_bytes >= frames * frame_stride`. The rest, behind the
//! last frame, is slack.
//!
//! The base never moves: engines and captured graphs keep pointers into the range. Growing maps
//! chunks; shrinking unmaps the chunks that hold no remaining frame. A device that accesses
//! unmapped memory fails for good. The number of frames is therefore raised after mapping and
//! lowered before unmapping, and every operation checks it.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{
    self, CUdevice_attribute as Attribute, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc,
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
    CUmemLocation, CUmemLocationType, CUresult,
};

use kvpool::storage::{Arrangement, KvLayout};
use kvpool::{Invalid, StorageError};

use super::context::Context;
use super::driver::attribute;
use super::pieces::Placed;
use super::stream::Stream;

/// Default number of steps in which memory is mapped: more would take longer, fewer would return
/// less on shrinking.
const SEGMENTS: usize = 64;

/// Minimum size of a mapping step by default: each mapping costs several calls, and the devices of
/// other hosts register memory by mapping.
const CHUNK_BYTES_MIN: usize = 32 << 20;

/// How others than this process and its device can access the frames' memory.
///
/// Asked for where the device supports it, and given up one after the other if the driver refuses to
/// create such memory: RDMA first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct MemorySharing {
    /// Other processes can import it, by file descriptors.
    pub exportable: bool,
    /// Network cards can access it (GPUDirect RDMA).
    pub rdma: bool,
}

/// Device memory for frames; see the [module](self).
#[derive(Debug)]
pub(super) struct Arena {
    context: Arc<Context>,
    base: CUdeviceptr,
    plan: Plan,
    properties: CUmemAllocationProp,
    pub(super) sharing: MemorySharing,
    /// Number of mapped chunks, by region.
    mapped: Mutex<Vec<usize>>,
}

/// Positions of the regions in the range.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Plan {
    regions: Vec<Region>,
    bytes: usize,
}

/// A plane, or all planes of a block-first layout. `at` is in bytes from the base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Region {
    at: usize,
    frame_stride: usize,
    chunk_bytes: usize,
    /// Address range of the region in bytes: a multiple of the granule. The last chunk may be
    /// shorter than the others.
    bytes: usize,
}

impl Region {
    /// Returns the number of chunks that hold the first `frames` frames.
    fn chunks(&self, frames: usize) -> usize {
        (frames * self.frame_stride).div_ceil(self.chunk_bytes)
    }

    /// Returns the offset of a chunk in the range, and its length.
    fn chunk(&self, index: usize) -> (usize, usize) {
        let start = index * self.chunk_bytes;
        (self.at + start, self.chunk_bytes.min(self.bytes - start))
    }
}

impl Plan {
    /// Returns the plan, and the planes in the layout's order with bases relative to 0.
    fn new(
        layout: &KvLayout,
        frames_max: usize,
        segment_frames: usize,
        chunk_min: usize,
        granule: usize,
    ) -> Result<(Self, Vec<Placed>), Invalid> {
        let too_large = || {
            let got = format_args!("{frames_max} frames of {layout}");
            Invalid::new("reservation", got, "a size within the address space")
        };
        let table = layout.planes(frames_max)?.planes;
        let (mut regions, mut end): (Vec<Region>, usize) = (Vec::new(), 0);
        let mut placed = Vec::with_capacity(table.len());
        for plane in table {
            let is_new = layout.arrangement() == Arrangement::LayerFirst || regions.is_empty();
            if is_new {
                let round = |frames: usize| {
                    plane.frame_stride.checked_mul(frames)?.max(1).checked_next_multiple_of(granule)
                };
                let bytes = round(frames_max).ok_or_else(too_large)?;
                let least = chunk_min.next_multiple_of(granule);
                let chunk_bytes = round(segment_frames).ok_or_else(too_large)?.max(least).min(bytes);
                regions.push(Region { at: end, frame_stride: plane.frame_stride, chunk_bytes, bytes });
                end =
                    end.checked_add(bytes).filter(|&end| end <= isize::MAX as usize).ok_or_else(too_large)?;
            }
            // Planes of a block are consecutive, from the region's start on.
            let offset = if layout.arrangement() == Arrangement::BlockFirst { plane.base } else { 0 };
            let at = regions[regions.len() - 1].at + offset;
            placed.push(Placed { base: at as u64, plane });
        }
        Ok((Self { regions, bytes: end }, placed))
    }
}

impl Arena {
    /// Reserves addresses for `frames_max` frames, and maps the first `frames` of them. Also
    /// returns the planes, in the layout's order.
    pub(super) fn new(
        context: &Arc<Context>,
        layout: &KvLayout,
        frames: usize,
        frames_max: usize,
        segment_frames: Option<usize>,
        stream: &Stream,
    ) -> Result<(Self, Vec<Placed>), StorageError> {
        let _pass = context.pass()?;
        let sharing = sharing(context)?;
        let properties = properties(context, sharing);
        let granule = granule(context, &properties)?;
        let chunk_min = if segment_frames.is_some() { 0 } else { CHUNK_BYTES_MIN };
        let segment_frames = segment_frames.unwrap_or(frames_max.div_ceil(SEGMENTS));
        let (plan, mut placed) = Plan::new(layout, frames_max, segment_frames.max(1), chunk_min, granule)?;
        let (mut base, _entered) = (0, context.enter()?);
        // SAFETY: the pointer is valid and the context is current.
        let reserved = unsafe { sys::cuMemAddressReserve(&mut base, plan.bytes, granule, 0, 0) };
        context.check(reserved, "reserving addresses for frames")?;
        let mapped = Mutex::new(vec![0; plan.regions.len()]);
        let arena = Self { context: context.clone(), base, plan, properties, sharing, mapped };
        for placed in &mut placed {
            placed.base += base;
        }
        arena.grow(frames, stream)?;
        Ok((arena, placed))
    }

    /// Maps the memory of the first `frames` frames, zeroed.
    ///
    /// Kernels that read whole blocks multiply the values behind a sequence's end by zero, and a
    /// NaN would survive that.
    ///
    /// # Errors
    /// [`StorageError::DeviceMemory`], and errors of the driver; nothing more is mapped than
    /// before.
    pub(super) fn grow(&self, frames: usize, stream: &Stream) -> Result<(), StorageError> {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let before = mapped.clone();
        let missing: Vec<(usize, usize)> = self
            .plan
            .regions
            .iter()
            .enumerate()
            .flat_map(|(at, region)| (mapped[at]..region.chunks(frames)).map(move |chunk| (at, chunk)))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        let _pass = self.context.pass()?;
        let bytes: usize = missing.iter().map(|&(at, chunk)| self.plan.regions[at].chunk(chunk).1).sum();
        let (free, total) = self.context.memory()?;
        let short = StorageError::DeviceMemory { device: self.context.id, bytes: bytes as u64, free, total };
        if bytes as u64 > free {
            return Err(short);
        }
        let all = missing.into_iter().try_for_each(|(at, chunk)| {
            let (start, len) = self.plan.regions[at].chunk(chunk);
            self.map(start, len, stream, &short)?;
            mapped[at] = chunk + 1;
            Ok(())
        });
        // Also after an error: earlier chunks may still be zeroed by enqueued commands.
        let grown = all.and(stream.synchronise());
        if grown.is_err() {
            self.unmap_to(&mut mapped, &before);
        }
        grown
    }

    /// Unmaps chunks that hold none of the first `frames` frames.
    ///
    /// # Safety
    /// Neither the host nor the device accesses later frames any more.
    pub(super) unsafe fn shrink(&self, frames: usize) {
        let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let kept: Vec<usize> = self.plan.regions.iter().map(|region| region.chunks(frames)).collect();
        self.unmap_to(&mut mapped, &kept);
    }

    /// Returns the number of mapped bytes.
    pub(super) fn mapped_bytes(&self) -> usize {
        let mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
        let regions = self.plan.regions.iter().zip(&*mapped);
        regions.map(|(region, &chunks)| (chunks * region.chunk_bytes).min(region.bytes)).sum()
    }

    /// Returns the size of the address range in bytes.
    pub(super) fn reserved_bytes(&self) -> usize {
        self.plan.bytes
    }

    /// Maps one chunk and starts zeroing it; undoes the mapping on failure.
    fn map(
        &self,
        start: usize,
        len: usize,
        stream: &Stream,
        short: &StorageError,
    ) -> Result<(), StorageError> {
        let _entered = self.context.enter()?;
        let at = self.base + start as u64;
        let (mut handle, properties) = (0, self.properties);
        let access = CUmemAccessDesc {
            location: properties.location,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the pointers are valid and the context is current; the addresses belong to this
        // arena and are not mapped. The memory lives as long as it is mapped.
        unsafe {
            match sys::cuMemCreate(&mut handle, len, &properties, 0) {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(short.clone()),
                made => self.context.check(made, "allocating frames")?,
            }
            let placed = self.context.check(sys::cuMemMap(at, len, 0, handle, 0), "mapping frames");
            let released =
                self.context.check(sys::cuMemRelease(handle), "releasing the handle of mapped frames");
            placed?;
            let ready = || {
                released?;
                self.context.check(sys::cuMemSetAccess(at, len, &access, 1), "giving access to frames")?;
                self.context.check(sys::cuMemsetD8Async(at, 0, len, stream.raw()), "zeroing frames")
            };
            let ready = ready();
            if ready.is_err() {
                let _ = sys::cuMemUnmap(at, len);
            }
            ready
        }
    }

    /// Unmaps chunks from the end, until `kept` chunks of each region are left.
    fn unmap_to(&self, mapped: &mut [usize], kept: &[usize]) {
        // Refused if the device is stuck: work that may still be running would fault.
        let Ok(_pass) = self.context.pass() else { return };
        let _entered = self.context.enter_even_if_lost();
        for (region, (chunks, &kept)) in self.plan.regions.iter().zip(mapped.iter_mut().zip(kept)) {
            while *chunks > kept {
                let (start, len) = region.chunk(*chunks - 1);
                // SAFETY: mapped as exactly this chunk; no one accesses it, as the callers promise.
                let unmapped = unsafe { sys::cuMemUnmap(self.base + start as u64, len) };
                if self.context.check(unmapped, "unmapping frames").is_err() {
                    // The chunk stays mapped, and is reused when the arena grows again.
                    break;
                }
                *chunks -= 1;
            }
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Kernels of an engine may be running that this backend does not know of. In a lost context
        // nothing runs, unless it is stuck.
        let settled = self.context.synchronise();
        let Ok(_pass) = self.context.pass() else { return };
        if settled.is_err_and(|error| !error.is_lost()) {
            // Work may be running that would fault if the memory were unmapped: leak it.
            return;
        }
        let mut mapped = std::mem::take(&mut *self.mapped.lock().unwrap_or_else(PoisonError::into_inner));
        let none = vec![0; mapped.len()];
        self.unmap_to(&mut mapped, &none);
        let _entered = self.context.enter_even_if_lost();
        // SAFETY: reserved with this size, and no longer mapped.
        let _ = unsafe { sys::cuMemAddressFree(self.base, self.plan.bytes) };
    }
}

// SAFETY: the properties contain a null pointer; everything else is shared by design.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

/// Returns how memory of this device can be shared: what the device supports, and the driver does not
/// refuse. Neither can be added to memory later.
fn sharing(context: &Context) -> Result<MemorySharing, StorageError> {
    let can = |which| attribute(context.device, which).is_ok_and(|is| is != 0);
    let mut sharing = MemorySharing {
        exportable: can(Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED),
        rdma: can(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
    };
    while sharing != MemorySharing::default() && !can_create(context, &properties(context, sharing))? {
        if sharing.rdma {
            sharing.rdma = false;
        } else {
            sharing.exportable = false;
        }
    }
    Ok(sharing)
}

/// Returns whether the driver creates memory with these properties. Drivers refuse by different
/// errors: if the context is lost, the next query will tell, and if memory is short, the frames
/// will not fit either.
fn can_create(context: &Context, properties: &CUmemAllocationProp) -> Result<bool, StorageError> {
    let granule = match granule(context, properties) {
        Err(error) if !error.is_lost() => return Ok(false),
        found => found?,
    };
    let _entered = context.enter()?;
    let mut handle = 0;
    // SAFETY: the pointers are valid and the context is current; the handle is released once.
    unsafe {
        Ok(sys::cuMemCreate(&mut handle, granule, properties, 0) == CUresult::CUDA_SUCCESS
            && context.check(sys::cuMemRelease(handle), "releasing the handle of frames").is_ok())
    }
}

/// Returns the properties of the mapped memory, which is on this device.
fn properties(context: &Context, sharing: MemorySharing) -> CUmemAllocationProp {
    // SAFETY: plain numbers and a pointer, for which zero is valid, and is required for unused
    // fields.
    let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location =
        CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device };
    if sharing.exportable {
        properties.requestedHandleTypes = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
    properties.allocFlags.gpuDirectRDMACapable = sharing.rdma.into();
    properties
}

/// Returns the device's unit of mapping in bytes.
fn granule(context: &Context, properties: &CUmemAllocationProp) -> Result<usize, StorageError> {
    let _entered = context.enter()?;
    let mut granule = 0;
    let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the pointers are valid and the context is current.
    let asked = unsafe { sys::cuMemGetAllocationGranularity(&mut granule, properties, least) };
    context.check(asked, "reading the mapping granularity")?;
    Ok(granule.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool::storage::Dtype;

    const GRANULE: usize = 2 << 20;

    fn layout(arrangement: Arrangement) -> KvLayout {
        // Tiles of 10 KiB, which do not divide a granule.
        let builder = KvLayout::builder().layers(3).kv_heads(4).head_dim(80).dtype(Dtype::Bf16);
        builder.arrangement(arrangement).build().unwrap()
    }

    #[test]
    fn regions_are_whole_granules_and_hold_all_frames() {
        for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
            for (frames_max, segment) in [(1, 1), (1000, 16), (5000, 5000), (5000, 100_000), (70_000, 512)] {
                let layout = layout(arrangement);
                let (plan, placed) = Plan::new(&layout, frames_max, segment, 0, GRANULE).unwrap();
                let block_first = arrangement == Arrangement::BlockFirst;
                assert_eq!(plan.regions.len(), if block_first { 1 } else { 6 });
                let mut end = 0;
                for region in &plan.regions {
                    assert_eq!(region.at, end);
                    assert!(
                        region.bytes.is_multiple_of(GRANULE) && region.chunk_bytes.is_multiple_of(GRANULE)
                    );
                    assert!(region.bytes >= frames_max * region.frame_stride);
                    let last = region.chunks(frames_max) - 1;
                    let (start, len) = region.chunk(last);
                    assert!(len > 0 && start + len - region.at >= frames_max * region.frame_stride);
                    assert!(start + len <= region.at + region.bytes);
                    assert_eq!((region.chunks(0), region.chunks(1)), (0, 1));
                    end += region.bytes;
                }
                assert_eq!(plan.bytes, end);
                for pair in placed.windows(2) {
                    assert!(pair[1].base >= pair[0].base + pair[0].plane.tile_bytes as u64);
                }
            }
        }
    }

    #[test]
    fn what_no_address_space_holds_is_refused() {
        let layout = layout(Arrangement::LayerFirst);
        for frames in [usize::MAX / 4, usize::MAX / (10 << 10)] {
            let refused = Plan::new(&layout, frames, 1, CHUNK_BYTES_MIN, GRANULE);
            assert_eq!(refused.err().map(|error| error.what), Some("reservation"), "{frames}");
        }
    }
}

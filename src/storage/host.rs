use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{GrowError, Invalid, StorageError};
use crate::ids::{DeviceId, FrameId, Run};
use crate::sync::{AtomicUsize, Ordering};

use super::adopted::AdoptedPlane;
use super::adopted_tensors::AdoptedTensors;
use super::elements::{Elements, ElementsMut};
use super::host_tile::HostTile;
use super::layout::KvLayout;
use super::memory::Reservation;
use super::page_lock::{PageLock, PageLocks, Pages, Refusal};
use super::storage::{check_runs, through_host};
use super::tensors::StoragePlanes;
use super::tiles::{Extent, Tiles};
use super::{FrameMove, Storage, check};

/// Frames in host memory. [`new`](Self::new) reserves address space for the maximum number of
/// frames; physical memory is taken when bytes are first written.
/// [`adopt_tensors`](Self::adopt_tensors) uses an engine's memory.
pub struct HostStorage {
    layout: KvLayout,
    tiles: Tiles,
    /// Disjoint, ascending address ranges of the frames, which no caller's buffer may overlap.
    spans: Box<[Range<usize>]>,
    frames: AtomicUsize,
    frames_max: usize,
    /// Shared with the owners of planes.
    memory: Arc<Memory>,
    page_locks: PageLocks,
}

enum Memory {
    Reserved(Arc<Reservation>),
    Adopted { _owner: Box<dyn Any + Send + Sync> },
}

impl HostStorage {
    /// Reserves memory for `frames_max` frames, of which `frames` are initially usable. All bytes
    /// are zero. Fails for zero frames, more than can be addressed, or a lack of address space.
    pub fn new(layout: KvLayout, frames: usize, frames_max: usize) -> Result<Self, StorageError> {
        check::frames(frames, frames_max)?;
        let table = layout.planes(frames_max)?;
        let memory = Reservation::new(table.bytes)?;
        let base = memory.base();
        let tiles = Tiles::new(
            table.planes.into_iter().map(|plane| (base.wrapping_add(plane.base), plane)),
            frames_max,
        );
        let whole = base.addr()..base.addr() + table.bytes;
        let frames = AtomicUsize::new(frames);
        let memory = Arc::new(Memory::Reserved(Arc::new(memory)));
        let (spans, page_locks) = (Box::new([whole]), PageLocks::default());
        Ok(Self { layout, tiles, spans, frames, frames_max, memory, page_locks })
    }

    /// Uses an engine's own tensors, with their contents, as `frames` frames.
    ///
    /// The storage cannot grow beyond that, and [`shrink`](Storage::shrink) only reduces the number
    /// of frames. `owner` is kept until the storage and all its [planes](Storage::planes) are
    /// dropped: the tensors, a reference to them, or `()` if something else keeps the memory alive.
    ///
    /// ```
    /// use kvpool::storage::{AdoptedTensor, AdoptedTensors, Dtype, HostStorage, KvLayout};
    ///
    /// let layout = KvLayout::builder().layers(2).kv_heads(1).head_dim(4).block_tokens(4).dtype(Dtype::F32).build()?;
    /// // As engines have them: [2, frames, block_tokens, heads, head_dim] in each layer.
    /// let mut tensors = vec![vec![0.0f32; 2 * 10 * 4 * 4]; 2];
    /// let adopted: Vec<_> = tensors.iter_mut().map(|tensor| AdoptedTensor::of(tensor)).collect();
    /// // SAFETY: `tensors` is moved into the storage, and its elements are not accessed otherwise.
    /// let storage = unsafe { HostStorage::adopt_tensors(layout, AdoptedTensors::KvFirst(&adopted), 10, tensors)? };
    /// # drop(storage);
    /// # Ok::<(), kvpool::Invalid>(())
    /// ```
    ///
    /// # Errors
    /// [`Invalid`] if the form, number or size of the tensors does not fit the layout, or a plane
    /// is null, misaligned, has a stride below the tile size, exceeds the address space, or
    /// overlaps another. Planes may interleave if their strides are equal.
    ///
    /// # Safety
    /// Each tensor's bytes, and each plane's `(frames - 1) * frame_stride + tile_bytes` bytes from
    /// its base, must lie in one allocation and be readable, writable and initialised. Pointers to
    /// planes that interleave must be derived from one pointer that covers all of them. Both must
    /// hold while this storage or an owner of its [planes](Storage::planes) lives, and all other
    /// accesses to the bytes must obey [the frame rule](Storage#the-frame-rule).
    pub unsafe fn adopt_tensors(
        layout: KvLayout,
        tensors: AdoptedTensors<'_>,
        frames: usize,
        owner: impl Send + Sync + 'static,
    ) -> Result<Self, Invalid> {
        check::frames(frames, frames)?;
        let tiles = Tiles::new(tensors.checked(&layout, frames)?.into_iter(), frames);
        let spans = merged(tiles.spans(frames).collect());
        let memory = Arc::new(Memory::Adopted { _owner: Box::new(owner) });
        let (page_locks, frames_max) = (PageLocks::default(), frames);
        let frames = AtomicUsize::new(frames);
        Ok(Self { layout, tiles, spans, frames, frames_max, memory, page_locks })
    }

    /// Returns the lock of the pages of all usable frames, and creates it if necessary; `None` if
    /// they cannot be locked now, or belong to an engine, which manages its own.
    pub fn page_lock<L: Any + Send + Sync>(
        &self,
        lock: impl FnOnce(Pages) -> Result<L, Refusal>,
    ) -> Option<PageLock> {
        let Memory::Reserved(memory) = &*self.memory else { return None };
        let make = |frames| {
            let ranges = merged(self.tiles.spans(frames).map(|span| memory.pages_of(span)).collect());
            lock(Pages { ranges: ranges.into_vec(), memory: memory.clone() })
        };
        self.page_locks.get(Instant::now(), || self.frames(), make)
    }

    /// Returns the contiguous parts of a frame, in packed order.
    pub fn extents(&self) -> impl Iterator<Item = Extent> {
        self.tiles.extents()
    }

    fn outside(&self, which: &'static str, buffer: &[u8]) -> Result<(), Invalid> {
        let bytes = buffer.as_ptr_range();
        let (start, end) = (bytes.start.addr(), bytes.end.addr());
        if self.spans.iter().any(|span| start < span.end && span.start < end) {
            return Err(Invalid::new(which, "memory of the storage", "memory outside of it"));
        }
        Ok(())
    }

    fn check_rows(
        &self,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: usize,
    ) -> Result<(), Invalid> {
        check::rows(&self.layout, layer, k, v, slots)?;
        self.outside("k", k.as_bytes())?;
        self.outside("v", v.as_bytes())
    }

    fn check_packed(&self, frames: usize, buffer: &[u8]) -> Result<(), Invalid> {
        check::packed_bytes(buffer.len(), frames.saturating_mul(self.layout.packed_bytes()))?;
        self.outside("packed buffer", buffer)
    }
}

fn merged(mut spans: Vec<Range<usize>>) -> Box<[Range<usize>]> {
    spans.sort_unstable_by_key(|span| span.start);
    spans.dedup_by(|next, last| {
        let joined = next.start <= last.end;
        if joined {
            last.end = last.end.max(next.end);
        }
        joined
    });
    spans.into()
}

fn overlap(a: &[Range<usize>], b: &[Range<usize>]) -> bool {
    a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end))
}

impl fmt::Debug for HostStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let adopted = matches!(*self.memory, Memory::Adopted { .. });
        f.debug_struct("HostStorage")
            .field("layout", &format_args!("{}", self.layout))
            .field("frames", &self.frames())
            .field("frames_max", &self.frames_max)
            .field("adopted", &adopted)
            .finish_non_exhaustive()
    }
}

impl Storage for HostStorage {
    fn layout(&self) -> &KvLayout {
        &self.layout
    }

    fn device(&self) -> DeviceId {
        DeviceId::Host
    }

    #[inline]
    fn frames(&self) -> usize {
        // Relaxed: the number only bounds a check. Memory for the maximum number of frames exists
        // from the start, and a user of a frame gets it from the layer above, which publishes it.
        self.frames.load(Ordering::Relaxed)
    }

    fn frames_max(&self) -> usize {
        self.frames_max
    }

    fn planes(&self) -> Result<StoragePlanes, StorageError> {
        let planes: Vec<AdoptedPlane> = self.tiles.planes().collect();
        let frames = (self.frames(), self.frames_max);
        // SAFETY: the owner keeps the memory. A shrink keeps it readable.
        Ok(unsafe { StoragePlanes::new(&self.layout, &planes, frames, DeviceId::Host, self.memory.clone()) })
    }

    unsafe fn tile(&self, layer: usize, frame: FrameId) -> Result<HostTile, StorageError> {
        check::layer(&self.layout, layer)?;
        check::frame(0, frame, self.frames())?;
        // SAFETY: the layer and the frame exist; the caller keeps the frame rule.
        Ok(unsafe { self.tiles.host_tile(&self.layout, layer, frame.index()) })
    }

    fn grow(&self, total: usize) -> Result<(), GrowError> {
        let frames = self.frames();
        if total > self.frames_max {
            let asked = total - frames;
            return Err(GrowError::TooLarge { asked, total: frames, max: self.frames_max });
        }
        // Relaxed: as in `frames`. Of racing calls, the largest total wins.
        self.frames.fetch_max(total, Ordering::Relaxed);
        Ok(())
    }

    unsafe fn shrink(&self, total: usize) {
        // Relaxed: as in `frames`.
        let frames = self.frames.fetch_min(total, Ordering::Relaxed);
        let Memory::Reserved(memory) = &*self.memory else { return };
        if total >= frames {
            return;
        }
        // Before the pages: a device would continue to access those that were returned.
        self.page_locks.retire();
        // Everything except the spans of the remaining frames, including the padding behind each
        // plane, which the last frame's huge page may cover.
        let base = memory.base().addr();
        let kept = if total == 0 { Vec::new() } else { self.tiles.spans(total).collect() };
        let mut end = 0;
        for kept in merged(kept) {
            // SAFETY: no remaining frame has bytes here, and the caller owns the others by the
            // frame rule.
            unsafe { memory.discard(end..kept.start - base) };
            end = kept.end - base;
        }
        // SAFETY: as above.
        unsafe { memory.discard(end..memory.len()) };
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn store(
        &self,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: &[i64],
    ) -> Result<(), StorageError> {
        self.check_rows(layer, k, v, slots.len())?;
        check::slots_unique(slots, self.frames(), self.layout.block_tokens())?;
        // SAFETY: everything is checked except the frame rule, which the caller keeps.
        unsafe { self.tiles.store(&self.layout, layer, k, v, slots) };
        Ok(())
    }

    unsafe fn load(
        &self,
        layer: usize,
        slots: &[i64],
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        self.check_rows(layer, k.as_elements(), v.as_elements(), slots.len())?;
        check::slots(slots, self.frames(), self.layout.block_tokens())?;
        // SAFETY: everything is checked except the frame rule, which the caller keeps.
        unsafe { self.tiles.load(&self.layout, layer, slots, k, v) };
        Ok(())
    }

    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError> {
        check::moves(moves, self.frames())?;
        // SAFETY: everything is checked except the frame rule, which the caller keeps.
        unsafe { self.tiles.copy(moves) };
        Ok(())
    }

    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        if let Some(done) = unsafe { source.send(self, from, to) } {
            return done;
        }
        // Overlapping storages, or one storage on both sides, need the buffer.
        let is_apart = |other: &&Self| !overlap(&self.spans, &other.spans);
        let Some(source) = source.as_any().downcast_ref::<Self>().filter(is_apart) else {
            // SAFETY: the caller's promise.
            return unsafe { through_host(self, source, from, to) };
        };
        check_runs(self, source, from, to)?;
        // SAFETY: everything is checked except the frame rule, which the caller keeps.
        unsafe { self.tiles.receive(&source.tiles, from, to) };
        Ok(())
    }

    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError> {
        self.check_packed(check::runs(runs, self.frames())?, out)?;
        // SAFETY: everything is checked except the frame rule, which the caller keeps.
        unsafe { self.tiles.pack(runs, out) };
        Ok(())
    }

    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        self.check_packed(check::runs_disjoint(runs, self.frames())?, bytes)?;
        // SAFETY: everything is checked except the frame rule, which the caller keeps.
        unsafe { self.tiles.unpack(runs, bytes) };
        Ok(())
    }

    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError> {
        check::runs_disjoint(runs, self.frames())?;
        // SAFETY: everything is checked except the frame rule, which the caller keeps.
        unsafe { self.tiles.zero(runs) };
        Ok(())
    }
}

#[cfg(test)]
mod tests;

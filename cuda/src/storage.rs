//! The CUDA backend: frames in a device's memory, mapped here or adopted from an engine.
//!
//! | stream | operations |
//! |---|---|
//! | the engine's | [`copy_on`](Storage::copy_on), [`store_on`](CudaStorage::store_on), [`load_on`](CudaStorage::load_on) |
//! | service | `store`, `load`, `copy`: synchronous |
//! | mapping | `grow`: zeroes fresh memory |
//! | down | `pack`, and frames on their way to a storage on the host |
//! | up | `unpack`, and `receive`, except for the copies of another device |
//! | wipes | `zero`, `zero_then` |
//! | sending | the copy of `receive` to another device; only polled, because that device may hang |
//! | moving (lowest priority, which is the default one) | `copy_then`: compaction, on a few CTAs |
//!
//! The frame rule orders operations on different streams: two operations on the same bytes never
//! overlap, because a caller sees one end before it begins the other. The exception is a
//! copy-on-write, which the pool itself enqueues, and which ends when an engine's stream reaches
//! it: operations of the host on the copy wait for it ([`pending`](super::pending)). No stream here
//! waits for an engine's stream.
//!
//! Down and up are apart because the bus carries both directions at once, and wipes because they
//! must not wait for either. A frame that is wiped gets no new owner before the host has seen the
//! event behind the wipe, so that no later copy on another stream overtakes it.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kvpool::storage::backend::{Extent, check};
use kvpool::storage::{
    AdoptedPlane, AdoptedTensors, CopyDone, DeviceStream, Elements, ElementsMut, FrameMove, HostStorage,
    KvLayout, KvPlanes, Scales, Storage, StoragePlanes,
};
use kvpool::{DeviceId, Run};
use kvpool::{GrowError, Invalid, StorageError};

use super::adopted::{self, Owner};
use super::arena::{Arena, MemorySharing};
use super::config::CudaConfig;
use super::device::Device;
use super::launch::{StreamRole, Work};
use super::memory::{Memory, bytes_of};
use super::params::{SCALES_PER_HEAD, SCALES_PER_TOKEN_HEAD, SCALES_UNIT, Way};
use super::pending::PendingCopies;
use super::pieces::{LayerLanes, Pieces, Placed, lanes};
use super::staging::BYTES_MAX;
use super::stream::Stream;
use super::watch::is_watcher;

/// Waves of a compaction in flight: one that is being copied, and one behind it.
const WAVES_IN_FLIGHT: usize = 2;

/// Frames in the memory of a CUDA device.
///
/// [`new`](Self::new) reserves addresses for the maximum number of frames, and maps memory for the
/// initial ones. [`adopt_tensors`](Self::adopt_tensors) uses tensors that an engine has allocated.
///
/// Dropping memory that was mapped here waits for all work on the device. Do not drop it while one
/// of the device's streams is being captured: such a wait invalidates the capture.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use kvpool::{Pool, SequenceId};
/// use kvpool_cuda::{CudaStorage, Device};
/// use kvpool::storage::KvLayout;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(0)?;
/// let layout = KvLayout::named("qwen2.5-7b")?;
/// // One frame more than blocks, for the null block.
/// let storage = CudaStorage::new(&device, layout.clone(), 4097, 4097)?;
/// let pool = Pool::builder(layout).blocks(4096).storage(Arc::new(storage)).build()?;
///
/// let stream = device.stream()?;
/// let mut sequence = pool.sequence(SequenceId(1)).open()?;
/// let mut batch = pool.begin_batch_on(&stream)?;
/// batch.append(&mut sequence, 100)?;
/// // ... the model's kernels, on that stream ...
/// let finish = batch.finish_on(&stream)?; // a future: the device is done
/// # drop(finish);
/// # Ok(())
/// # }
/// ```
pub struct CudaStorage {
    pub(super) inner: Arc<StorageInner>,
    frames: AtomicUsize,
    frames_max: usize,
    /// Held while frames are added or removed.
    resizing: Mutex<()>,
    /// By role.
    streams: Vec<Stream>,
    pub(super) config: CudaConfig,
}

/// State that work in progress keeps alive.
pub(super) struct StorageInner {
    memory: Bytes,
    pub(super) layout: KvLayout,
    pub(super) placed: Vec<Placed>,
    pub(super) pieces: Pieces,
    /// By layer.
    pub(super) lanes: Vec<LayerLanes>,
    /// How kernels scale codes.
    pub(super) scale_mode: u32,
    pub(super) pending: PendingCopies,
    /// The pieces in device memory, for kernels.
    pub(super) table: Memory,
    /// Static scales of K and V, `[layers][heads]`.
    pub(super) scales: Option<[Memory; 2]>,
    pub(super) device: Device,
}

/// Owner of the memory.
enum Bytes {
    Mapped(Arena),
    Adopted { _owner: Owner },
}

impl CudaStorage {
    /// Reserves addresses for `frames_max` frames, and maps memory for `frames` of them, zeroed.
    ///
    /// # Errors
    ///
    /// [`StorageError::Invalid`] for a number of frames; [`StorageError::DeviceMemory`] if
    /// the device has too little free memory; other errors of the driver.
    pub fn new(
        device: &Device,
        layout: KvLayout,
        frames: usize,
        frames_max: usize,
    ) -> Result<Self, StorageError> {
        Self::with_config(device, layout, frames, frames_max, CudaConfig::default())
    }

    /// Does the same with a configuration.
    ///
    /// # Errors
    ///
    /// As for [`new`](Self::new).
    pub fn with_config(
        device: &Device,
        layout: KvLayout,
        frames: usize,
        frames_max: usize,
        config: CudaConfig,
    ) -> Result<Self, StorageError> {
        check::frames(frames, frames_max)?;
        check_sizes(&layout, frames_max)?;
        let streams = streams(device)?;
        let (segment, mapping) = (config.segment_frames, &streams[StreamRole::Mapping as usize]);
        let (arena, placed) = Arena::new(&device.0.context, &layout, frames, frames_max, segment, mapping)?;
        Self::over(device, layout, placed, Bytes::Mapped(arena), (frames, frames_max), streams, config)
    }

    /// Uses an engine's own tensors, with their contents, as `frames` frames.
    ///
    /// The `base` of each is a device address. The storage cannot grow beyond that, and
    /// [`shrink`](Storage::shrink) only reduces the number of frames. `owner` is kept until the
    /// storage and any [planes](Storage::planes) of it are dropped, and its work is complete: the
    /// tensors, a reference to them, or `()` if the memory is kept alive otherwise. If the device
    /// is lost and work may still be running, the owner is leaked.
    ///
    /// # Errors
    ///
    /// A [`StorageError`] that names the plane: as for [host
    /// memory](kvpool::storage::HostStorage::adopt_tensors), or a plane that is not in this
    /// device's memory, or exceeds its allocation.
    ///
    /// # Safety
    ///
    /// Each tensor's bytes, and of each plane the `(frames - 1) * frame_stride + tile_bytes` bytes
    /// from its base, must be the device's memory while this storage or an owner of its
    /// [planes](Storage::planes) lives, and all other accesses to the tiles must obey [the frame
    /// rule](Storage#the-frame-rule).
    pub unsafe fn adopt_tensors(
        device: &Device,
        layout: KvLayout,
        tensors: AdoptedTensors<'_>,
        frames: usize,
        owner: impl Send + Sync + 'static,
        config: CudaConfig,
    ) -> Result<Self, StorageError> {
        check::frames(frames, frames)?;
        check_sizes(&layout, frames)?;
        let placed = adopted::placed(&device.0.context, &layout, tensors, frames)?;
        let streams = streams(device)?;
        let bytes = Bytes::Adopted { _owner: Owner::new(&device.0.context, owner) };
        Self::over(device, layout, placed, bytes, (frames, frames), streams, config)
    }

    fn over(
        device: &Device,
        layout: KvLayout,
        placed: Vec<Placed>,
        memory: Bytes,
        (frames, frames_max): (usize, usize),
        streams: Vec<Stream>,
        config: CudaConfig,
    ) -> Result<Self, StorageError> {
        let (pieces, service) = (Pieces::new(&placed)?, &streams[StreamRole::Service as usize]);
        let table = Memory::of(device, service, bytes_of(&pieces.list))?;
        let lanes = lanes(&placed, &layout).map_err(|plane| no_kernel(device, format!("{plane:?}")))?;
        let (scale_mode, scales) = match layout.scales() {
            Scales::Unit => (SCALES_UNIT, None),
            Scales::PerHead { k, v } => {
                let [k, v] = [k, v].map(|scales| Memory::of(device, service, bytes_of(scales)));
                (SCALES_PER_HEAD, Some([k?, v?]))
            }
            Scales::PerTokenHead => (SCALES_PER_TOKEN_HEAD, None),
            other => return Err(no_kernel(device, format!("scales of {other:?}"))),
        };
        let (pending, device) = (PendingCopies::default(), device.clone());
        let inner = StorageInner {
            memory,
            layout,
            placed,
            pieces,
            lanes,
            scale_mode,
            pending,
            table,
            scales,
            device,
        };
        Ok(Self {
            inner: Arc::new(inner),
            frames: AtomicUsize::new(frames),
            frames_max,
            resizing: Mutex::new(()),
            streams,
            config,
        })
    }

    /// Returns the open device that holds the frames.
    pub fn opened(&self) -> &Device {
        &self.inner.device
    }

    /// Returns the bytes of device memory mapped for frames; 0 if they were adopted.
    pub fn mapped_bytes(&self) -> usize {
        self.inner.arena().map_or(0, Arena::mapped_bytes)
    }

    /// Returns the size of the address range reserved for frames; 0 if they were adopted.
    pub fn reserved_bytes(&self) -> usize {
        self.inner.arena().map_or(0, Arena::reserved_bytes)
    }

    /// Returns how others can access the frames' memory; `None` if it was adopted.
    pub fn memory_sharing(&self) -> Option<MemorySharing> {
        self.inner.arena().map(|arena| arena.sharing)
    }

    /// Waits until all work of this storage is complete, and drops it.
    ///
    /// Without this call, work in progress keeps the memory until it is complete.
    ///
    /// # Errors
    ///
    /// [`StorageError::DeviceLost`]; the storage is dropped nevertheless.
    pub fn close(self) -> Result<(), StorageError> {
        // Not for the stream of sending: `receive` has waited for its copies.
        let awaited = StreamRole::OWN.into_iter().filter(|&role| role != StreamRole::Sending);
        awaited.map(|role| self.stream(role)).try_for_each(Stream::synchronise)
    }

    /// Returns the contiguous parts of a frame, in packed order; none if the memory was adopted,
    /// since its planes may be of several allocations.
    pub(super) fn extents(&self) -> Vec<Extent> {
        let mut extents: Vec<Extent> = Vec::new();
        if self.inner.arena().is_none() {
            return extents;
        }
        for placed in &self.inner.placed {
            let next = placed.extent();
            match extents.last_mut() {
                Some(last)
                    if last.frame_stride == next.frame_stride
                        && last.base + last.bytes as u64 == next.base
                        && last.bytes + next.bytes <= last.frame_stride =>
                {
                    last.bytes += next.bytes;
                }
                _ => extents.push(next),
            }
        }
        extents
    }

    /// Returns the stream of some work that is not on an engine's.
    pub(super) fn stream_of(&self, work: Work) -> &Stream {
        self.stream(self.inner.device.kernels().rule(work).stream)
    }

    /// Returns a stream other than the engine's.
    pub(super) fn stream(&self, role: StreamRole) -> &Stream {
        &self.streams[role as usize]
    }
}

fn streams(device: &Device) -> Result<Vec<Stream>, StorageError> {
    let stream = |role: StreamRole| Stream::new(device.0.context.clone(), role.priority());
    StreamRole::OWN.into_iter().map(stream).collect()
}

/// Returns the error for a kind of data that this version's kernels do not handle.
pub(super) fn no_kernel(device: &Device, data: String) -> StorageError {
    let reason = format!("no kernel handles {data}").into();
    StorageError::Device { device: device.id(), doing: "choosing a kernel", reason }
}

/// Checks the limits of 32-bit counters in kernels, and of a buffer.
fn check_sizes(layout: &KvLayout, frames_max: usize) -> Result<(), Invalid> {
    let slots = frames_max.checked_mul(layout.block_tokens());
    if slots.is_none_or(|slots| slots > u32::MAX as usize) {
        let got = format_args!("{frames_max} frames of {} slots", layout.block_tokens());
        return Err(Invalid::new("number of slots", got, format_args!("at most {} in all", u32::MAX)));
    }
    // The widest rows are f32, and K and V share a buffer with their slot.
    let rows = layout.row_elements().checked_mul(2 * size_of::<f32>());
    if rows.is_none_or(|rows| rows > BYTES_MAX / 2) {
        let limit = format_args!("at most {} bytes for K and V in f32", BYTES_MAX / 2);
        return Err(Invalid::new("elements of a row", layout.row_elements(), limit));
    }
    Ok(())
}

impl StorageInner {
    /// Returns the memory that was mapped here; `None` if it was adopted.
    fn arena(&self) -> Option<&Arena> {
        if let Bytes::Mapped(arena) = &self.memory { Some(arena) } else { None }
    }

    /// Returns 2 for K and V, or 1 for the latent vector alone.
    pub(super) fn halves(&self) -> usize {
        if self.layout.parts() == KvPlanes::Latent { 1 } else { 2 }
    }
}

impl fmt::Debug for CudaStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStorage")
            .field("device", &self.inner.device)
            .field("layout", &format_args!("{}", self.inner.layout))
            .field("frames", &self.frames())
            .field("frames_max", &self.frames_max)
            .field("adopted", &self.inner.arena().is_none())
            .field("sharing", &self.memory_sharing())
            .finish_non_exhaustive()
    }
}

impl Storage for CudaStorage {
    fn layout(&self) -> &KvLayout {
        &self.inner.layout
    }

    fn device(&self) -> DeviceId {
        self.inner.device.id()
    }

    #[inline]
    fn frames(&self) -> usize {
        // Acquire: pairs with the Release of `grow`, which has mapped these frames.
        self.frames.load(Ordering::Acquire)
    }

    fn frames_max(&self) -> usize {
        self.frames_max
    }

    fn planes(&self) -> Result<StoragePlanes, StorageError> {
        let plane = |placed: &Placed| AdoptedPlane {
            base: std::ptr::without_provenance_mut(placed.base as usize),
            frame_stride: placed.plane.frame_stride,
        };
        let planes: Vec<AdoptedPlane> = self.inner.placed.iter().map(plane).collect();
        let frames = (self.frames(), self.frames_max);
        // SAFETY: of the memory that `inner` keeps.
        Ok(unsafe {
            StoragePlanes::new(&self.inner.layout, &planes, frames, self.device(), self.inner.clone())
        })
    }

    fn grow(&self, total: usize) -> Result<(), GrowError> {
        let _resizing = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let frames = self.frames();
        let asked = total.saturating_sub(frames);
        if total > self.frames_max {
            return Err(GrowError::TooLarge { asked, total: frames, max: self.frames_max });
        }
        if let Some(arena) = self.inner.arena() {
            arena.grow(total.max(frames), self.stream(StreamRole::Mapping)).map_err(|error| {
                let reason = match error {
                    StorageError::DeviceMemory { .. } => "the device has too little free memory",
                    StorageError::DeviceLost { .. } => "the device is lost",
                    _ => "the driver refused",
                };
                GrowError::Memory { asked, reason }
            })?;
        }
        // Release: a thread that sees the number finds the frames mapped.
        self.frames.fetch_max(total, Ordering::Release);
        Ok(())
    }

    unsafe fn shrink(&self, total: usize) {
        let _resizing = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        // Before anything is unmapped: from here on these frames are refused.
        let frames = self.frames.fetch_min(total, Ordering::AcqRel);
        if let Some(arena) = self.inner.arena().filter(|_| total < frames) {
            // SAFETY: the frames from `total` on are the caller's by the frame rule, and no operation
            // on them is in progress.
            unsafe { arena.shrink(total) };
        }
    }

    unsafe fn store(
        &self,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: &[i64],
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.store_rows(layer, k, v, slots) }
    }

    unsafe fn load(
        &self,
        layer: usize,
        slots: &[i64],
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.load_rows(layer, slots, k, v) }
    }

    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError> {
        check::moves(moves, self.frames())?;
        self.inner.pending.wait(moves.iter().map(|step| step.src.0))?;
        // SAFETY: the frames exist; destinations are distinct and no destination is a source; the
        // rest is the caller's promise.
        unsafe { self.enqueue_copy(moves, self.stream_of(Work::Copy).raw(), Work::Copy)?.wait() }
    }

    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        // SAFETY: the caller's promise.
        self.report(unsafe { self.enqueue_wave(moves) }, done);
    }

    fn wave_bytes(&self) -> usize {
        self.inner.device.kernels().choices.wave_bytes
    }

    fn waves_in_flight(&self) -> usize {
        WAVES_IN_FLIGHT
    }

    fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.inner.device.check_stream(stream, "enqueueing")
    }

    unsafe fn copy_on(&self, stream: &DeviceStream, moves: &[FrameMove]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.copy_in_order(stream, moves) }
    }

    fn after(&self, stream: &DeviceStream, done: CopyDone) {
        self.inner.device.after(stream, done);
    }

    fn settle(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.inner.device.settle(stream)
    }

    unsafe fn send(
        &self,
        target: &dyn Storage,
        from: &[Run],
        to: &[Run],
    ) -> Option<Result<(), StorageError>> {
        let host = target.as_any().downcast_ref::<HostStorage>()?;
        // SAFETY: the caller's promise.
        Some(unsafe { self.exchange(host, Way::Out, (from, to)) })
    }

    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.receive_from(source, from, to) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.pack_runs(runs, out) }
    }

    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.unpack_runs(runs, bytes) }
    }

    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.enqueue_zeroes(runs)?.wait() }
    }

    unsafe fn zero_then(&self, runs: &[Run], done: CopyDone) {
        // SAFETY: the caller's promise.
        self.report(unsafe { self.enqueue_zeroes(runs) }, done);
    }

    fn must_not_wait(&self) -> bool {
        is_watcher()
    }
}

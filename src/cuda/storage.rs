//! The backend: frames in a device's memory, mapped here or adopted from an engine.
//!
//! | stream | what runs there |
//! |---|---|
//! | the engine's own | [`copy_on`](Storage::copy_on), [`store_on`](CudaStorage::store_on), [`load_on`](CudaStorage::load_on) |
//! | service | `store`, `load`, `copy`: the caller waits |
//! | packing | `pack`, `unpack`, `receive`, `zero`: behind no stream of an engine's |
//! | moving, of the lowest priority, which is that of usual streams | `copy_then`: compaction, on a few CTAs, so that the model keeps the rest |
//!
//! The frame rule is what orders these among each other: two operations that touch the same bytes are not under way at once,
//! since a caller has seen the one end before it begins the other. The exception is a copy on write, which is the pool's own and over
//! when an engine's stream gets there: the service stream waits for it, so that what is stored to the copy from the host comes behind.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{GrowError, LayoutError, StorageError};
use crate::ids::{DeviceId, Run};
use crate::storage::host::check_count;
use crate::storage::{
    AdoptedPlane, CopyDone, DeviceStream, Elements, ElementsMut, FrameMove, KvLayout, KvPlanes, Plane,
    Scales, Storage,
};
use crate::sync::{AtomicUsize, Ordering};

use super::adopted;
use super::arena::Arena;
use super::config::CudaConfig;
use super::device::Device;
use super::memory::{Memory, bytes_of};
use super::pieces::{Pieces, Placed};
use super::staging::BYTES_MAX;
use super::stream::{Stream, StreamPriority};

/// CTAs a multiprocessor, of operations that somebody waits for.
const CTAS_PER_MULTIPROCESSOR: u32 = 4;

/// A plane in the device's memory: what an engine's kernels are given.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DevicePlane {
    /// Where frame 0's tile starts. It never moves.
    pub address: u64,
    /// What is there; its `base` says nothing here.
    pub plane: Plane,
}

/// Frames in the memory of a CUDA device.
///
/// [`new`](Self::new) reserves addresses for all frames that there may ever be, and maps memory for those that there are.
/// [`adopt`](Self::adopt) takes the tensors that an engine allocated.
///
/// To drop memory that was mapped here waits for all that runs on the device: not while a stream of it is being captured, since such a
/// wait breaks the capture.
///
/// ```no_run
/// use std::sync::Arc;
///
/// use kvpool::cuda::{CudaStorage, Device};
/// use kvpool::ids::SequenceId;
/// use kvpool::pool::Pool;
/// use kvpool::storage::KvLayout;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = Device::open(0)?;
/// let layout = KvLayout::named("qwen2.5-7b")?;
/// // One frame more than blocks: the null block's.
/// let storage = CudaStorage::new(&device, layout.clone(), 4097, 4097)?;
/// let pool = Pool::builder(layout).blocks(4096).storage(Arc::new(storage)).build()?;
///
/// let stream = device.stream()?;
/// let mut sequence = pool.sequence(SequenceId(1)).open()?;
/// let mut batch = pool.begin_batch_on(&stream)?;
/// batch.append(&mut sequence, 100)?;
/// // ... the model's kernels, on that stream ...
/// let finish = batch.finish_on(&stream)?; // a future: the device got there
/// # drop(finish);
/// # Ok(())
/// # }
/// ```
pub struct CudaStorage {
    pub(super) home: Arc<Home>,
    frames: AtomicUsize,
    frames_max: usize,
    /// Held while frames are added or taken away.
    resizing: Mutex<()>,
    pub(super) service: Stream,
    pub(super) packing: Stream,
    pub(super) moving: Stream,
    pub(super) moving_ctas: u32,
}

/// What work that is under way needs to live on.
pub(super) struct Home {
    memory: Bytes,
    pub(super) layout: KvLayout,
    pub(super) placed: Vec<Placed>,
    pub(super) pieces: Pieces,
    /// The pieces, where kernels find them.
    pub(super) table: Memory,
    /// Planted: a copy that leaves scales behind.
    #[cfg(kvpool_planted)]
    pub(super) values: (Memory, u32),
    /// Static scales of K and of V, `[layers][heads]`.
    pub(super) scales: Option<[Memory; 2]>,
    pub(super) device: Device,
}

/// What keeps the bytes where they are.
enum Bytes {
    Mapped(Arena),
    /// Whatever owns the engine's memory.
    Adopted {
        _owner: Box<dyn Any + Send + Sync>,
    },
}

impl CudaStorage {
    /// Reserves addresses for `frames_max` frames, and maps memory for `frames` of them. All bytes are zero.
    ///
    /// # Errors
    ///
    /// [`StorageError::FrameCount`], [`StorageError::Layout`]; [`StorageError::DeviceMemory`] if the device has too little left;
    /// what else the driver says.
    pub fn new(
        device: &Device,
        layout: KvLayout,
        frames: usize,
        frames_max: usize,
    ) -> Result<Self, StorageError> {
        Self::with_config(device, layout, frames, frames_max, CudaConfig::default())
    }

    /// The same, told how to use the device.
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
        check_count(frames, frames_max)?;
        check_sizes(&layout, frames_max)?;
        let service = Stream::new(device.0.context.clone(), StreamPriority::Usual)?;
        let segment = config.segment_frames;
        let (arena, placed) = Arena::new(&device.0.context, &layout, frames, frames_max, segment, &service)?;
        Self::over(device, layout, placed, Bytes::Mapped(arena), (frames, frames_max), service, config)
    }

    /// Takes an engine's own memory, all `frames` of it, as it is; `base` of each plane is an address of the device. It does not
    /// grow beyond that, and [`shrink`](Storage::shrink) only counts fewer frames. `owner` is kept until the
    /// storage is dropped and what it began is over: the tensors, a reference to them, or `()` if something else sees to
    /// it that the memory stays.
    ///
    /// # Errors
    ///
    /// A [`StorageError`] that names the plane: as for [host memory](crate::storage::HostStorage::adopt), or not in this device's
    /// memory, or longer than its allocation.
    ///
    /// # Safety
    ///
    /// For each plane, the `(frames - 1) * frame_stride + tile_bytes` bytes from its base are the device's memory, for as long as
    /// this storage lives; whoever else touches their tiles keeps [the frame rule](Storage#the-frame-rule).
    pub unsafe fn adopt(
        device: &Device,
        layout: KvLayout,
        planes: &[AdoptedPlane],
        frames: usize,
        owner: impl Send + Sync + 'static,
        config: CudaConfig,
    ) -> Result<Self, StorageError> {
        check_count(frames, frames)?;
        check_sizes(&layout, frames)?;
        let placed = adopted::placed(&device.0.context, &layout, planes, frames)?;
        let service = Stream::new(device.0.context.clone(), StreamPriority::Usual)?;
        let bytes = Bytes::Adopted { _owner: Box::new(owner) };
        Self::over(device, layout, placed, bytes, (frames, frames), service, config)
    }

    fn over(
        device: &Device,
        layout: KvLayout,
        placed: Vec<Placed>,
        memory: Bytes,
        (frames, frames_max): (usize, usize),
        service: Stream,
        config: CudaConfig,
    ) -> Result<Self, StorageError> {
        let pieces = Pieces::new(&placed)?;
        let table = Memory::of(device, &service, bytes_of(&pieces.list))?;
        let scales = match layout.scales() {
            Scales::PerHead { k, v } => {
                let [k, v] = [k, v].map(|scales| Memory::of(device, &service, bytes_of(scales)));
                Some([k?, v?])
            }
            _ => None,
        };
        let stream = |priority| Stream::new(device.0.context.clone(), priority);
        let (packing, moving) = (stream(StreamPriority::Usual)?, stream(StreamPriority::Lowest)?);
        #[cfg(kvpool_planted)]
        let values = {
            let values =
                placed.iter().filter(|placed| placed.plane.kind == crate::storage::PlaneKind::Values);
            let list = Pieces::new(&values.copied().collect::<Vec<_>>())?.list;
            (Memory::of(device, &service, bytes_of(&list))?, list.len() as u32)
        };
        let home = Home {
            memory,
            layout,
            placed,
            pieces,
            table,
            #[cfg(kvpool_planted)]
            values,
            scales,
            device: device.clone(),
        };
        Ok(Self {
            home: Arc::new(home),
            frames: AtomicUsize::new(frames),
            frames_max,
            resizing: Mutex::new(()),
            service,
            packing,
            moving,
            moving_ctas: config.moving_ctas,
        })
    }

    /// The opened device that the frames are on.
    pub fn opened(&self) -> &Device {
        &self.home.device
    }

    /// Where the planes are, in the order of [`KvLayout::planes`].
    pub fn planes(&self) -> Vec<DevicePlane> {
        let planes = self.home.placed.iter();
        planes.map(|placed| DevicePlane { address: placed.base, plane: placed.plane }).collect()
    }

    /// Bytes of the device's memory that are mapped for frames now; 0 if they were adopted.
    pub fn mapped_bytes(&self) -> usize {
        match &self.home.memory {
            Bytes::Mapped(arena) => arena.mapped_bytes(),
            Bytes::Adopted { .. } => 0,
        }
    }

    /// Bytes of addresses that are reserved for frames; 0 if they were adopted.
    pub fn reserved_bytes(&self) -> usize {
        match &self.home.memory {
            Bytes::Mapped(arena) => arena.reserved_bytes(),
            Bytes::Adopted { .. } => 0,
        }
    }

    /// Waits until everything is over that this storage began, and then drops it. Dropped without this, what is under way keeps the memory
    /// until it is over.
    ///
    /// # Errors
    ///
    /// [`StorageError::DeviceLost`]; it is dropped all the same.
    pub fn close(self) -> Result<(), StorageError> {
        for stream in [&self.service, &self.packing, &self.moving] {
            stream.synchronise()?;
        }
        Ok(())
    }

    /// CTAs for so many jobs of an operation that somebody waits for.
    pub(super) fn grid(&self, jobs: usize) -> u32 {
        let most = self.home.device.info().multiprocessors.max(1) * CTAS_PER_MULTIPROCESSOR;
        jobs.min(most as usize) as u32
    }
}

/// What kernels count in 32 bits, and what goes through one buffer.
fn check_sizes(layout: &KvLayout, frames_max: usize) -> Result<(), LayoutError> {
    let slots = frames_max.checked_mul(layout.block_tokens());
    if slots.is_none_or(|slots| slots > u32::MAX as usize) {
        return Err(LayoutError::TooLarge { what: "the number of slots" });
    }
    // Rows come in f32 at the widest, K and V with a slot.
    let rows = layout.row_elements().checked_mul(2 * size_of::<f32>());
    if rows.is_none_or(|rows| rows > BYTES_MAX / 2) {
        return Err(LayoutError::TooLarge { what: "a token's row" });
    }
    Ok(())
}

impl Home {
    /// K and V, or the latent vector alone.
    pub(super) fn halves(&self) -> usize {
        if self.layout.parts() == KvPlanes::Latent { 1 } else { 2 }
    }
}

impl fmt::Debug for CudaStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStorage")
            .field("device", &self.home.device)
            .field("layout", &format_args!("{}", self.home.layout))
            .field("frames", &self.frames())
            .field("frames_max", &self.frames_max)
            .field("adopted", &matches!(self.home.memory, Bytes::Adopted { .. }))
            .finish_non_exhaustive()
    }
}

impl Storage for CudaStorage {
    fn layout(&self) -> &KvLayout {
        &self.home.layout
    }

    fn device(&self) -> DeviceId {
        self.home.device.id()
    }

    #[inline]
    fn frames(&self) -> usize {
        // Acquire: pairs with the Release of `grow`, which mapped these frames before.
        self.frames.load(Ordering::Acquire)
    }

    fn frames_max(&self) -> usize {
        self.frames_max
    }

    fn grow(&self, total: usize) -> Result<(), GrowError> {
        let _resizing = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        let frames = self.frames();
        let asked = total.saturating_sub(frames);
        if total > self.frames_max {
            return Err(GrowError::TooLarge { asked, total: frames, max: self.frames_max });
        }
        if let Bytes::Mapped(arena) = &self.home.memory {
            arena.grow(total.max(frames), &self.service).map_err(|error| {
                let reason = match error {
                    StorageError::DeviceMemory { .. } => "the device has too little left",
                    StorageError::DeviceLost { .. } => "the device is lost",
                    _ => "its driver refused",
                };
                GrowError::Memory { asked, reason }
            })?;
        }
        // Release: whoever sees the number finds the frames mapped.
        self.frames.fetch_max(total, Ordering::Release);
        Ok(())
    }

    unsafe fn shrink(&self, total: usize) {
        let _resizing = self.resizing.lock().unwrap_or_else(PoisonError::into_inner);
        // Before anything is unmapped: from here on these frames are refused.
        let frames = self.frames.fetch_min(total, Ordering::AcqRel);
        if let Bytes::Mapped(arena) = &self.home.memory
            && total < frames
        {
            // SAFETY: the frames from `total` on are the caller's by the frame rule, and nothing of theirs is under way.
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
        // SAFETY: the caller's.
        unsafe { self.store_rows(layer, k, v, slots) }
    }

    unsafe fn load(
        &self,
        layer: usize,
        slots: &[i64],
        k: ElementsMut<'_>,
        v: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.load_rows(layer, slots, k, v) }
    }

    unsafe fn copy(&self, moves: &[FrameMove]) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.copy_here(moves) }
    }

    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        // SAFETY: the caller's.
        unsafe { self.copy_behind(moves, done) }
    }

    fn check_stream(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.home.device.check_stream(stream, "enqueueing")
    }

    unsafe fn copy_on(&self, stream: &DeviceStream, moves: &[FrameMove]) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.copy_in_order(stream, moves) }
    }

    fn after(&self, stream: &DeviceStream, done: CopyDone) {
        self.home.device.after(stream, done);
    }

    fn settle(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.home.device.settle(stream)
    }

    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.receive_from(source, from, to) }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    unsafe fn pack(&self, runs: &[Run], out: &mut [u8]) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.pack_runs(runs, out) }
    }

    unsafe fn unpack(&self, runs: &[Run], bytes: &[u8]) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.unpack_runs(runs, bytes) }
    }

    unsafe fn zero(&self, runs: &[Run]) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.zero_runs(runs) }
    }

    unsafe fn discard(&self, runs: &[Run]) -> Result<(), StorageError> {
        // Memory goes back by segments, when the pool shrinks: a frame here and there is no chunk of any plane.
        crate::storage::check::runs_disjoint(runs, self.frames())?;
        self.home.device.good()
    }
}

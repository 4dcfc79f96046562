//! The device that is measured: streams, memory, kernels and a stopwatch, beside the pool's own use of it.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg, result, sys,
};
use cudarc::nvrtc::Ptx;
use kvpool::cuda::params::{Piece, THREADS};
use kvpool::cuda::{CudaError, Device};
use kvpool::ids::DeviceId;
use kvpool::storage::DeviceStream;

use crate::report::DeviceFacts;

const KERNELS_80: &str = include_str!("../../kernels/ptx/kvpool.sm80.ptx");
const KERNELS_90: &str = include_str!("../../kernels/ptx/kvpool.sm90.ptx");
const PROBES_80: &str = include_str!("../../kernels/ptx/probes.sm80.ptx");
const PROBES_90: &str = include_str!("../../kernels/ptx/probes.sm90.ptx");

/// What goes wrong here, in words: there is nothing to be done about it but to say so.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// As long as this the host's own time counts for nothing.
const LONG: Duration = Duration::from_millis(2);

/// The device.
pub struct Gpu {
    /// As the pool has it.
    pub device: Device,
    /// Its primary context, the same that the pool uses.
    pub context: Arc<CudaContext>,
    /// Multiprocessors.
    pub multiprocessors: u32,
    ordinal: u16,
    kernels: Arc<CudaModule>,
    probes: Arc<CudaModule>,
}

/// Device memory that is freed with its owner.
pub struct Buffer {
    address: u64,
    bytes: usize,
    context: Arc<CudaContext>,
}

/// What the probes take, as in `kernels/probes.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ProbeParams {
    /// Address to read.
    pub from: u64,
    /// Address to write.
    pub to: u64,
    /// Vectors of 16 bytes.
    pub vectors: u64,
    /// How often.
    pub rounds: u32,
    /// 0.
    pub reserved: u32,
}

const _: () = assert!(size_of::<ProbeParams>() == 32);

// SAFETY: of C's layout, without references, and the same on the device.
unsafe impl DeviceRepr for ProbeParams {}

impl Gpu {
    /// Opens a device as the pool does, and once more for itself.
    ///
    /// # Errors
    /// What the pool says of the device, or its driver.
    pub fn open(ordinal: u16) -> Result<Outcome<Self>, CudaError> {
        let device = Device::open(usize::from(ordinal))?;
        Ok(Self::beside(device, ordinal))
    }

    fn beside(device: Device, ordinal: u16) -> Outcome<Self> {
        let context = CudaContext::new(ordinal as usize)?;
        // SAFETY: every order between streams that is needed here is made by hand.
        unsafe { context.disable_event_tracking() };
        let is_90 = context.compute_capability()? >= (9, 0);
        let load = |text: &str| context.load_module(Ptx::from_src(text));
        let kernels = load(if is_90 { KERNELS_90 } else { KERNELS_80 })?;
        let probes = load(if is_90 { PROBES_90 } else { PROBES_80 })?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(count)? as u32;
        Ok(Self { device, context, multiprocessors, ordinal, kernels, probes })
    }

    /// What it is.
    ///
    /// # Errors
    /// What the driver says.
    pub fn facts(&self) -> Outcome<DeviceFacts> {
        let mut version = 0;
        // SAFETY: the place is valid.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
        let (major, minor) = self.context.compute_capability()?;
        Ok(DeviceFacts {
            name: self.context.name()?,
            ordinal: self.ordinal as usize,
            capability: format!("{major}.{minor}"),
            driver: format!("{}.{}", version / 1000, version % 1000 / 10),
            multiprocessors: self.multiprocessors,
            memory_bytes: self.context.total_mem()? as u64,
        })
    }

    /// A stream, and the same for the pool.
    ///
    /// # Errors
    /// What the driver says.
    pub fn stream(&self) -> Outcome<(Arc<CudaStream>, DeviceStream)> {
        let stream = self.context.new_stream()?;
        let raw: *mut c_void = stream.cu_stream().cast();
        // SAFETY: a stream of this device's primary context, which owns itself.
        let shared = unsafe { DeviceStream::from_raw(DeviceId::Cuda(self.ordinal), raw, stream.clone()) };
        Ok((stream, shared))
    }

    /// A stream behind all others.
    ///
    /// # Errors
    /// What the driver says.
    pub fn lowest(&self) -> Outcome<Arc<CudaStream>> {
        self.context.bind_to_thread()?;
        let (lowest, _) = result::stream::get_priority_range()?;
        Ok(self.context.new_stream_with_priority(lowest)?)
    }

    /// A stream before all others.
    ///
    /// # Errors
    /// What the driver says.
    pub fn highest(&self) -> Outcome<Arc<CudaStream>> {
        self.context.bind_to_thread()?;
        let (_, highest) = result::stream::get_priority_range()?;
        Ok(self.context.new_stream_with_priority(highest)?)
    }

    /// A kernel of the pool.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn kernel(&self, name: &str) -> Outcome<CudaFunction> {
        Ok(self.kernels.load_function(name)?)
    }

    /// A kernel for measuring.
    ///
    /// # Errors
    /// There is none of this name.
    pub fn probe(&self, name: &str) -> Outcome<CudaFunction> {
        Ok(self.probes.load_function(name)?)
    }

    /// Device memory.
    ///
    /// # Errors
    /// There is none.
    pub fn buffer(&self, bytes: usize) -> Outcome<Buffer> {
        self.context.bind_to_thread()?;
        // SAFETY: freed by the buffer alone.
        let address = unsafe { result::malloc_sync(bytes.max(16))? };
        Ok(Buffer { address, bytes, context: self.context.clone() })
    }

    /// Device memory that holds these.
    ///
    /// # Errors
    /// There is none, or it cannot be written.
    pub fn upload<T: Copy>(&self, values: &[T]) -> Outcome<Buffer> {
        let buffer = self.buffer(size_of_val(values))?;
        // SAFETY: the buffer is as large.
        unsafe { result::memcpy_htod_sync(buffer.address, values)? };
        // The call returns once the values are staged, and streams of ours do not wait for the default one.
        self.context.synchronize()?;
        Ok(buffer)
    }

    /// Median time of some launches, in milliseconds, by the device's own clock.
    ///
    /// What is short is launched several times between two marks: the device passes the first while the host still enqueues
    /// what is to be timed, and would count that as well.
    ///
    /// # Errors
    /// What the driver says.
    pub fn time(
        &self,
        stream: &Arc<CudaStream>,
        times: usize,
        mut work: impl FnMut() -> Outcome<()>,
    ) -> Outcome<f64> {
        const TIMED: Option<sys::CUevent_flags> = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        work()?;
        stream.synchronize()?;
        let once = Instant::now();
        work()?;
        stream.synchronize()?;
        let repeats = (LONG.as_secs_f64() / once.elapsed().as_secs_f64().max(1e-6)).ceil() as usize;
        let repeats = repeats.clamp(1, times);
        let mut took = Vec::with_capacity(times);
        for _ in 0..times {
            let begin = stream.record_event(TIMED)?;
            (0..repeats).try_for_each(|_| work())?;
            let end: CudaEvent = stream.record_event(TIMED)?;
            took.push(f64::from(begin.elapsed_ms(&end)?) / repeats as f64);
        }
        took.sort_by(f64::total_cmp);
        Ok(took[took.len() / 2])
    }
}

/// Launches a kernel that takes one struct.
///
/// # Errors
/// What the driver says.
///
/// # Safety
/// What the parameters name is there until the stream has done it, and nobody else touches what is written.
pub unsafe fn launch<P: DeviceRepr>(
    stream: &Arc<CudaStream>,
    kernel: &CudaFunction,
    grid: u32,
    params: &P,
) -> Outcome<()> {
    let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (THREADS, 1, 1), shared_mem_bytes: 0 };
    // SAFETY: the caller's.
    unsafe { stream.launch_builder(kernel).arg(params).launch(config) }?;
    Ok(())
}

impl Buffer {
    /// Where it begins.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Fills it with one byte.
    ///
    /// # Errors
    /// What the driver says.
    pub fn fill(&self, stream: &CudaStream, byte: u8) -> Result<(), DriverError> {
        // SAFETY: the buffer's own bytes.
        unsafe { result::memset_d8_async(self.address, byte, self.bytes, stream.cu_stream()) }
    }

    /// What it holds, once the stream has done what it was given.
    ///
    /// # Errors
    /// What the driver says.
    pub fn download(&self, stream: &CudaStream) -> Result<Vec<u8>, DriverError> {
        stream.synchronize()?;
        self.read()
    }

    /// What it holds now: for when no stream writes it.
    ///
    /// # Errors
    /// What the driver says.
    pub fn read(&self) -> Result<Vec<u8>, DriverError> {
        self.context.bind_to_thread()?;
        let mut bytes = vec![0; self.bytes];
        // SAFETY: as long as the buffer.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address)? };
        Ok(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated once, and nobody uses it any more. A failure is the device's, and was told before.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Planes of `frames` tiles of one size, one after the other from `base` on, cut into pieces of 16 KiB.
#[must_use]
pub fn layer_first(base: u64, planes: usize, frames: usize, tile_bytes: u32) -> Vec<Piece> {
    use kvpool::cuda::params::PIECE_BYTES_MAX;
    let stride = u64::from(tile_bytes);
    let mut pieces = Vec::new();
    for plane in 0..planes as u64 {
        let start = base + plane * frames as u64 * stride;
        for offset in (0..tile_bytes).step_by(PIECE_BYTES_MAX as usize) {
            let bytes = (tile_bytes - offset).min(PIECE_BYTES_MAX);
            let packed_at = plane as u32 * tile_bytes + offset;
            pieces.push(Piece { base: start + u64::from(offset), frame_stride: stride, bytes, packed_at });
        }
    }
    pieces
}

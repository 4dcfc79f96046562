//! The measured device: streams, memory, kernels and a stopwatch, beside the pool's own use of it.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::{
    CudaContext, CudaEvent, CudaFunction, CudaModule, CudaStream, DeviceRepr, DriverError, LaunchConfig,
    PushKernelArg, result, sys,
};
use cudarc::nvrtc::Ptx;
use kvpool::DeviceId;
use kvpool::storage::DeviceStream;
use kvpool_cuda::launch::{Kernel, Params, Shape, Work};
use kvpool_cuda::params::{PIECE_BYTES_MAX, Piece, THREADS};
use kvpool_cuda::{CudaError, Device, StreamPriority};

use sys::CUdevice_attribute as Attribute;

use crate::report::DeviceFacts;

const KERNELS_80: &str = include_str!("../../kernels/ptx/kvpool.sm80.ptx");
const KERNELS_90: &str = include_str!("../../kernels/ptx/kvpool.sm90.ptx");
const PROBES: &str = include_str!("../../kernels/ptx/probes.sm80.ptx");

/// The probes as machine code, by the major version of the compute capability; the pool has its
/// own.
#[cfg(kvpool_cubins)]
const CUBINS: [(u32, &[u8]); 2] = [
    (8, include_bytes!(concat!(env!("KVPOOL_CUBINS"), "/probes.sm80.cubin"))),
    (9, include_bytes!(concat!(env!("KVPOOL_CUBINS"), "/probes.sm90.cubin"))),
];
#[cfg(not(kvpool_cubins))]
const CUBINS: [(u32, &[u8]); 0] = [];

/// Result of a measurement. Errors are only reported as text.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Work of this length makes the host's own time negligible.
const LONG: Duration = Duration::from_millis(2);

/// The measured device.
pub struct Gpu {
    /// The device as opened by the pool.
    pub device: Device,
    /// Its primary context, which the pool uses, too.
    pub context: Arc<CudaContext>,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    ordinal: u16,
    probes: Arc<CudaModule>,
    /// Time to open the device.
    opened: Duration,
}

/// Device memory that is freed with its owner.
pub struct Buffer {
    address: u64,
    bytes: usize,
    context: Arc<CudaContext>,
}

/// Parameters of the probes, as in `kernels/probes.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ProbeParams {
    /// Address to read.
    pub from: u64,
    /// Address to write.
    pub to: u64,
    /// Number of vectors of 16 bytes.
    pub vectors: u64,
    /// Number of repetitions.
    pub rounds: u32,
    /// Zero.
    pub reserved: u32,
}

const _: () = assert!(size_of::<ProbeParams>() == 32);

// SAFETY: C layout without references, identical on the device.
unsafe impl DeviceRepr for ProbeParams {}

impl Gpu {
    /// Opens a device like the pool, and a second time for its own use.
    ///
    /// # Errors
    /// An error of the pool's device, or of the driver.
    pub fn open(ordinal: u16) -> Result<Outcome<Self>, CudaError> {
        let begin = Instant::now();
        let device = Device::open(usize::from(ordinal))?;
        Ok(Self::beside(device, ordinal, begin.elapsed()))
    }

    fn beside(device: Device, ordinal: u16, opened: Duration) -> Outcome<Self> {
        let context = CudaContext::new(ordinal as usize)?;
        // SAFETY: all necessary ordering between streams is explicit here.
        unsafe { context.disable_event_tracking() };
        // Machine code if the program has it for the device, as the pool itself does.
        let loaded =
            cubin(&device).and_then(|code| context.load_module(Ptx::from_binary(code.to_vec())).ok());
        let probes = loaded.map_or_else(|| context.load_module(Ptx::from_src(PROBES)), Ok)?;
        let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(count)? as u32;
        Ok(Self { device, context, multiprocessors, ordinal, probes, opened })
    }

    /// Returns the properties of the device.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn facts(&self) -> Outcome<DeviceFacts> {
        let mut version = 0;
        // SAFETY: the pointer is valid.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
        let (major, minor) = self.context.compute_capability()?;
        let attribute = |which| -> Outcome<u32> { Ok(self.context.attribute(which)?.max(0) as u32) };
        Ok(DeviceFacts {
            commit: env!("KVPOOL_COMMIT").into(),
            kernel_driver: kernel_driver(),
            clock_mhz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000,
            memory_clock_mhz: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)? / 1000,
            memory_bus_bits: attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
            link: link(&self.pci()?),
            exclusive: self.device.info().is_exclusive,
            kernels: self.device.kernel_image().to_string(),
            open_ms: self.opened_ms(),
            load_ms: self.device.loaded_in().as_secs_f64() * 1e3,
            name: self.context.name()?,
            ordinal: self.ordinal as usize,
            capability: format!("{major}.{minor}"),
            driver: format!("{}.{}", version / 1000, version % 1000 / 10),
            multiprocessors: self.multiprocessors,
            memory_bytes: self.context.total_mem()? as u64,
        })
    }

    /// Compiles the pool's kernels for the device, and returns the time in milliseconds.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn compile(&self) -> Outcome<f64> {
        let text = if self.device.info().capability.major >= 9 { KERNELS_90 } else { KERNELS_80 };
        let begin = Instant::now();
        let module = self.context.load_module(Ptx::from_src(text))?;
        let took = begin.elapsed().as_secs_f64() * 1e3;
        drop(module);
        Ok(took)
    }

    /// Returns true if the program has machine code for the device.
    #[must_use]
    pub fn has_cubin(&self) -> bool {
        cubin(&self.device).is_some()
    }

    /// Returns the time in milliseconds that it took to open the device for a pool.
    #[must_use]
    pub fn opened_ms(&self) -> f64 {
        self.opened.as_secs_f64() * 1e3
    }

    /// Returns the ordinal in the driver's type.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal.into()
    }

    /// Returns the device's address on the PCI bus.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn pci(&self) -> Outcome<String> {
        let number = |which| -> Outcome<u32> { Ok(self.context.attribute(which)?.max(0) as u32) };
        let domain = number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let device = number(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Ok(format!("{domain:04x}:{bus:02x}:{device:02x}.0"))
    }

    /// Creates a stream, and returns it also in the pool's type.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn stream(&self) -> Outcome<(Arc<CudaStream>, DeviceStream)> {
        let stream = self.context.new_stream()?;
        let raw: *mut c_void = stream.cu_stream().cast();
        // SAFETY: a stream of this device's primary context, which owns itself.
        let shared = unsafe { DeviceStream::from_raw(DeviceId::Cuda(self.ordinal), raw, stream.clone()) };
        Ok((stream, shared))
    }

    /// Creates a stream of the priority of the one on which a pool does some work.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn stream_for(&self, work: Work) -> Outcome<Arc<CudaStream>> {
        self.context.bind_to_thread()?;
        let (lowest, highest) = result::stream::get_priority_range()?;
        let priority = match work.rule(false).stream.priority() {
            StreamPriority::Lowest => lowest,
            StreamPriority::Highest => highest,
            _ => 0,
        };
        Ok(self.context.new_stream_with_priority(priority)?)
    }

    /// Enqueues a kernel as a pool launches it.
    ///
    /// # Errors
    /// An error of the driver.
    ///
    /// # Safety
    /// As for [`launch`].
    pub unsafe fn launch<P: Params>(&self, stream: &CudaStream, work: Work, params: &P) -> Outcome<()> {
        // SAFETY: the caller's promise; streams are created in the device's primary context.
        unsafe { self.device.launch(stream.cu_stream(), work, params)? };
        Ok(())
    }

    /// Enqueues a kernel of the pool with another shape.
    ///
    /// # Errors
    /// An error of the driver.
    ///
    /// # Safety
    /// As for [`launch`]; the kernel allows the shape.
    pub unsafe fn launch_as<P: DeviceRepr>(
        &self,
        stream: &CudaStream,
        kernel: Kernel,
        shape: Shape,
        params: &P,
    ) -> Outcome<()> {
        // SAFETY: as above.
        unsafe { self.device.launch_as(stream.cu_stream(), kernel, shape, params)? };
        Ok(())
    }

    /// Creates a stream of the highest priority.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn highest(&self) -> Outcome<Arc<CudaStream>> {
        self.context.bind_to_thread()?;
        let (_, highest) = result::stream::get_priority_range()?;
        Ok(self.context.new_stream_with_priority(highest)?)
    }

    /// Returns a kernel for measurements.
    ///
    /// # Errors
    /// If no kernel has this name.
    pub fn probe(&self, name: &str) -> Outcome<CudaFunction> {
        Ok(self.probes.load_function(name)?)
    }

    /// Allocates device memory.
    ///
    /// # Errors
    /// If no memory is available.
    pub fn buffer(&self, bytes: usize) -> Outcome<Buffer> {
        self.context.bind_to_thread()?;
        // SAFETY: only the buffer frees it.
        let address = unsafe { result::malloc_sync(bytes.max(16))? };
        Ok(Buffer { address, bytes, context: self.context.clone() })
    }

    /// Allocates device memory and copies values to it.
    ///
    /// # Errors
    /// If no memory is available, or the copy fails.
    pub fn upload<T: Copy>(&self, values: &[T]) -> Outcome<Buffer> {
        let buffer = self.buffer(size_of_val(values))?;
        // SAFETY: the buffer has the size of the values.
        unsafe { result::memcpy_htod_sync(buffer.address, values)? };
        // The call returns once the values are staged, and the streams created here do not wait for
        // the default one.
        self.context.synchronize()?;
        Ok(buffer)
    }

    /// Writes bytes to device memory, and waits until they are there.
    ///
    /// # Errors
    /// If the copy fails.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Outcome<()> {
        self.context.bind_to_thread()?;
        // SAFETY: only the caller, which owns the memory, loses its content.
        unsafe { result::memcpy_htod_sync(address, bytes)? };
        self.context.synchronize()?;
        Ok(())
    }

    /// Returns bytes of device memory. No stream may be writing them.
    ///
    /// # Errors
    /// If the copy fails.
    pub fn read(&self, address: u64, bytes: usize) -> Outcome<Vec<u8>> {
        self.context.bind_to_thread()?;
        let mut read = vec![0; bytes];
        // SAFETY: the caller owns the memory.
        unsafe { result::memcpy_dtoh_sync(&mut read, address)? };
        Ok(read)
    }

    /// Returns the median time of several launches in milliseconds, by the device's clock.
    ///
    /// Short work is launched several times between two events: the device passes the first event
    /// while the host still enqueues the work, and would otherwise count that time as well.
    ///
    /// # Errors
    /// An error of the driver.
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
        Ok(median(took))
    }
}

/// Returns the median; 0 if there are no values.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Creates a runtime that runs futures of the pool on the calling thread.
///
/// # Errors
/// An error of the system.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_time().build()
}

/// Returns the probes' machine code for a device, if the program has it.
fn cubin(device: &Device) -> Option<&'static [u8]> {
    CUBINS.into_iter().find(|(major, _)| *major == device.info().capability.major).map(|(_, code)| code)
}

/// Returns the version of the kernel's driver.
fn kernel_driver() -> String {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
    text.trim().to_owned()
}

/// Returns the current speed and width of a device's link to the host, and the maximal ones.
fn link(pci: &str) -> String {
    let folder = format!("/sys/bus/pci/devices/{pci}");
    let read = |name: &str| {
        let text = std::fs::read_to_string(format!("{folder}/{name}")).unwrap_or_default();
        text.trim().to_owned()
    };
    let (speed, width) = (read("current_link_speed"), read("current_link_width"));
    if speed.is_empty() || width.is_empty() {
        return String::new();
    }
    format!("{speed} x{width} (at most {} x{})", read("max_link_speed"), read("max_link_width"))
}

/// Launches a kernel that takes one struct.
///
/// # Errors
/// An error of the driver.
///
/// # Safety
/// The memory in the parameters lives until the stream has executed the kernel, and no one else
/// accesses the written part.
pub unsafe fn launch<P: DeviceRepr>(
    stream: &Arc<CudaStream>,
    kernel: &CudaFunction,
    grid: u32,
    params: &P,
) -> Outcome<()> {
    // SAFETY: the caller's promise.
    unsafe { launch_as(stream, kernel, (grid, THREADS, 0), params) }
}

/// Launches a kernel with a number of CTAs, threads of each, and bytes of their shared memory.
///
/// # Errors
/// An error of the driver.
///
/// # Safety
/// As for [`launch`]; the kernel allows the shape.
pub unsafe fn launch_as<P: DeviceRepr>(
    stream: &Arc<CudaStream>,
    kernel: &CudaFunction,
    (grid, threads, shared_mem_bytes): (u32, u32, u32),
    params: &P,
) -> Outcome<()> {
    let config = LaunchConfig { grid_dim: (grid, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes };
    // SAFETY: the caller's promise.
    unsafe { stream.launch_builder(kernel).arg(params).launch(config) }?;
    Ok(())
}

impl Buffer {
    /// Returns the address of the buffer.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Fills the buffer with one byte value.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn fill(&self, stream: &CudaStream, byte: u8) -> Result<(), DriverError> {
        // SAFETY: the buffer's own bytes.
        unsafe { result::memset_d8_async(self.address, byte, self.bytes, stream.cu_stream()) }
    }

    /// Returns the contents, once the stream has executed its work.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn download(&self, stream: &CudaStream) -> Result<Vec<u8>, DriverError> {
        stream.synchronize()?;
        self.read()
    }

    /// Returns the current contents. No stream may be writing them.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn read(&self) -> Result<Vec<u8>, DriverError> {
        self.context.bind_to_thread()?;
        let mut bytes = vec![0; self.bytes];
        // SAFETY: both have the same length.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, self.address)? };
        Ok(bytes)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: allocated once, and no longer used. A failure of the device has been reported
        // before.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Returns planes of `frames` tiles of one size, consecutive from `base` on, cut into pieces of 16
/// KiB.
#[must_use]
pub fn layer_first(base: u64, planes: usize, frames: usize, tile_bytes: u32) -> Vec<Piece> {
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

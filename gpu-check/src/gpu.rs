//! The measured device: streams, memory, kernels and a stopwatch, beside the pool's own use of it.

use std::collections::HashSet;
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
use kvpool_cuda::launch::Work;
use kvpool_cuda::params::{Move, PIECE_BYTES_MAX, Piece, THREADS};
use kvpool_cuda::{Device, StreamPriority};

use sys::CUdevice_attribute as Attribute;
use tokio::runtime::{Builder, Runtime};

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

/// An error, which is only reported as text.
pub type Failure = Box<dyn std::error::Error>;

/// Result of a measurement.
pub type Outcome<T> = Result<T, Failure>;

/// Flags of an event that has a time.
pub const TIMED: Option<sys::CUevent_flags> = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);

/// Timeout, longer than any operation takes.
pub const PATIENCE: Duration = Duration::from_secs(10);

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
    /// Its ordinal.
    pub ordinal: u16,
    /// Time in milliseconds that it took to open the device for a pool.
    pub opened_ms: f64,
    probes: Arc<CudaModule>,
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

impl ProbeParams {
    /// Describes a linear copy.
    #[must_use]
    pub const fn copy(from: u64, to: u64, bytes: usize) -> Self {
        Self { from, to, vectors: bytes as u64 / 16, rounds: 1, reserved: 0 }
    }

    /// Describes rounds of `kvp_probe_burn`, which writes at most the first word at the address.
    #[must_use]
    pub const fn burn(to: u64, rounds: u32) -> Self {
        Self { from: 0, to, vectors: 0, rounds, reserved: 0 }
    }
}

impl Gpu {
    /// Uses a device that was opened for pools within this time.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn over(device: Device, opened: Duration) -> Outcome<Self> {
        let ordinal = device.info().ordinal;
        let context = CudaContext::new(ordinal.into())?;
        // SAFETY: all necessary ordering between streams is explicit here.
        unsafe { context.disable_event_tracking() };
        // Machine code if the program has it for the device, as the pool itself does.
        let loaded =
            cubin(&device).and_then(|code| context.load_module(Ptx::from_binary(code.to_vec())).ok());
        let probes = loaded.map_or_else(|| context.load_module(Ptx::from_src(PROBES)), Ok)?;
        let (multiprocessors, opened_ms) = (device.info().multiprocessors, opened.as_secs_f64() * 1e3);
        Ok(Self { device, context, multiprocessors, ordinal, opened_ms, probes })
    }

    /// Returns an attribute of the device.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn attribute(&self, which: Attribute) -> Outcome<u32> {
        Ok(self.context.attribute(which)?.max(0) as u32)
    }

    /// Returns the properties of the device.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn facts(&self) -> Outcome<DeviceFacts> {
        let (info, mut version) = (self.device.info(), 0);
        // SAFETY: the pointer is valid.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result()?;
        Ok(DeviceFacts {
            commit: env!("KVPOOL_COMMIT").into(),
            kernel_driver: said("/sys/module/nvidia/version"),
            clock_mhz: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)? / 1000,
            memory_clock_mhz: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)? / 1000,
            memory_bus_bits: self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?,
            link: link(&self.pci()?),
            exclusive: info.is_exclusive,
            kernels: self.device.kernels().image.to_string(),
            open_ms: self.opened_ms,
            load_ms: self.device.kernels().loaded_in.as_secs_f64() * 1e3,
            name: info.name.clone(),
            ordinal: self.ordinal.into(),
            capability: info.capability.to_string(),
            driver: format!("{}.{}", version / 1000, version % 1000 / 10),
            multiprocessors: self.multiprocessors,
            memory_bytes: info.memory_bytes,
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

    /// Returns the device's address on the PCI bus.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn pci(&self) -> Outcome<String> {
        let domain = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let device = self.attribute(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
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
        self.stream_of(self.device.kernels().rule(work).stream.priority())
    }

    /// Creates a stream of a priority.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn stream_of(&self, priority: StreamPriority) -> Outcome<Arc<CudaStream>> {
        self.context.bind_to_thread()?;
        let (lowest, highest) = result::stream::get_priority_range()?;
        let priority = match priority {
            StreamPriority::Lowest => lowest,
            StreamPriority::Highest => highest,
            _ => 0,
        };
        Ok(self.context.new_stream_with_priority(priority)?)
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
        self.write(buffer.address, values)?;
        Ok(buffer)
    }

    /// Writes values to device memory, and waits until they are there.
    ///
    /// # Errors
    /// If the copy fails.
    pub fn write<T: Copy>(&self, address: u64, values: &[T]) -> Outcome<()> {
        self.context.bind_to_thread()?;
        // SAFETY: only the caller, which owns the memory, loses its content.
        unsafe { result::memcpy_htod_sync(address, values)? };
        // The call returns once the values are staged, and the streams created here do not wait for
        // the default one.
        Ok(self.context.synchronize()?)
    }

    /// Returns bytes of device memory. No stream may be writing them.
    ///
    /// # Errors
    /// If the copy fails.
    pub fn read(&self, address: u64, bytes: usize) -> Outcome<Vec<u8>> {
        Ok(read(&self.context, address, bytes)?)
    }

    /// Returns the median time of several launches in milliseconds, by the device's clock.
    ///
    /// Short work is launched several times between two events: the device passes the first event
    /// while the host still enqueues the work, and would otherwise count that time as well.
    ///
    /// # Errors
    /// An error of the driver.
    pub fn time<E: Into<Failure>>(
        &self,
        stream: &Arc<CudaStream>,
        times: usize,
        mut work: impl FnMut() -> Result<(), E>,
    ) -> Outcome<f64> {
        let mut work = || work().map_err(Into::into);
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

    /// Does so for a linear copy by the probe kernel, of as many CTAs for each multiprocessor.
    ///
    /// # Errors
    /// An error of the driver.
    ///
    /// # Safety
    /// No one else uses the bytes at these addresses until the stream has executed the copies.
    pub unsafe fn time_copy(
        &self,
        stream: &Arc<CudaStream>,
        times: usize,
        ctas: u32,
        params: &ProbeParams,
    ) -> Outcome<f64> {
        let kernel = self.probe("kvp_probe_copy")?;
        // SAFETY: the caller's promise.
        self.time(stream, times, || unsafe { launch(stream, &kernel, ctas * self.multiprocessors, params) })
    }
}

/// Returns the median time of some work in milliseconds, by the host's clock.
///
/// # Errors
/// Those of the work.
pub fn time_host<E: Into<Failure>>(times: usize, mut work: impl FnMut() -> Result<(), E>) -> Outcome<f64> {
    let took = (0..times).map(|_| Ok(took(&mut work)?.as_secs_f64() * 1e3));
    Ok(median(took.collect::<Outcome<_>>()?))
}

/// Returns the time of some work, by the host's clock.
///
/// # Errors
/// Those of the work.
pub fn took<E: Into<Failure>>(work: impl FnOnce() -> Result<(), E>) -> Outcome<Duration> {
    let begin = Instant::now();
    work().map_err(Into::into)?;
    Ok(begin.elapsed())
}

/// Returns the rate of bytes within milliseconds in GB/s.
#[must_use]
pub fn rate(bytes: usize, milliseconds: f64) -> f64 {
    bytes as f64 / 1e6 / milliseconds
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
pub fn runtime() -> std::io::Result<Runtime> {
    Builder::new_current_thread().enable_time().build()
}

/// Waits for the end of a batch, but not for ever.
///
/// # Errors
/// Why the batch has not ended.
pub fn wait<E: Into<Failure>>(runtime: &Runtime, end: impl Future<Output = Result<(), E>>) -> Outcome<()> {
    runtime.block_on(async { tokio::time::timeout(PATIENCE, end).await })?.map_err(Into::into)
}

/// Returns the probes' machine code for a device, if the program has it.
#[must_use]
pub fn cubin(device: &Device) -> Option<&'static [u8]> {
    CUBINS.into_iter().find(|(major, _)| *major == device.info().capability.major).map(|(_, code)| code)
}

fn read(context: &CudaContext, address: u64, bytes: usize) -> Result<Vec<u8>, DriverError> {
    context.bind_to_thread()?;
    let mut read = vec![0; bytes];
    // SAFETY: the caller owns the memory, of which this many bytes exist.
    unsafe { result::memcpy_dtoh_sync(&mut read, address)? };
    Ok(read)
}

/// Returns what a file of the system says; empty if there is none.
fn said(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

/// Returns the current speed and width of a device's link to the host, and the maximal ones.
fn link(pci: &str) -> String {
    let read = |name: &str| said(&format!("/sys/bus/pci/devices/{pci}/{name}"));
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
        read(&self.context, self.address, self.bytes)
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

/// Checks that no two moves have the same destination.
///
/// # Errors
/// If two have.
pub fn distinct(moves: &[Move]) -> Outcome<()> {
    let distinct: HashSet<u32> = moves.iter().map(|step| step.dst).collect();
    if distinct.len() == moves.len() { Ok(()) } else { Err("the moves have a destination twice".into()) }
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

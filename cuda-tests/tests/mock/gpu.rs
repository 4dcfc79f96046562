//! A device for tests: cudarc's context, and calls by address, so that a test states each operation
//! and its stream.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};
use cudarc::driver::{CudaContext, CudaStream, DriverError, result};
use kvpool_cuda_tests::mock::{Session, session};

/// Same as `ProbeParams` of kernels/probes.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Probe {
    pub from: u64,
    pub to: u64,
    pub vectors: u64,
    pub rounds: u32,
    pub reserved: u32,
}

pub const PROBES: &str = include_str!("../../../kernels/ptx/probes.sm80.ptx");

pub struct Gpu {
    pub context: Arc<CudaContext>,
    pub mock: Session,
}

/// Resumes the device: the destructors of a test that ends or panics while it is paused would wait.
impl Drop for Gpu {
    fn drop(&mut self) {
        self.mock.resume();
    }
}

/// Opens device 0, with a session of this test's own.
pub fn gpu() -> Gpu {
    let mock = session();
    let context = CudaContext::new(0).unwrap();
    Gpu { context, mock }
}

pub fn code(result: Result<(), DriverError>) -> CUresult {
    result.map_or_else(|error| error.0, |()| CUresult::CUDA_SUCCESS)
}

impl Gpu {
    pub fn stream(&self) -> Arc<CudaStream> {
        self.context.new_stream().unwrap()
    }

    /// Allocates `bytes` of device memory, all 0.
    pub fn memory(&self, bytes: usize) -> u64 {
        self.context.bind_to_thread().unwrap();
        // SAFETY: a context is current.
        let at = unsafe { result::malloc_sync(bytes) }.unwrap();
        let stream = self.stream();
        fill(&stream, at, 0, bytes).unwrap();
        self.mock.resume();
        stream.synchronize().unwrap();
        at
    }

    pub fn free(&self, at: u64) {
        // SAFETY: a test frees each result of `memory` once.
        unsafe { result::free_sync(at) }.unwrap();
    }

    /// Returns the content of device memory once all work enqueued in `stream` is done.
    pub fn read(&self, stream: &CudaStream, at: u64, bytes: usize) -> Vec<u8> {
        self.mock.resume();
        let mut read = vec![0; bytes];
        stream.context().bind_to_thread().unwrap();
        // SAFETY: pageable memory: the copy is done when the call returns.
        unsafe { result::memcpy_dtoh_async(&mut read, at, stream.cu_stream()) }.unwrap();
        read
    }

    /// Allocates `bytes` of pinned memory, all 0.
    pub fn pinned(&self, bytes: usize) -> &'static mut [u8] {
        self.context.bind_to_thread().unwrap();
        // SAFETY: a context is current; there is no other reference to the memory, which lives
        // until `unpin`.
        unsafe {
            let at = result::malloc_host(bytes, sys::CU_MEMHOSTALLOC_PORTABLE).unwrap().cast::<u8>();
            at.write_bytes(0, bytes);
            std::slice::from_raw_parts_mut(at, bytes)
        }
    }

    /// Loads a kernel of kernels/probes.cu.
    pub fn probe(&self, name: &str) -> cudarc::driver::CudaFunction {
        let ptx = cudarc::nvrtc::Ptx::from_src(PROBES);
        self.context.load_module(ptx).unwrap().load_function(name).unwrap()
    }
}

pub fn unpin(memory: &'static mut [u8]) -> CUresult {
    // SAFETY: a test frees each result of `pinned` once.
    code(unsafe { result::free_host(memory.as_mut_ptr().cast()) })
}

pub fn fill(stream: &CudaStream, at: u64, value: u8, bytes: usize) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: the mock checks the address when the stream reaches the operation.
    unsafe { result::memset_d8_async(at, value, bytes, stream.cu_stream()) }
}

pub fn copy(stream: &CudaStream, to: u64, from: u64, bytes: usize) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: as in `fill`.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }
}

pub fn upload(stream: &CudaStream, to: u64, from: &[u8]) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: as in `fill`; tests keep `from` while the copy may read it, or test what happens
    // otherwise.
    unsafe { result::memcpy_htod_async(to, from, stream.cu_stream()) }
}

pub fn download(stream: &CudaStream, to: &mut [u8], from: u64) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    // SAFETY: as in `upload`.
    unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }
}

/// Launches a probe on `grid` CTAs; the parameters are dropped on return.
pub fn launch(
    stream: &CudaStream,
    function: &cudarc::driver::CudaFunction,
    grid: u32,
    probe: Probe,
) -> Result<(), DriverError> {
    stream.context().bind_to_thread()?;
    let mut params = probe;
    let mut arguments = [(&raw mut params).cast::<c_void>()];
    // SAFETY: the kernel takes one struct of this layout; the mock copies it immediately.
    let result = unsafe {
        result::launch_kernel(
            function.cu_function(),
            (grid, 1, 1),
            (256, 1, 1),
            0,
            stream.cu_stream(),
            &mut arguments,
        )
    };
    params = Probe { from: 1, to: 1, vectors: 1, rounds: 1, reserved: 0 };
    std::hint::black_box(params);
    result
}

/// Calls `function` when the stream reaches this point.
pub fn host_call(stream: &CudaStream, function: impl FnOnce() + Send + 'static) -> Result<(), DriverError> {
    unsafe extern "C" fn call(data: *mut c_void) {
        // SAFETY: `host_call` made the pointer from a box, and the driver calls once.
        let function = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
        function();
    }
    stream.context().bind_to_thread()?;
    let boxed: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(function));
    // SAFETY: the function owns the data from here on. If it is never called the data leaks, which
    // only tests cause.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), call, Box::into_raw(boxed).cast()) }
}

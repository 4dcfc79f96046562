//! The engine's own memory: buffers for the data that a step sends and receives, and events that
//! show when a step is complete.
//!
//! Buffers are kept and reused as soon as their step is complete, as engines do, because freeing
//! one would wait for the device.

use std::ptr::NonNull;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};
use kvpool::storage::DeviceStream;

/// Size of a buffer in bytes.
pub const BYTES: usize = 512 << 10;

/// Pinned host memory, and device memory of the same size.
pub struct Buffer {
    /// Address on the host.
    pinned: NonNull<u8>,
    /// Address on the device.
    pub device: u64,
}

// SAFETY: plain memory, with a single owner on the host.
unsafe impl Send for Buffer {}

/// Unused buffers. Callers must have the context of the buffers current.
#[derive(Default)]
pub struct Buffers(Vec<Buffer>);

impl Buffers {
    /// Takes a buffer, with the contents that its last step left.
    pub fn take(&mut self) -> Result<Buffer, DriverError> {
        match self.0.pop() {
            Some(buffer) => Ok(buffer),
            None => Buffer::new(),
        }
    }

    /// Returns the buffer of a step that the engine has seen complete.
    pub fn give_back(&mut self, buffer: Buffer) {
        self.0.push(buffer);
    }
}

impl Buffer {
    fn new() -> Result<Self, DriverError> {
        let (mut pinned, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: the pointers are valid; a context is current.
        unsafe {
            sys::cuMemHostAlloc(&mut pinned, BYTES, sys::CU_MEMHOSTALLOC_PORTABLE).result()?;
            if let Err(error) = sys::cuMemAlloc_v2(&mut device, BYTES).result() {
                let _ = sys::cuMemFreeHost(pinned);
                return Err(error);
            }
        }
        let pinned = NonNull::new(pinned.cast()).expect("allocated memory has a non-null address");
        Ok(Self { pinned, device })
    }

    /// Returns the host's side. The device must not be using it.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: this many bytes, which no one else has on the host.
        unsafe { std::slice::from_raw_parts_mut(self.pinned.as_ptr(), BYTES) }
    }

    /// Enqueues a copy of the first bytes to the device.
    ///
    /// # Safety
    /// The stream lives; the buffer is not accessed until the copy is complete.
    pub unsafe fn send(&self, bytes: usize, stream: &DeviceStream) -> Result<(), DriverError> {
        let raw = stream.as_raw().cast();
        // SAFETY: both sides are at least that long; the rest is the caller's promise.
        unsafe { sys::cuMemcpyHtoDAsync_v2(self.device, self.pinned.as_ptr().cast(), bytes, raw) }.result()
    }

    /// Enqueues a copy of the bytes from `at` on to the host.
    ///
    /// # Safety
    /// As for [`send`](Self::send).
    pub unsafe fn fetch(&self, at: usize, bytes: usize, stream: &DeviceStream) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        let raw = stream.as_raw().cast();
        // SAFETY: both sides are at least that long; the rest is the caller's promise.
        unsafe {
            let to = self.pinned.as_ptr().add(at).cast();
            sys::cuMemcpyDtoHAsync_v2(to, self.device + at as u64, bytes, raw).result()
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`. On a failed device both calls return its error.
        unsafe {
            let _ = sys::cuMemFree_v2(self.device);
            let _ = sys::cuMemFreeHost(self.pinned.as_ptr().cast());
        }
    }
}

/// An event of the engine, recorded once.
pub struct Mark(CUevent);

// SAFETY: any thread can use an event.
unsafe impl Send for Mark {}

impl Mark {
    /// Records an event behind the work enqueued on the stream so far.
    pub fn behind(stream: &DeviceStream) -> Result<Self, DriverError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is valid, a context is current, and the stream lives.
        unsafe {
            sys::cuEventCreate(&mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32).result()?;
            let mark = Self(raw);
            sys::cuEventRecord(raw, stream.as_raw().cast()).result()?;
            Ok(mark)
        }
    }

    /// Returns true if the device has reached the event.
    pub fn is_reached(&self) -> Result<bool, DriverError> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => answer.result().map(|()| true),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: the event lives, and no one else has it.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

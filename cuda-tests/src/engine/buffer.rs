//! The engine's own memory: what one step sends to the device and gets back, and how the engine knows that it has.
//!
//! Buffers are kept and used again as soon as the step is over, as engines do: to free one would wait for the device.

use std::ptr::NonNull;

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};
use kvpool::storage::DeviceStream;

/// Bytes of a buffer.
pub const BYTES: usize = 512 << 10;

/// Pinned memory of the host, and as much of the device's.
pub struct Buffer {
    /// Where it is on the host.
    pinned: NonNull<u8>,
    /// Where it is on the device.
    pub device: u64,
}

// SAFETY: it is memory, of which this is the only owner on the host.
unsafe impl Send for Buffer {}

/// Buffers that nobody uses. The context in which they are made is current to whoever calls.
#[derive(Default)]
pub struct Buffers(Vec<Buffer>);

impl Buffers {
    /// A buffer; what is in it is what the last step left.
    pub fn take(&mut self) -> Result<Buffer, DriverError> {
        match self.0.pop() {
            Some(buffer) => Ok(buffer),
            None => Buffer::new(),
        }
    }

    /// The step is over, as the engine has seen.
    pub fn give_back(&mut self, buffer: Buffer) {
        self.0.push(buffer);
    }
}

impl Buffer {
    fn new() -> Result<Self, DriverError> {
        let (mut pinned, mut device) = (std::ptr::null_mut(), 0);
        // SAFETY: the places are valid; a context is current.
        unsafe {
            sys::cuMemHostAlloc(&mut pinned, BYTES, sys::CU_MEMHOSTALLOC_PORTABLE).result()?;
            if let Err(error) = sys::cuMemAlloc_v2(&mut device, BYTES).result() {
                let _ = sys::cuMemFreeHost(pinned);
                return Err(error);
            }
        }
        let pinned = NonNull::new(pinned.cast()).expect("the driver's memory has an address");
        Ok(Self { pinned, device })
    }

    /// The host's side. Not while the device uses it.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: so many bytes, and nobody else's on the host.
        unsafe { std::slice::from_raw_parts_mut(self.pinned.as_ptr(), BYTES) }
    }

    /// Enqueues a copy of the first bytes to the device.
    ///
    /// # Safety
    /// The stream lives; the buffer is left alone until the copy is done.
    pub unsafe fn send(&self, bytes: usize, stream: &DeviceStream) -> Result<(), DriverError> {
        let raw = stream.as_raw().cast();
        // SAFETY: both sides have so many bytes; the rest is the caller's.
        unsafe { sys::cuMemcpyHtoDAsync_v2(self.device, self.pinned.as_ptr().cast(), bytes, raw) }.result()
    }

    /// Enqueues a copy of bytes from `at` on to the host.
    ///
    /// # Safety
    /// As for [`send`](Self::send).
    pub unsafe fn fetch(&self, at: usize, bytes: usize, stream: &DeviceStream) -> Result<(), DriverError> {
        if bytes == 0 {
            return Ok(());
        }
        let raw = stream.as_raw().cast();
        // SAFETY: both sides have so many bytes; the rest is the caller's.
        unsafe {
            let to = self.pinned.as_ptr().add(at).cast();
            sys::cuMemcpyDtoHAsync_v2(to, self.device + at as u64, bytes, raw).result()
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated so. On a device that has failed both are freed with its error.
        unsafe {
            let _ = sys::cuMemFree_v2(self.device);
            let _ = sys::cuMemFreeHost(self.pinned.as_ptr().cast());
        }
    }
}

/// An event of the engine's, recorded once.
pub struct Mark(CUevent);

// SAFETY: an event may be used by any thread.
unsafe impl Send for Mark {}

impl Mark {
    /// Behind what was enqueued on the stream until now.
    pub fn behind(stream: &DeviceStream) -> Result<Self, DriverError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the place is valid, a context is current, and the stream lives.
        unsafe {
            sys::cuEventCreate(&mut raw, CUevent_flags::CU_EVENT_DISABLE_TIMING as u32).result()?;
            let mark = Self(raw);
            sys::cuEventRecord(raw, stream.as_raw().cast()).result()?;
            Ok(mark)
        }
    }

    /// Whether the device has come there.
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
        // SAFETY: the event lives, and is nobody else's.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

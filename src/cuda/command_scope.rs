//! Commands enqueued together, and the buffers that they use.
//!
//! ```text
//! on(stream) ── upload, download, launch ──> wait()           blocks until they are complete
//!                                       ├──> then(with, done) the watcher reports their end
//!                                       ├──> leave()           they use no buffer
//!                                       └──> dropped          after an error: waits
//! ```
//!
//! In every case, buffers return to their shelf only when the device has finished with them.

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{self, CUstream};

use crate::error::StorageError;
use crate::storage::CopyDone;

use super::device::Device;
use super::event::Event;
use super::kernels::Kernel;
use super::staging::{Pinned, Scratch};

/// Commands on one stream; see the [module](self).
pub(super) struct CommandScope<'a> {
    device: &'a Device,
    stream: CUstream,
    kept: Kept,
    mark: Option<Event>,
    /// True if commands were enqueued that have not been waited for.
    is_open: bool,
}

#[derive(Default)]
struct Kept {
    pinned: Vec<Pinned>,
    scratch: Vec<Scratch>,
}

impl<'a> CommandScope<'a> {
    /// Returns an empty scope.
    ///
    /// # Safety
    /// The stream lives as long as the command scope, and is of this device.
    pub(super) unsafe fn on(device: &'a Device, stream: CUstream) -> Self {
        Self { device, stream, kept: Kept::default(), mark: None, is_open: false }
    }

    /// Returns the address of scratch memory for these commands.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64, StorageError> {
        self.scratch_of(self.device, bytes)
    }

    /// Returns the address of scratch memory on another device.
    pub(super) fn scratch_of(&mut self, device: &Device, bytes: usize) -> Result<u64, StorageError> {
        let scratch = device.0.staging.scratch(bytes)?;
        let address = scratch.address();
        self.kept.scratch.push(scratch);
        Ok(address)
    }

    /// Copies bytes to scratch memory, where later commands can read them, and returns its address.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<u64, StorageError> {
        let address = self.scratch(bytes.len())?;
        // SAFETY: the scratch memory belongs to this command scope.
        unsafe { self.upload_to(address, bytes)? };
        Ok(address)
    }

    /// Copies bytes to an address of the device. They are read before the call returns.
    ///
    /// # Safety
    /// Until the command scope ends, no one else accesses the destination.
    pub(super) unsafe fn upload_to(&mut self, address: u64, bytes: &[u8]) -> Result<(), StorageError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut pinned = self.device.0.staging.pinned(bytes.len())?;
        pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the caller's promise; the buffer is kept.
        let sent = unsafe { self.send(address, &pinned, bytes.len()) };
        self.kept.pinned.push(pinned);
        sent
    }

    /// Copies the beginning of a pinned buffer to an address of the device.
    ///
    /// # Safety
    /// Until the command scope ends, no one else accesses the destination, and the buffer is
    /// neither written nor dropped.
    pub(super) unsafe fn send(&mut self, to: u64, from: &Pinned, bytes: usize) -> Result<(), StorageError> {
        let context = &self.device.0.context;
        let _entered = context.enter()?;
        self.is_open = true;
        // SAFETY: the buffer is at least that long; the rest is the caller's promise.
        let enqueued = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, self.stream) };
        context.check(enqueued, "copying to the device")
    }

    /// Copies bytes of the device to the beginning of a pinned buffer.
    ///
    /// # Safety
    /// Until the command scope ends, no one writes the source, and the buffer is not accessed.
    pub(super) unsafe fn fetch(&mut self, to: &Pinned, from: u64, bytes: usize) -> Result<(), StorageError> {
        let context = &self.device.0.context;
        let _entered = context.enter()?;
        self.is_open = true;
        // SAFETY: the buffer is at least that long; the rest is the caller's promise.
        let enqueued = unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_ptr().cast(), from, bytes, self.stream) };
        context.check(enqueued, "copying to the host")
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// As for [`Kernels::launch`](super::kernels::Kernels::launch).
    pub(super) unsafe fn launch<P: DeviceRepr>(
        &mut self,
        kernel: Kernel,
        grid: u32,
        params: &P,
    ) -> Result<(), StorageError> {
        self.is_open = true;
        // SAFETY: the caller's promise.
        unsafe { self.device.0.kernels.launch(kernel, grid, self.stream, params) }
    }

    /// Records an event behind the commands so far; `wait` does not wait for later ones.
    pub(super) fn mark(&mut self) -> Result<&Event, StorageError> {
        // SAFETY: the stream lives.
        let event = unsafe { Event::record(&self.device.0.context, self.stream)? };
        Ok(self.mark.insert(event))
    }

    /// Waits until the commands are complete.
    pub(super) fn wait(mut self) -> Result<(), StorageError> {
        if self.mark.is_none() && self.is_open {
            self.mark()?;
        }
        if let Some(mark) = &self.mark {
            mark.wait()?;
        }
        self.is_open = false;
        Ok(())
    }

    /// Ends the scope without waiting. The commands must not use any buffer of the scope.
    pub(super) fn leave(mut self) {
        debug_assert!(self.kept.pinned.is_empty() && self.kept.scratch.is_empty());
        self.is_open = false;
    }

    /// Calls `done` when the commands are complete, after dropping `with`.
    pub(super) fn then(mut self, with: impl Send + 'static, done: CopyDone) {
        let kept = std::mem::take(&mut self.kept);
        self.is_open = false;
        // SAFETY: the stream lives, and is of this device.
        unsafe { self.device.keep(self.stream, (kept, with), done) };
    }
}

impl Drop for CommandScope<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // After an error. On a lost device no command is running. SAFETY: the stream lives.
            let settled = unsafe { self.device.synchronise(self.stream) };
            if settled.is_err_and(|error| !error.is_lost()) {
                // A capture of this stream began just now. The end of the enqueued commands is
                // unknown, so their buffers are leaked.
                std::mem::forget(std::mem::take(&mut self.kept));
            }
        }
    }
}

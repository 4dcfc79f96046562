//! Commands that were enqueued together, and the buffers that they name.
//!
//! ```text
//! on(stream) ── upload, download, launch ──> wait()           the host sleeps until they are over
//!                                       ├──> then(with, done) the watcher says when
//!                                       ├──> leave()           no buffer was named
//!                                       └──> dropped          on the way out of an error: waits
//! ```
//!
//! However it ends, no buffer goes back to its shelf before the device is through with it.

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{self, CUstream};

use crate::error::StorageError;
use crate::storage::CopyDone;

use super::device::Device;
use super::event::Event;
use super::kernels::Kernel;
use super::staging::{Pinned, Scratch};

/// See the [module](self).
pub(super) struct CommandScope<'a> {
    device: &'a Device,
    stream: CUstream,
    kept: Kept,
    mark: Option<Event>,
    /// Something was enqueued that nobody waited for yet.
    is_open: bool,
}

#[derive(Default)]
struct Kept {
    pinned: Vec<Pinned>,
    scratch: Vec<Scratch>,
}

impl<'a> CommandScope<'a> {
    /// Nothing yet.
    ///
    /// # Safety
    /// The stream lives as long as the command scope, and is of this device.
    pub(super) unsafe fn on(device: &'a Device, stream: CUstream) -> Self {
        Self { device, stream, kept: Kept::default(), mark: None, is_open: false }
    }

    /// Scratch memory for these commands.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64, StorageError> {
        self.scratch_of(self.device, bytes)
    }

    /// The same on another device.
    pub(super) fn scratch_of(&mut self, device: &Device, bytes: usize) -> Result<u64, StorageError> {
        let scratch = device.0.staging.scratch(bytes)?;
        let address = scratch.address();
        self.kept.scratch.push(scratch);
        Ok(address)
    }

    /// These bytes in scratch memory, where the commands that follow find them.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<u64, StorageError> {
        let address = self.scratch(bytes.len())?;
        // SAFETY: the scratch memory is this command scope's.
        unsafe { self.upload_to(address, bytes)? };
        Ok(address)
    }

    /// These bytes at an address of the device. They are read now.
    ///
    /// # Safety
    /// So many bytes from there on are nobody else's until the command scope is over.
    pub(super) unsafe fn upload_to(&mut self, address: u64, bytes: &[u8]) -> Result<(), StorageError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut pinned = self.device.0.staging.pinned(bytes.len())?;
        pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the caller's; the buffer is kept.
        let sent = unsafe { self.send(address, &pinned, bytes.len()) };
        self.kept.pinned.push(pinned);
        sent
    }

    /// The beginning of a pinned buffer to an address of the device.
    ///
    /// # Safety
    /// So many bytes from there on are nobody else's until the command scope is over, and the buffer is neither written nor dropped.
    pub(super) unsafe fn send(&mut self, to: u64, from: &Pinned, bytes: usize) -> Result<(), StorageError> {
        let context = &self.device.0.context;
        let _entered = context.enter()?;
        self.is_open = true;
        // SAFETY: the buffer has so many bytes; the rest is the caller's.
        let enqueued = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), bytes, self.stream) };
        context.check(enqueued, "copying to the device")
    }

    /// Bytes of the device to the beginning of a pinned buffer.
    ///
    /// # Safety
    /// Nobody writes the bytes until the command scope is over, and the buffer is not touched.
    pub(super) unsafe fn fetch(&mut self, to: &Pinned, from: u64, bytes: usize) -> Result<(), StorageError> {
        let context = &self.device.0.context;
        let _entered = context.enter()?;
        self.is_open = true;
        // SAFETY: the buffer has so many bytes; the rest is the caller's.
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
        // SAFETY: the caller's.
        unsafe { self.device.0.kernels.launch(kernel, grid, self.stream, params) }
    }

    /// Puts a mark behind what was enqueued; what follows is not waited for.
    pub(super) fn mark(&mut self) -> Result<&Event, StorageError> {
        // SAFETY: the stream lives.
        let event = unsafe { Event::record(&self.device.0.context, self.stream)? };
        Ok(self.mark.insert(event))
    }

    /// Waits until all is over.
    pub(super) fn wait(mut self) -> Result<(), StorageError> {
        if cfg!(kvpool_mutant = "staging_early") {
            self.give_back();
        }
        if self.mark.is_none() && self.is_open {
            self.mark()?;
        }
        if let Some(mark) = &self.mark {
            mark.wait()?;
        }
        self.is_open = false;
        Ok(())
    }

    /// Planted: gives the buffers back while they are read.
    pub(super) fn give_back(&mut self) {
        self.kept = Kept::default();
    }

    /// Leaves it to itself: it names no buffer that would go back.
    pub(super) fn leave(mut self) {
        debug_assert!(self.kept.pinned.is_empty() && self.kept.scratch.is_empty());
        self.is_open = false;
    }

    /// Calls `done` when all is over, and drops `with` before.
    pub(super) fn then(mut self, with: impl Send + 'static, done: CopyDone) {
        if cfg!(kvpool_mutant = "staging_early") {
            self.give_back();
        }
        let kept = std::mem::take(&mut self.kept);
        self.is_open = false;
        // SAFETY: the stream lives, and is of this device.
        unsafe { self.device.keep(self.stream, (kept, with), done) };
    }
}

impl Drop for CommandScope<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // An error on the way. On a device that is lost nothing is under way.
            // SAFETY: the stream lives.
            let settled = unsafe { self.device.synchronise(self.stream) };
            if settled.is_err_and(|error| !error.is_lost()) {
                // Somebody began to capture just there. Nobody knows when what was enqueued will be over: its buffers are
                // nobody's any more.
                std::mem::forget(std::mem::take(&mut self.kept));
            }
        }
    }
}

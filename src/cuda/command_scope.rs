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
//!
//! Commands that access another device's memory may never end if that device fails. A scope
//! [beside](CommandScope::beside) another device therefore polls both devices instead of blocking
//! in the driver. If the other one is lost and the commands do not end within [`GRACE`], this device
//! is lost too; so it is if the other one refuses to tell for [`PATIENCE`].

use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::DeviceRepr;
use cudarc::driver::sys::{self, CUstream};

use crate::error::StorageError;
use crate::storage::CopyDone;
use crate::sync::sleep;

use super::device::Device;
use super::event::Event;
use super::host_rows::{Rows, Way};
use super::kernels::{Kernel, Shape};
use super::staging::{Pinned, Scratch};
use super::stream::is_idle;

/// Time within which commands must end after a device that they access was lost.
const GRACE: Duration = Duration::from_secs(1);

/// Time for which the driver may refuse to wait for commands, or another device to tell whether it
/// works while commands that access it do not end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest pause between two polls of a pair of devices.
const PAUSE_MAX: Duration = Duration::from_micros(500);

/// Commands on one stream; see the [module](self).
pub(super) struct CommandScope<'a> {
    device: &'a Device,
    stream: CUstream,
    kept: Kept,
    mark: Option<Arc<Event>>,
    /// True if commands were enqueued that have not been waited for.
    is_open: bool,
    /// Another device whose memory the commands access, and a stream of it.
    beside: Option<(&'a Device, CUstream)>,
}

#[derive(Default)]
struct Kept {
    pinned: Vec<Pinned>,
    scratch: Vec<Scratch>,
    /// Memory of another device that the commands access.
    borrowed: Vec<Scratch>,
}

impl<'a> CommandScope<'a> {
    /// Returns an empty scope.
    ///
    /// # Safety
    /// The stream lives as long as the command scope, and is of this device.
    pub(super) unsafe fn on(device: &'a Device, stream: CUstream) -> Self {
        Self { device, stream, kept: Kept::default(), mark: None, is_open: false, beside: None }
    }

    /// Makes the waits for these commands poll another device, too. Called once, before the first
    /// command.
    ///
    /// # Safety
    /// The stream lives as long as the command scope, and is of that device.
    pub(super) unsafe fn beside(&mut self, device: &'a Device, stream: CUstream) {
        self.device.0.context.begin_beside();
        self.beside = Some((device, stream));
    }

    /// Returns the address of scratch memory for these commands.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64, StorageError> {
        let scratch = self.device.0.staging.scratch(bytes)?;
        let address = scratch.address();
        self.kept.scratch.push(scratch);
        Ok(address)
    }

    /// Keeps scratch memory of another device, which these commands access, until they have ended.
    pub(super) fn borrow(&mut self, scratch: Scratch) {
        self.kept.borrowed.push(scratch);
    }

    /// Takes scratch memory of this scope's device, for its commands.
    pub(super) fn take(&mut self, scratch: impl IntoIterator<Item = Scratch>) {
        self.kept.scratch.extend(scratch);
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

    /// Copies rows between the device and page-locked memory of the host.
    ///
    /// # Safety
    /// The rows exist on both sides. Until the [end](Self::end) of the scope is known, no one writes
    /// the source or accesses the destination, and the host's pages stay locked.
    pub(super) unsafe fn copy_rows(&mut self, way: Way, rows: &Rows) -> Result<(), StorageError> {
        let context = &self.device.0.context;
        let _entered = context.enter()?;
        self.is_open = true;
        let Rows { device, host, width, height, .. } = *rows;
        let at = ptr::with_exposed_provenance_mut(host as usize);
        // SAFETY: the caller's promise; the struct is valid during the call.
        let enqueued = unsafe {
            match (rows.is_dense(), way) {
                (true, Way::Down) => sys::cuMemcpyDtoHAsync_v2(at, device, width * height, self.stream),
                (true, Way::Up) => sys::cuMemcpyHtoDAsync_v2(device, at, width * height, self.stream),
                (false, _) => sys::cuMemcpy2DAsync_v2(&rows.description(way), self.stream),
            }
        };
        context.check(enqueued, "copying between the device and the host")
    }

    /// Fills bytes of the device with zeroes.
    ///
    /// # Safety
    /// Until the command scope ends, no one else accesses them.
    pub(super) unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<(), StorageError> {
        let context = &self.device.0.context;
        let _entered = context.enter()?;
        self.is_open = true;
        // SAFETY: the caller's promise; the stream lives.
        context.check(unsafe { sys::cuMemsetD8Async(at, 0, bytes, self.stream) }, "zeroing frames")
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// As for [`Kernels::launch`](super::kernels::Kernels::launch).
    pub(super) unsafe fn launch<P: DeviceRepr>(
        &mut self,
        kernel: Kernel,
        ctas: u32,
        params: &P,
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_as(kernel, Shape::of(ctas), params) }
    }

    /// Launches a kernel with a shape of its own.
    ///
    /// # Safety
    /// As for [`launch`](Self::launch); the kernel allows the shape.
    pub(super) unsafe fn launch_as<P: DeviceRepr>(
        &mut self,
        kernel: Kernel,
        shape: Shape,
        params: &P,
    ) -> Result<(), StorageError> {
        self.is_open = true;
        // SAFETY: the caller's promise.
        unsafe { self.device.0.kernels.launch(kernel, shape, self.stream, params) }
    }

    /// Records an event behind the commands so far; `wait` does not wait for later ones.
    pub(super) fn mark(&mut self) -> Result<&Arc<Event>, StorageError> {
        // SAFETY: the stream lives.
        let event = unsafe { Event::record(&self.device.0.context, self.stream)? };
        Ok(self.mark.insert(Arc::new(event)))
    }

    /// Waits until the commands are complete.
    pub(super) fn wait(self) -> Result<(), StorageError> {
        self.wait_and_return().map(drop)
    }

    /// Does the same, and returns the [borrowed](Self::borrow) memory.
    pub(super) fn wait_and_return(mut self) -> Result<Vec<Scratch>, StorageError> {
        if self.mark.is_none() && self.is_open && self.mark().is_err() {
            // Without an event, for the stream.
            self.settle()?;
        }
        if let Some(mark) = &self.mark {
            self.wait_for(mark)?;
        }
        self.is_open = false;
        Ok(std::mem::take(&mut self.kept.borrowed))
    }

    /// Waits until the commands before the [mark](Self::mark), which are all, are complete.
    ///
    /// # Errors
    /// The scope must be [ended](Self::end).
    pub(super) fn wait_marked(&mut self) -> Result<(), StorageError> {
        if let Some(mark) = &self.mark {
            self.wait_for(mark)?;
            self.is_open = false;
        }
        Ok(())
    }

    fn wait_for(&self, mark: &Event) -> Result<(), StorageError> {
        let Some((other, stream)) = self.beside else { return mark.wait() };
        let (context, mut pause) = (&self.device.0.context, PAUSE_MAX / 16);
        let (mut lost_since, mut refused_since) = (None, None);
        loop {
            if mark.is_complete()? {
                return Ok(());
            }
            // SAFETY: by the promise in `beside`.
            let answer = unsafe { is_idle(&other.0.context, stream) };
            let (since, patience) = match &answer {
                Err(error) if error.is_lost() => (&mut lost_since, GRACE),
                _ => (&mut refused_since, PATIENCE),
            };
            match answer {
                Ok(_) => *since = None,
                Err(error) if since.get_or_insert_with(Instant::now).elapsed() >= patience => {
                    let reason = format!("its work waits for another device, which does not work: {error}");
                    return Err(context.lose_stuck(reason.into()));
                }
                Err(_) => {}
            }
            sleep(pause);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// Waits after an error, also in a destructor. On a lost device no command is running.
    fn settle(&mut self) -> Result<(), StorageError> {
        if self.beside.is_some() {
            // Without an event the stream's end cannot be polled: its buffers are leaked.
            self.mark()?;
            return self.mark.as_ref().map_or(Ok(()), |mark| self.wait_for(mark));
        }
        // SAFETY: the stream lives.
        unsafe { self.device.synchronise(self.stream) }
    }

    /// Ends the scope without waiting. The commands must not use any buffer of the scope.
    pub(super) fn leave(mut self) {
        debug_assert!(self.kept.pinned.is_empty() && self.kept.scratch.is_empty());
        self.is_open = false;
    }

    /// Calls `done` when the commands are complete, after dropping `with`. No command may have been
    /// enqueued since the last [`mark`](Self::mark).
    pub(super) fn then(mut self, with: impl Send + 'static, done: CopyDone) {
        let kept = std::mem::take(&mut self.kept);
        self.is_open = false;
        // SAFETY: the stream lives, and is of this device.
        unsafe { self.device.keep(self.stream, self.mark.take(), (kept, with), done) };
    }

    /// Waits until the commands are complete, or the device runs nothing any more.
    ///
    /// # Errors
    /// If neither is certain. The commands may access memory at any time; the scope's buffers are
    /// leaked.
    pub(super) fn end(mut self) -> Result<(), StorageError> {
        if !self.is_open {
            return Ok(());
        }
        let since = Instant::now();
        let settled = loop {
            match self.settle() {
                // A capture interferes, which may end.
                Err(error) if !error.is_lost() && since.elapsed() < PATIENCE => sleep(PAUSE_MAX),
                settled => break settled,
            }
        };
        self.is_open = false;
        match settled {
            Err(error) if !error.is_lost() || self.device.0.context.is_stuck() => {
                std::mem::forget(std::mem::take(&mut self.kept));
                Err(error)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for CommandScope<'_> {
    fn drop(&mut self) {
        let is_unended = |error: StorageError| !error.is_lost() || self.device.0.context.is_stuck();
        if self.is_open && self.settle().is_err_and(is_unended) {
            // A capture of this stream began just now, or the device is stuck. The end of the
            // enqueued commands is unknown, so their buffers are leaked.
            std::mem::forget(std::mem::take(&mut self.kept));
        }
        if self.beside.is_some() {
            self.device.0.context.end_beside();
        }
    }
}

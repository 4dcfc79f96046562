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
//! in the driver, and belongs to a [flight](super::gate). If the other one is lost and the commands
//! do not end within [`GRACE`], this device is lost too; so it is if the other one refuses to tell
//! for [`PATIENCE`].

use std::ptr;
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUresult, CUstream};

use kvpool::StorageError;
use kvpool::storage::CopyDone;

use super::device::Device;
use super::event::Event;
use super::gate::Unended;
use super::host_rows::Rows;
use super::launch::{Params, Work};
use super::params::Way;
use super::staging::{BYTES_MAX, LotBuffers, Pinned, Scratch};
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
    kept: Buffers,
    mark: Option<Arc<Event>>,
    /// True if commands were enqueued that have not been waited for.
    is_open: bool,
    /// Another device whose memory the commands access, and a stream of it.
    beside: Option<(&'a Device, CUstream)>,
}

/// Buffers of a scope, which returns them when its commands are complete.
#[derive(Default)]
pub(super) struct Buffers {
    pinned: Vec<Pinned>,
    scratch: Vec<Scratch>,
    /// In the order in which the scope got them.
    pub(super) lots: Vec<LotBuffers>,
}

/// A pinned buffer of a scope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PinnedAt(usize);

impl Buffers {
    /// Returns the bytes of a pinned buffer.
    pub(super) fn bytes_mut(&mut self, at: PinnedAt) -> &mut [u8] {
        self.pinned[at.0].bytes_mut()
    }
}

impl<'a> CommandScope<'a> {
    /// Returns an empty scope.
    ///
    /// # Safety
    /// The stream lives as long as the command scope, and is of this device.
    pub(super) unsafe fn on(device: &'a Device, stream: CUstream) -> Self {
        Self { device, stream, kept: Buffers::default(), mark: None, is_open: false, beside: None }
    }

    /// Makes the waits for these commands poll another device, too. Called once, before the first
    /// command, in a flight that ends after the scope.
    ///
    /// # Safety
    /// The stream lives as long as the command scope, and is of that device.
    pub(super) unsafe fn beside(&mut self, device: &'a Device, stream: CUstream) {
        self.beside = Some((device, stream));
    }

    /// Returns the address of scratch memory for these commands.
    pub(super) fn scratch(&mut self, bytes: usize) -> Result<u64, StorageError> {
        let scratch = self.device.0.staging.scratch(bytes)?;
        let address = scratch.address();
        self.kept.scratch.push(scratch);
        Ok(address)
    }

    /// Takes pinned memory, for these commands: the device may access it until the scope has ended,
    /// which may never be known.
    pub(super) fn keep(&mut self, pinned: Pinned) -> PinnedAt {
        self.kept.pinned.push(pinned);
        PinnedAt(self.kept.pinned.len() - 1)
    }

    /// Takes the buffers of a lot, of this device or of another one that these commands access.
    pub(super) fn hold(&mut self, lot: LotBuffers) {
        self.kept.lots.push(lot);
    }

    /// Copies a list of frames to the buffers of a [lot](Self::hold), by their index. Returns its
    /// address. They are read before the call returns.
    pub(super) fn list(&mut self, lot: usize, bytes: &[u8]) -> Result<u64, StorageError> {
        let buffers = &mut self.kept.lots[lot];
        buffers.pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let (to, from) = (buffers.list.address(), buffers.pinned.as_ptr());
        // SAFETY: both buffers are this scope's, and long enough.
        unsafe { self.copy(Way::In, to, from, bytes.len())? };
        Ok(to)
    }

    /// Copies bytes to scratch memory, where later commands can read them, and returns its address.
    pub(super) fn upload(&mut self, bytes: &[u8]) -> Result<u64, StorageError> {
        let address = self.scratch(bytes.len())?;
        // SAFETY: the scratch memory belongs to this command scope.
        unsafe { self.upload_to(address, bytes)? };
        Ok(address)
    }

    /// Copies bytes to an address of the device, by as many buffers as necessary. They are read
    /// before the call returns.
    ///
    /// # Safety
    /// Until the command scope ends, no one else accesses the destination.
    pub(super) unsafe fn upload_to(&mut self, address: u64, bytes: &[u8]) -> Result<(), StorageError> {
        for (part, at) in bytes.chunks(BYTES_MAX).zip((address..).step_by(BYTES_MAX)) {
            let mut pinned = self.device.0.staging.pinned(part.len())?;
            pinned.bytes_mut()[..part.len()].copy_from_slice(part);
            let pinned = self.keep(pinned);
            // SAFETY: the caller's promise.
            unsafe { self.send(at, pinned, part.len())? };
        }
        Ok(())
    }

    /// Copies the beginning of a pinned buffer to an address of the device.
    ///
    /// # Safety
    /// Until the command scope ends, no one else accesses the destination.
    pub(super) unsafe fn send(&mut self, to: u64, from: PinnedAt, bytes: usize) -> Result<(), StorageError> {
        let from = self.kept.pinned[from.0].as_ptr();
        // SAFETY: the buffer is this scope's, and at least that long; the rest is the caller's promise.
        unsafe { self.copy(Way::In, to, from, bytes) }
    }

    /// Copies bytes of the device to the beginning of a pinned buffer.
    ///
    /// # Safety
    /// Until the command scope ends, no one writes the source.
    pub(super) unsafe fn fetch(&mut self, to: PinnedAt, from: u64, bytes: usize) -> Result<(), StorageError> {
        let to = self.kept.pinned[to.0].as_ptr();
        // SAFETY: as above.
        unsafe { self.copy(Way::Out, from, to, bytes) }
    }

    /// Copies bytes between the device and page-locked memory of the host.
    ///
    /// # Safety
    /// As for [`copy_rows`](Self::copy_rows).
    unsafe fn copy(&mut self, way: Way, at: u64, host: *mut u8, bytes: usize) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        self.enqueue("copying between the device and the host", |stream| unsafe {
            match way {
                Way::Out => sys::cuMemcpyDtoHAsync_v2(host.cast(), at, bytes, stream),
                Way::In => sys::cuMemcpyHtoDAsync_v2(at, host.cast(), bytes, stream),
            }
        })
    }

    /// Copies rows between the device and page-locked memory of the host.
    ///
    /// # Safety
    /// The rows exist on both sides. Until the [end](Self::end) of the scope is known, no one writes
    /// the source or accesses the destination, and the host's pages stay locked.
    pub(super) unsafe fn copy_rows(&mut self, way: Way, rows: &Rows) -> Result<(), StorageError> {
        if rows.is_dense() {
            let host = ptr::with_exposed_provenance_mut(rows.host as usize);
            // SAFETY: the caller's promise.
            return unsafe { self.copy(way, rows.device, host, rows.width * rows.height) };
        }
        // SAFETY: the caller's promise; the struct is valid during the call.
        self.enqueue("copying between the device and the host", |stream| unsafe {
            sys::cuMemcpy2DAsync_v2(&rows.description(way), stream)
        })
    }

    /// Fills bytes of the device with zeroes.
    ///
    /// # Safety
    /// Until the command scope ends, no one else accesses them.
    pub(super) unsafe fn zero(&mut self, at: u64, bytes: usize) -> Result<(), StorageError> {
        // SAFETY: the caller's promise; the stream lives.
        self.enqueue("zeroing frames", |stream| unsafe { sys::cuMemsetD8Async(at, 0, bytes, stream) })
    }

    fn enqueue(
        &mut self,
        doing: &'static str,
        command: impl FnOnce(CUstream) -> CUresult,
    ) -> Result<(), StorageError> {
        let context = &self.device.0.context;
        let _entered = context.enter()?;
        self.is_open = true;
        context.check(command(self.stream), doing)
    }

    /// Launches the kernel for some work.
    ///
    /// # Safety
    /// As for [`Kernels::launch`](super::kernels::Kernels::launch).
    pub(super) unsafe fn launch<P: Params>(&mut self, work: Work, params: &P) -> Result<(), StorageError> {
        self.is_open = true;
        // SAFETY: the caller's promise.
        unsafe { self.device.0.kernels.launch(self.stream, work, params) }
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

    /// Does the same, and returns the buffers.
    pub(super) fn wait_and_return(mut self) -> Result<Buffers, StorageError> {
        if self.mark.is_none() && self.is_open && self.mark().is_err() {
            // Without an event, for the stream.
            self.settle()?;
        }
        if let Some(mark) = &self.mark {
            self.wait_for(mark)?;
        }
        self.is_open = false;
        Ok(std::mem::take(&mut self.kept))
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
            let since = Instant::now();
            // Without an event the end of its commands cannot be polled.
            while let Err(error) = self.mark() {
                if error.is_lost() {
                    return Err(error);
                }
                if since.elapsed() >= PATIENCE {
                    let reason = format!("the end of a copy to another device cannot be detected: {error}");
                    return Err(self.device.0.context.lose_stuck(reason.into()));
                }
                sleep(PAUSE_MAX);
            }
            return self.mark.as_ref().map_or(Ok(()), |mark| self.wait_for(mark));
        }
        // SAFETY: the stream lives.
        unsafe { self.device.synchronise(self.stream) }
    }

    /// Ends the scope without waiting. The commands must not use any buffer of the scope.
    pub(super) fn leave(mut self) {
        debug_assert!(
            self.kept.pinned.is_empty() && self.kept.scratch.is_empty() && self.kept.lots.is_empty()
        );
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
        self.end_within(PATIENCE)
    }

    fn end_within(&mut self, patience: Duration) -> Result<(), StorageError> {
        if !self.is_open {
            return Ok(());
        }
        let since = Instant::now();
        let settled = loop {
            match self.settle() {
                // A capture interferes, which may end.
                Err(error) if !error.is_lost() && since.elapsed() < patience => sleep(PAUSE_MAX),
                settled => break settled,
            }
        };
        self.is_open = false;
        match settled {
            Err(error) if !error.is_lost() || self.device.0.context.is_stuck() => {
                // The end of the commands is not known.
                std::mem::forget(std::mem::take(&mut self.kept));
                self.device.0.context.gate.leave(self.mark.take().map(|event| event as Arc<dyn Unended>));
                Err(error)
            }
            _ => Ok(()),
        }
    }
}

impl Drop for CommandScope<'_> {
    fn drop(&mut self) {
        // If a capture of this stream began just now, or the device is stuck, the buffers are
        // leaked.
        let _ = self.end_within(Duration::ZERO);
    }
}

//! An open device: its context, kernels, buffers, and the thread that watches it.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute_enum as Attribute, CUstream};

use kvpool::DeviceId;
use kvpool::StorageError;
use kvpool::storage::{CopyDone, DeviceStream};

use super::context::Context;
use super::driver::{self, DeviceInfo};
use super::error::CudaError;
use super::event::Event;
use super::kernels::Kernels;
use super::launch::Choices;
use super::staging::Staging;
use super::stream::{Stream, StreamPriority, is_capturing};
use super::watch::Watch;

/// The handle `CU_STREAM_PER_THREAD`, which means each calling thread's own default stream.
const PER_THREAD: usize = 2;

/// A usable CUDA device.
///
/// Clones refer to the same device and cost nothing; each [`open`](Self::open) starts a thread that
/// watches the device.
#[derive(Clone)]
pub struct Device(pub(super) Arc<Opened>);

pub(super) struct Opened {
    pub(super) context: Arc<Context>,
    pub(super) kernels: Kernels,
    pub(super) staging: Arc<Staging>,
    pub(super) watch: Watch,
    pub(super) info: DeviceInfo,
    /// Whether kernels may access locked pages of the host at the host's addresses.
    pub(super) reaches_pages: bool,
}

impl Device {
    /// Opens a device by ordinal and loads the kernels.
    ///
    /// Retains its primary context, which other code of this process shares.
    ///
    /// # Errors
    ///
    /// A [`CudaError`] with the reason why the device cannot be used.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        Self::open_with(ordinal, Choices::DEFAULT)
    }

    /// Opens a device for pools with other choices.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn open_with(ordinal: usize, choices: Choices) -> Result<Self, CudaError> {
        let (raw, info) = driver::device(ordinal)?;
        let context = Arc::new(Context::new(info.ordinal, raw)?);
        let kernels = Kernels::load(context.clone(), &info, choices).map_err(CudaError::of)?;
        context.create_events().map_err(CudaError::of)?;
        let staging = Staging::new(context.clone());
        staging.fill();
        let watch = Watch::start(context.clone())?;
        let at_their_addresses = Attribute::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM;
        let reaches_pages = driver::attribute(raw, at_their_addresses).is_ok_and(|is| is != 0);
        Ok(Self(Arc::new(Opened { context, kernels, staging, watch, info, reaches_pages })))
    }

    /// Returns the driver's description of the device.
    pub fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Returns the loaded kernels, which pools launch, and measurements.
    pub fn kernels(&self) -> &Kernels {
        &self.0.kernels
    }

    /// Returns the device's id for pools.
    pub fn id(&self) -> DeviceId {
        self.0.context.id
    }

    /// Returns the device's free and total memory in bytes.
    ///
    /// # Errors
    ///
    /// [`StorageError::DeviceLost`], [`StorageError::Device`].
    pub fn memory_bytes(&self) -> Result<(u64, u64), StorageError> {
        self.0.context.memory()
    }

    /// Returns an error if the device is lost; see [`StorageError::DeviceLost`].
    ///
    /// # Errors
    ///
    /// [`StorageError::DeviceLost`].
    pub fn good(&self) -> Result<(), StorageError> {
        self.0.context.good()
    }

    /// Creates a stream.
    ///
    /// # Errors
    ///
    /// [`StorageError::DeviceLost`], [`StorageError::Device`].
    pub fn stream(&self) -> Result<DeviceStream, StorageError> {
        self.stream_with_priority(StreamPriority::Usual)
    }

    /// Creates a stream with a priority.
    ///
    /// # Errors
    ///
    /// [`StorageError::DeviceLost`], [`StorageError::Device`].
    pub fn stream_with_priority(&self, priority: StreamPriority) -> Result<DeviceStream, StorageError> {
        let stream = Stream::new(self.0.context.clone(), priority)?;
        // SAFETY: a stream of this device, which lives as long as its owner.
        Ok(unsafe { DeviceStream::from_raw(self.id(), stream.raw().cast(), stream) })
    }

    /// Implements [`Storage::check_stream`](kvpool::storage::Storage::check_stream).
    pub(super) fn check_stream(
        &self,
        stream: &DeviceStream,
        doing: &'static str,
    ) -> Result<(), StorageError> {
        let _entered = self.0.context.enter()?;
        self.check_own(stream)?;
        if self.is_capturing(stream)? {
            return Err(StorageError::Capturing { device: self.id(), doing });
        }
        Ok(())
    }

    /// Checks that this is a stream of this device's primary context.
    pub(super) fn check_own(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.foreign(stream)?.map_or(Ok(()), Err)
    }

    /// Returns an error value if this is not a stream of this device's primary context. An error
    /// result says nothing about the stream.
    fn foreign(&self, stream: &DeviceStream) -> Result<Option<StorageError>, StorageError> {
        if stream.device() != self.id() {
            let (stream, storage) = (stream.device(), self.id());
            return Ok(Some(StorageError::ForeignStream { stream, storage }));
        }
        let unfit = |reason: &str| {
            let (device, reason) = (self.id(), reason.into());
            Ok(Some(StorageError::Device { device, doing: "using a stream", reason }))
        };
        // Batches end on arbitrary threads, including the watcher's: there, the handle would mean
        // another stream.
        if stream.as_raw().addr() == PER_THREAD {
            return unfit("the per-thread default stream differs between threads");
        }
        let context = &self.0.context;
        let _entered = context.enter()?;
        let mut inner = std::ptr::null_mut();
        // SAFETY: the pointer is valid, and the stream lives by the contract of `DeviceStream`.
        let asked = unsafe { sys::cuStreamGetCtx(raw(stream), &mut inner) };
        context.check(asked, "reading a stream's context")?;
        if inner == context.raw {
            Ok(None)
        } else {
            unfit("it does not belong to the device's primary context")
        }
    }

    fn is_capturing(&self, stream: &DeviceStream) -> Result<bool, StorageError> {
        // SAFETY: as in `foreign`, which has found that the stream is of this context.
        unsafe { is_capturing(&self.0.context, raw(stream)) }
    }

    /// Implements [`Storage::after`](kvpool::storage::Storage::after).
    pub(super) fn after(&self, stream: &DeviceStream, done: CopyDone) {
        match self.marked(stream) {
            Ok(Ok(Some(event))) => self.0.watch.watch(Arc::new(event), stream.clone(), done),
            Ok(Err(foreign)) => done(Err(foreign)),
            Err(error) if error.is_lost() => done(Err(error)),
            // The stream is being captured, or the driver refuses for now. Its work continues
            // nevertheless, and its end must not be reported early: the watcher records an event as
            // soon as it can.
            Ok(Ok(None)) | Err(_) => self.0.watch.watch_captured(stream.clone(), done),
        }
    }

    /// Records an event behind the work enqueued on the stream so far. Returns `None` if the stream
    /// is being captured, or an inner error if it is not a stream of this device.
    fn marked(&self, stream: &DeviceStream) -> Result<Result<Option<Event>, StorageError>, StorageError> {
        let _entered = self.0.context.enter()?;
        if let Some(foreign) = self.foreign(stream)? {
            return Ok(Err(foreign));
        }
        if self.is_capturing(stream)? {
            return Ok(Ok(None));
        }
        // SAFETY: the stream lives, and was found to be of this device.
        let event = unsafe { Event::record(&self.0.context, raw(stream))? };
        // If a capture has begun meanwhile, the event is part of that graph; a stream that waited
        // for it would be captured, too.
        Ok(Ok((!self.is_capturing(stream)?).then_some(event)))
    }

    /// Implements [`Storage::settle`](kvpool::storage::Storage::settle).
    pub(super) fn settle(&self, stream: &DeviceStream) -> Result<(), StorageError> {
        self.check_stream(stream, "waiting for the stream")?;
        // SAFETY: the stream lives, and was found to be of this device.
        unsafe { self.synchronise(raw(stream)) }
    }

    /// Keeps a value until the work enqueued on the stream so far is complete: up to `mark`, if
    /// given.
    ///
    /// # Safety
    /// The stream lives, and is of this device.
    pub(super) unsafe fn keep(
        &self,
        stream: CUstream,
        mark: Option<Arc<Event>>,
        kept: impl Send + 'static,
        done: CopyDone,
    ) {
        let mark = match mark {
            Some(mark) => Ok(mark),
            // SAFETY: the caller's promise.
            None => unsafe { Event::record(&self.0.context, stream) }.map(Arc::new),
        };
        match mark {
            Ok(event) => self.0.watch.watch_own(
                event,
                Box::new(move |outcome| {
                    drop(kept);
                    done(outcome);
                }),
            ),
            Err(error) => {
                // Without an event, wait. SAFETY: the caller's promise.
                let settled = unsafe { self.synchronise(stream) };
                if settled.as_ref().is_err_and(|error| !error.is_lost()) {
                    // The end of the work is unknown: leak the value.
                    std::mem::forget(kept);
                    return done(Err(error));
                }
                drop(kept);
                // Without an error, the work is complete.
                done(settled);
            }
        }
    }

    /// Waits until the work enqueued on the stream so far is complete, or the device is lost.
    ///
    /// # Safety
    /// The stream lives, and is of this device.
    pub(super) unsafe fn synchronise(&self, stream: CUstream) -> Result<(), StorageError> {
        let _entered = self.0.context.enter()?;
        // SAFETY: the caller's promise.
        self.0.context.check_or_lose(unsafe { sys::cuStreamSynchronize(stream) })
    }
}

/// Returns the driver's handle.
pub(super) fn raw(stream: &DeviceStream) -> CUstream {
    stream.as_raw().cast()
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceInfo { name, capability, .. } = &self.0.info;
        write!(f, "{} ({name}, compute capability {capability})", self.id())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_there_is_an_error_and_no_panic() {
        match driver::devices() {
            Err(CudaError::NoDriver { reason }) => {
                assert!(reason.contains("cuda"), "the reason names the file: {reason}");
                assert_eq!(Device::open(0).unwrap_err(), CudaError::NoDriver { reason });
            }
            // With devices present, the ordinal beyond the last one is missing.
            Ok(devices) => {
                let count = devices.len();
                assert_eq!(Device::open(count).unwrap_err(), CudaError::NoDevice { ordinal: count, count });
            }
            Err(other) => println!("the driver cannot be used: {other}"),
        }
    }
}

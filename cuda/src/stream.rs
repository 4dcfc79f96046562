//! The backend's own streams, on each of which the device executes work in order.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult, CUstream, CUstream_flags, CUstreamCaptureStatus};

use kvpool::StorageError;

use super::context::Context;

/// Scheduling priority of a stream's work relative to other streams.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum StreamPriority {
    /// The default priority of streams. CUDA has higher priorities than this, but no lower ones.
    #[default]
    Usual,
    /// Higher than all others.
    Highest,
    /// The lowest priority of the device, which is the default one: streams of higher priority come
    /// first.
    Lowest,
}

/// A stream created here. It is not synchronised with other streams, including the default one.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: CUstream,
}

// SAFETY: any thread can use a stream, and several can at once.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: Arc<Context>, priority: StreamPriority) -> Result<Self, StorageError> {
        let raw = {
            let _pass = context.pass()?;
            let _entered = context.enter()?;
            let (mut lowest, mut highest) = (0, 0);
            let mut raw = std::ptr::null_mut();
            let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the pointers are valid and the context is current.
            unsafe {
                let asked = sys::cuCtxGetStreamPriorityRange(&mut lowest, &mut highest);
                context.check(asked, "reading the range of stream priorities")?;
                let priority = match priority {
                    // The driver's own default, which it clamps to the available range.
                    StreamPriority::Usual => 0,
                    StreamPriority::Highest => highest,
                    StreamPriority::Lowest => lowest,
                };
                let made = sys::cuStreamCreateWithPriority(&mut raw, flags, priority);
                context.check(made, "creating a stream")?;
            }
            raw
        };
        Ok(Self { context, raw })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until the work enqueued so far is complete.
    pub(super) fn synchronise(&self) -> Result<(), StorageError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream lives.
        self.context.check_or_lose(unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _entered = self.context.enter_even_if_lost();
        // SAFETY: no one else has the stream any more. Work in it is completed nevertheless.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// Returns true if the stream is being captured, so that work enqueued on it becomes part of a
/// graph.
///
/// # Safety
/// The stream lives, and is one of this context.
pub(super) unsafe fn is_capturing(context: &Context, stream: CUstream) -> Result<bool, StorageError> {
    let _entered = context.enter()?;
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the pointer is valid, and the stream lives by the caller's promise.
    let asked = unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
    if asked == CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
        // The legacy stream, while a blocking stream of the context is being captured.
        return Ok(true);
    }
    context.check(asked, "reading the capture status of a stream")?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Returns true if all work of the stream is complete.
///
/// # Safety
/// The stream lives, and is one of this context.
pub(super) unsafe fn is_idle(context: &Context, stream: CUstream) -> Result<bool, StorageError> {
    let _entered = context.enter()?;
    // SAFETY: the stream lives by the caller's promise.
    match unsafe { sys::cuStreamQuery(stream) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        answer => context.check(answer, "querying a stream").map(|()| true),
    }
}

//! Queues of work that are made here: the device runs what is in one of them in order.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUstream, CUstream_flags, CUstreamCaptureStatus};

use crate::error::StorageError;

use super::context::Context;

/// How soon a stream's work is begun where several streams have some.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum StreamPriority {
    /// As streams are made unless told otherwise. CUDA knows priorities above this one and none below.
    #[default]
    Usual,
    /// Before all others.
    Highest,
    /// The lowest that the device has, which is that of usual streams: the work of those that are higher comes first.
    Lowest,
}

/// A stream of ours. It waits for no other stream, the default one included.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: CUstream,
}

// SAFETY: a stream may be used by any thread, and by several at once.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    pub(super) fn new(context: Arc<Context>, priority: StreamPriority) -> Result<Self, StorageError> {
        let raw = {
            let _entered = context.enter()?;
            let (mut lowest, mut highest) = (0, 0);
            let mut raw = std::ptr::null_mut();
            let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the places are valid and the context is current.
            unsafe {
                let asked = sys::cuCtxGetStreamPriorityRange(&mut lowest, &mut highest);
                context.check(asked, "asking for priorities of streams")?;
                let priority = match priority {
                    // The driver's own default, which it clamps to what there is.
                    StreamPriority::Usual => 0,
                    StreamPriority::Highest => highest,
                    StreamPriority::Lowest => lowest,
                };
                let made = sys::cuStreamCreateWithPriority(&mut raw, flags, priority);
                context.check(made, "making a stream")?;
            }
            raw
        };
        Ok(Self { context, raw })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until all is over that was enqueued until now.
    pub(super) fn synchronise(&self) -> Result<(), StorageError> {
        let _entered = self.context.enter()?;
        // SAFETY: the stream lives.
        self.context.check_or_lose(unsafe { sys::cuStreamSynchronize(self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _entered = self.context.enter_anyhow();
        // SAFETY: nobody else has the stream any more. Work that is in it is done all the same.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
    }
}

/// Whether what is enqueued on the stream becomes part of a graph.
///
/// # Safety
/// The stream lives, and is one of this context.
pub(super) unsafe fn is_capturing(context: &Context, stream: CUstream) -> Result<bool, StorageError> {
    let _entered = context.enter()?;
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the place is valid, and the stream lives, says the caller.
    let asked = unsafe { sys::cuStreamIsCapturing(stream, &mut status) };
    context.check(asked, "asking whether a stream is being captured")?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

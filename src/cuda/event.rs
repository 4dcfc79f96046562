//! Marks in streams: whether the device has come there.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult, CUstream};

use crate::error::StorageError;

use super::context::Context;

/// A mark that was put into a stream once.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: an event may be used by any thread, and by several at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Puts a mark behind what was enqueued on the stream until now.
    ///
    /// Not in a stream that is being captured: there it would become part of the graph, and never be reached.
    ///
    /// # Safety
    /// The stream lives, and is one of this context.
    pub(super) unsafe fn record(context: &Arc<Context>, stream: CUstream) -> Result<Self, StorageError> {
        let _entered = context.enter()?;
        let mut raw = std::ptr::null_mut();
        // Who waits for it sleeps: a thread that spins is one less for the engine.
        let flags =
            CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 | CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        // SAFETY: the place is valid and the context is current.
        context.check(unsafe { sys::cuEventCreate(&mut raw, flags) }, "making an event")?;
        let event = Self { context: context.clone(), raw };
        // SAFETY: the event lives, and so does the stream, says the caller.
        context.check(unsafe { sys::cuEventRecord(raw, stream) }, "recording an event")?;
        Ok(event)
    }

    /// Whether the device has come there. An error says that it never will.
    pub(super) fn is_complete(&self) -> Result<bool, StorageError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => self.context.check_or_lose(answer).map(|()| true),
        }
    }

    /// Waits until the device has come there. An error says that it never will.
    pub(super) fn wait(&self) -> Result<(), StorageError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives.
        self.context.check_or_lose(unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// What is enqueued on `stream`, of `context`, from now on runs once the device has come there.
    ///
    /// # Safety
    /// The stream lives, and is one of that context.
    pub(super) unsafe fn hold_back(&self, context: &Context, stream: CUstream) -> Result<(), StorageError> {
        let _entered = context.enter()?;
        // SAFETY: both live, says the caller of the stream.
        context.check(unsafe { sys::cuStreamWaitEvent(stream, self.raw, 0) }, "waiting for another stream")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _entered = self.context.enter_anyhow();
        // SAFETY: nobody else has the event any more; a stream that waits for it is not disturbed.
        let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
    }
}

//! Events: positions in streams whose completion can be queried.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUresult, CUstream};

use kvpool::StorageError;

use super::context::Context;
use super::gate::Unended;

/// An event that has been recorded once.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: any thread can use an event, and several can at once.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Records an event behind the work enqueued on the stream so far.
    ///
    /// The stream must not be capturing: the event would become part of the graph, and never
    /// complete.
    ///
    /// # Safety
    /// The stream lives, and is one of this context.
    pub(super) unsafe fn record(context: &Arc<Context>, stream: CUstream) -> Result<Self, StorageError> {
        let _entered = context.enter()?;
        let raw = context.take_event()?;
        let event = Self { context: context.clone(), raw };
        // SAFETY: the event lives, and so does the stream by the caller's promise.
        context.check(unsafe { sys::cuEventRecord(raw, stream) }, "recording an event")?;
        Ok(event)
    }

    /// Returns true if the device has reached the event. An error means that it never will.
    pub(super) fn is_complete(&self) -> Result<bool, StorageError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            answer => self.context.check_or_lose(answer).map(|()| true),
        }
    }

    /// Waits until the device has reached the event. An error means that it never will.
    pub(super) fn wait(&self) -> Result<(), StorageError> {
        let _entered = self.context.enter()?;
        // SAFETY: the event lives.
        self.context.check_or_lose(unsafe { sys::cuEventSynchronize(self.raw) })
    }

    /// Makes later work on `stream`, of `context`, wait for this event.
    ///
    /// # Safety
    /// The stream lives, and is one of that context.
    pub(super) unsafe fn hold_back(&self, context: &Context, stream: CUstream) -> Result<(), StorageError> {
        let _entered = context.enter()?;
        // SAFETY: the event lives, and so does the stream by the caller's promise.
        context
            .check(unsafe { sys::cuStreamWaitEvent(stream, self.raw, 0) }, "making a stream wait for another")
    }
}

impl Unended for Event {
    fn has_ended(&self) -> bool {
        let _entered = self.context.enter_even_if_lost();
        // SAFETY: the event lives.
        unsafe { sys::cuEventQuery(self.raw) == CUresult::CUDA_SUCCESS }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.context.put_event(self.raw);
    }
}

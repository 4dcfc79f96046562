//! Somebody else's graph that is being captured is left alone.
//!
//! While any thread captures a graph in the global mode, which is the usual one, calls that could wait for the
//! device (to allocate, to query an event) are refused to *every* thread, and break the capture. A thread whose own mode
//! is relaxed is exempt: what it does has nothing to do with the capture, it says. For the calls made here that is so: they name
//! streams of their own, and streams of an engine only after it was asked whether these are being captured.
//!
//! One call waits for the whole context, captures included, and breaks one in any mode: to drop a storage whose memory was mapped here.
//! An engine drops none of these while it captures, as it frees no memory then.

use cudarc::driver::sys::{self, CUstreamCaptureMode};

/// The calling thread's capture mode is relaxed until this is dropped.
#[derive(Debug)]
#[must_use = "the mode is put back when it is dropped"]
pub(super) struct Relaxed {
    before: CUstreamCaptureMode,
}

impl Relaxed {
    /// Relaxes this thread's mode. The driver was started.
    pub(super) fn enter() -> Self {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the place is valid. It fails for none but an impossible mode, and leaves the mode as it is then.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut mode) };
        Self { before: mode }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&mut self.before) };
    }
}

//! Isolation from graphs that other code is capturing.
//!
//! While any thread captures a graph in the global mode, which is the usual one, calls that could
//! wait for the device (allocations, event queries) are refused on *every* thread, and invalidate
//! the capture. A thread in relaxed mode is exempt, because it declares that its calls are
//! unrelated to the capture. This is true for the calls made here: they use this backend's own
//! streams, and an engine's streams only after checking that they are not being captured.
//!
//! One operation waits for the whole context, including captures, and invalidates a capture in any
//! mode: dropping a storage whose memory was mapped here. An engine does not drop such a storage
//! while it captures, just as it frees no memory then.

use cudarc::driver::sys::{self, CUstreamCaptureMode};

/// Keeps the calling thread's capture mode relaxed until it is dropped.
#[derive(Debug)]
#[must_use = "dropping it restores the mode"]
pub(super) struct Relaxed {
    before: CUstreamCaptureMode,
}

impl Relaxed {
    /// Relaxes this thread's mode. The driver must have been started.
    pub(super) fn enter() -> Self {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid. The call fails only for an invalid mode, and then leaves
        // the mode unchanged.
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

//! Configuration of a storage on a device.

use super::launch::MOVING_CTAS;

/// Configuration of a storage on a device.
#[derive(Clone, Debug)]
#[must_use]
pub struct CudaConfig {
    pub(super) segment_frames: Option<usize>,
    pub(super) moving_ctas: u32,
    pub(super) host_bytes_max: usize,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self { segment_frames: None, moving_ctas: MOVING_CTAS, host_bytes_max: usize::MAX }
    }
}

impl CudaConfig {
    /// Sets the number of frames per mapping step, rounded up to the device's granularity.
    ///
    /// By default a 64th of all frames, and at least 32 MiB.
    pub fn segment_frames(mut self, frames: usize) -> Self {
        self.segment_frames = Some(frames);
        self
    }

    /// Sets the number of CTAs that copy for compaction beside batches; 32 by default.
    ///
    /// More take less time, and a larger share of the device.
    pub fn moving_ctas(mut self, ctas: u32) -> Self {
        self.moving_ctas = ctas.max(1);
        self
    }

    /// Sets the maximum size of a host pool whose memory is locked for copies, in bytes; 0: none. By
    /// default as much as is free.
    ///
    /// The first copy between this storage and a [`HostStorage`](kvpool::storage::HostStorage) that
    /// reserved its own memory locks all of its usable frames, so that the device copies to and from
    /// them directly. They occupy physical memory from then on, used or not, and locking takes time
    /// in proportion. Other pools are copied through pinned buffers.
    pub fn host_bytes_max(mut self, bytes: usize) -> Self {
        self.host_bytes_max = bytes;
        self
    }
}

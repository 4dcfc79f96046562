//! How a storage uses its device.

/// CTAs that a copy for compaction runs on at once: of an H200's 132 multiprocessors it leaves a hundred to the model.
const MOVING_CTAS: u32 = 32;

/// How a storage uses its device.
#[derive(Clone, Debug)]
#[must_use]
pub struct CudaConfig {
    pub(super) segment_frames: Option<usize>,
    pub(super) moving_ctas: u32,
}

impl Default for CudaConfig {
    fn default() -> Self {
        Self { segment_frames: None, moving_ctas: MOVING_CTAS }
    }
}

impl CudaConfig {
    /// Memory is mapped and unmapped for about so many frames at a time, rounded up to what the device maps; a 64th of all frames
    /// unless given.
    pub fn segment_frames(mut self, frames: usize) -> Self {
        self.segment_frames = Some(frames);
        self
    }

    /// CTAs that compaction copies on at once; 32 unless given. More take less time and more of the device.
    pub fn moving_ctas(mut self, ctas: u32) -> Self {
        self.moving_ctas = ctas.max(1);
        self
    }
}

use crate::error::StorageError;
use crate::ids::FrameId;

/// A copy of one frame's bytes to another frame: all layers, K and V, with scales.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(C)]
pub struct FrameMove {
    /// Frame to read.
    pub src: FrameId,
    /// Frame to write.
    pub dst: FrameId,
}

impl FrameMove {
    /// Returns the move from `src` to `dst`.
    #[inline]
    pub const fn new(src: FrameId, dst: FrameId) -> Self {
        Self { src, dst }
    }
}

/// Callback at the end of a [`copy_then`](super::Storage::copy_then) or
/// [`after`](super::Storage::after).
pub type CopyDone = Box<dyn FnOnce(Result<(), StorageError>) + Send>;

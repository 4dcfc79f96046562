use super::key::TierKey;
use super::value::ValueError;

/// Memory for one value.
///
/// The tier owns it from the call on, and drops it before the outcome is visible, or when the call
/// is over: after that no byte of it is written, unless a value is just landing. It contains
/// whatever prevents its reuse: for a frame, the [hold](kvpool::transport::Hold) of its piece.
pub trait Landing: Send {
    /// Verifies a value, and writes its block into the memory. Called at most once. After an error,
    /// the memory has unspecified contents.
    fn land(&mut self, value: &[u8]) -> Result<(), ValueError>;
}

/// A value to be read.
pub struct TierRead {
    /// Its name.
    pub key: TierKey,
    /// Size of the value in bytes: [`value_bytes`](super::value_bytes) of the block.
    pub bytes: usize,
    /// Destination of its block.
    pub memory: Box<dyn Landing>,
}

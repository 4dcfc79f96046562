//! Values to be read, and memory for them.

use super::key::TierKey;
use super::value::ValueError;

/// Memory for one value.
///
/// The tier owns it from the call on, and drops it before its outcome can be seen, or when the call
/// is over: then no byte of it is written any more, unless a value is landing at that moment. What
/// keeps the memory from being reused belongs to it: of a frame, the
/// [hold](kvpool::transport::Hold) of its piece.
pub trait Landing: Send {
    /// Verifies a value, and writes its block into the memory. Called at most once.
    ///
    /// # Errors
    ///
    /// [`ValueError`]; what the memory then has is meaningless.
    fn land(&mut self, value: &[u8]) -> Result<(), ValueError>;
}

/// A value to be read.
pub struct TierRead {
    /// Its name.
    pub key: TierKey,
    /// Size of the value in bytes: [`value_bytes`](super::value_bytes) of the block.
    pub bytes: usize,
    /// Where its block goes.
    pub memory: Box<dyn Landing>,
}

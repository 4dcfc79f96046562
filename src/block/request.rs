//! Allocation requests.

pub use crate::ids::Priority;
use crate::ids::{DeviceId, SequenceId};

/// A request for blocks. Build it with [`new`](Self::new) and the setters, or as a struct.
///
/// ```
/// use kvpool::{AllocRequest, Priority, SequenceId};
///
/// let request = AllocRequest::new(10).sequence(SequenceId(7)).priority(Priority::High);
/// assert_eq!(request.blocks, 10);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AllocRequest {
    /// Number of blocks.
    pub blocks: usize,
    /// Sequence that the blocks are for; recorded in their info.
    pub sequence: Option<SequenceId>,
    /// Order among waiting requests, and access to the reserve; recorded in the blocks' info.
    pub priority: Priority,
    /// Whether the blocks start with one pin: neither evicted nor moved until they are free.
    pub pinned: bool,
    /// Whether the blocks must lie in consecutive frames.
    pub contiguous: bool,
    /// Device that the blocks must be on; `None` means the pool's.
    pub device: Option<DeviceId>,
}

impl AllocRequest {
    /// Creates a request for `blocks` blocks, anywhere.
    pub const fn new(blocks: usize) -> Self {
        Self {
            blocks,
            sequence: None,
            priority: Priority::Normal,
            pinned: false,
            contiguous: false,
            device: None,
        }
    }

    /// Sets the sequence that the blocks are for.
    pub const fn sequence(mut self, sequence: SequenceId) -> Self {
        self.sequence = Some(sequence);
        self
    }

    /// Sets the priority.
    pub const fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Makes the blocks start with one pin.
    pub const fn pinned(mut self) -> Self {
        self.pinned = true;
        self
    }

    /// Requires consecutive frames.
    pub const fn contiguous(mut self) -> Self {
        self.contiguous = true;
        self
    }

    /// Requires this device.
    pub const fn device(mut self, device: DeviceId) -> Self {
        self.device = Some(device);
        self
    }
}

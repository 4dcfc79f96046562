//! What an allocation asks for.

pub use crate::ids::Priority;
use crate::ids::{DeviceId, SequenceId};

/// A request for blocks. Build it with [`new`](Self::new) and the methods, or as a struct.
///
/// ```
/// use kvpool::{AllocRequest, Priority, SequenceId};
///
/// let request = AllocRequest::new(10).sequence(SequenceId(7)).priority(Priority::High);
/// assert_eq!(request.blocks, 10);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AllocRequest {
    /// Blocks wanted.
    pub blocks: usize,
    /// The sequence that the blocks will belong to, for their info.
    pub sequence: Option<SequenceId>,
    /// Who goes first among those who wait, and who may have the reserve; recorded with the blocks.
    pub priority: Priority,
    /// Whether the blocks start out pinned once: neither evicted nor moved until they are free, or are unpinned by handle.
    pub pinned: bool,
    /// Whether the blocks must lie in consecutive frames.
    pub contiguous: bool,
    /// The device that the blocks must be on; `None` takes the pool's.
    pub device: Option<DeviceId>,
}

impl AllocRequest {
    /// A request for `blocks` blocks, wherever they may be.
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

    /// For this sequence.
    pub const fn sequence(mut self, sequence: SequenceId) -> Self {
        self.sequence = Some(sequence);
        self
    }

    /// At this priority.
    pub const fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Pinned once from the start.
    pub const fn pinned(mut self) -> Self {
        self.pinned = true;
        self
    }

    /// In consecutive frames.
    pub const fn contiguous(mut self) -> Self {
        self.contiguous = true;
        self
    }

    /// On this device.
    pub const fn device(mut self, device: DeviceId) -> Self {
        self.device = Some(device);
        self
    }
}

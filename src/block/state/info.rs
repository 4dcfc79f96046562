//! Block info: 16 bytes beside a block's word, written at allocation and read by any thread.
//!
//! | field | meaning |
//! |---|---|
//! | `sequence` | sequence that the block was allocated for, or [`SequenceId::NONE`] |
//! | `generation_high` | number of times that the word's generation wrapped around |
//! | `touched` | bits 0..30: low bits of the newest ticket at the last access; bits 30..32: priority |
//!
//! Relaxed throughout: the word publishes the data of a generation (the store that allocates is a
//! Release, the load that checks a handle an Acquire). `touched` is a hint.

use crate::ids::{BlockId, DeviceId, FrameId, Generation, SequenceId, Ticket};
use crate::sync::{AtomicU32, AtomicU64, Ordering::*};

use super::word::BlockWord;
use crate::block::request::Priority;

const TOUCHED_BITS: u32 = 30;
const TOUCHED_MASK: u32 = (1 << TOUCHED_BITS) - 1;

/// A snapshot of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct BlockInfo {
    /// Block id.
    pub id: BlockId,
    /// Frame with its bytes.
    pub frame: FrameId,
    /// Number of references.
    pub refs: u32,
    /// Sequence that it was allocated for.
    pub sequence: Option<SequenceId>,
    /// Device that holds its bytes.
    pub device: DeviceId,
    /// Number of pins: while above 0, the block is neither evicted nor moved.
    pub pins: u32,
    /// Whether its bytes are final.
    pub sealed: bool,
    /// Newest batch when it was last allocated, shared, forked or appended to; not when it was hit.
    pub last_access: Ticket,
    /// Priority of the request that it was allocated for.
    pub priority: Priority,
    /// Number of times that it has been freed.
    pub generation: Generation,
}

pub(in crate::block) struct InfoCell {
    sequence: AtomicU64,
    generation_high: AtomicU32,
    touched: AtomicU32,
}

impl InfoCell {
    pub(in crate::block) fn new() -> Self {
        Self {
            sequence: AtomicU64::new(SequenceId::NONE.0),
            generation_high: AtomicU32::new(0),
            touched: AtomicU32::new(0),
        }
    }

    #[inline]
    pub(in crate::block) fn allocate(&self, sequence: SequenceId, priority: Priority, now: Ticket) {
        self.sequence.store(sequence.0, Relaxed);
        self.touched.store(now.0 as u32 & TOUCHED_MASK | (priority as u32) << TOUCHED_BITS, Relaxed);
    }

    #[inline]
    pub(in crate::block) fn touch(&self, now: Ticket) {
        let priority = self.touched.load(Relaxed) & !TOUCHED_MASK;
        self.touched.store(now.0 as u32 & TOUCHED_MASK | priority, Relaxed);
    }

    /// Counts a wrap-around of the generation's low bits. The caller owns the free block's frame.
    pub(in crate::block) fn carry_generation(&self) {
        self.generation_high.store(self.generation_high.load(Relaxed).wrapping_add(1), Relaxed);
    }

    #[inline]
    pub(in crate::block) fn generation(&self, word: BlockWord) -> Generation {
        Generation(
            (self.generation_high.load(Relaxed) as u64) << BlockWord::GENERATION_BITS | word.generation_low(),
        )
    }

    pub(in crate::block) fn read(
        &self,
        id: BlockId,
        word: BlockWord,
        device: DeviceId,
        now: Ticket,
    ) -> BlockInfo {
        let touched = self.touched.load(Relaxed);
        // The high bits are the newest ticket's, less one if its low bits are below these.
        let age = (now.0 as u32).wrapping_sub(touched) & TOUCHED_MASK;
        let sequence = SequenceId(self.sequence.load(Relaxed));
        BlockInfo {
            id,
            frame: word.frame(),
            refs: word.refs(),
            sequence: (sequence != SequenceId::NONE).then_some(sequence),
            device,
            pins: word.pins(),
            sealed: word.is_sealed(),
            last_access: Ticket(now.0.saturating_sub(age as u64)),
            priority: match touched >> TOUCHED_BITS {
                0 => Priority::Normal,
                1 => Priority::High,
                _ => Priority::Urgent,
            },
            generation: self.generation(word),
        }
    }
}

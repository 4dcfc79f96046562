//! What a block remembers beside its word: 16 bytes, written by whoever allocates it and read by anyone.
//!
//! | field | meaning |
//! |---|---|
//! | `sequence` | the sequence that it was allocated for, [`SequenceId::NONE`] for none |
//! | `generation_high` | how often the word's generation went round |
//! | `touched` | bits 0..30: low bits of the newest ticket at the last access; bits 30..32: priority |
//!
//! Relaxed throughout: the word publishes what belongs to a generation (the store that allocates is a Release, the
//! load that checks a handle an Acquire); `touched` is a hint.

use crate::ids::{BlockId, DeviceId, FrameId, Generation, SequenceId, Ticket};
use crate::sync::{AtomicU32, AtomicU64, Ordering::*};

use crate::block::{BlockWord, Priority};

const TOUCHED_BITS: u32 = 30;
const TOUCHED_MASK: u32 = (1 << TOUCHED_BITS) - 1;

/// A block as it is at one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct BlockInfo {
    /// The block.
    pub id: BlockId,
    /// Where its bytes are.
    pub frame: FrameId,
    /// Owners.
    pub refs: u32,
    /// The sequence that it was allocated for.
    pub sequence: Option<SequenceId>,
    /// The device that its bytes are on.
    pub device: DeviceId,
    /// Pins: above 0 it is neither evicted nor moved.
    pub pins: u32,
    /// Whether its bytes are final.
    pub sealed: bool,
    /// The newest batch when it was last allocated, shared, forked with its sequence, or appended
    /// to. A hit in the prefix cache is none of these.
    pub last_access: Ticket,
    /// The priority of the request that it was allocated for.
    pub priority: Priority,
    /// How often it has been freed.
    pub generation: Generation,
}

/// See the [module](self).
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

    /// As [`touch`](Self::touch), for a caller that may have lost its reference meanwhile: the
    /// priority that a new owner noted is kept.
    #[inline]
    pub(in crate::block) fn touch_loosely(&self, now: Ticket) {
        let touched = self.touched.load(Relaxed);
        let next = now.0 as u32 & TOUCHED_MASK | touched & !TOUCHED_MASK;
        if next != touched {
            let _ = self.touched.compare_exchange(touched, next, Relaxed, Relaxed);
        }
    }

    /// The low bits of the generation went round. Only while the block is free and in the caller's hands.
    pub(in crate::block) fn carry_generation(&self) {
        self.generation_high.store(self.generation_high.load(Relaxed).wrapping_add(1), Relaxed);
    }

    /// The whole generation, given a word of the same block.
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
        // The ticket's high bits are those of the newest ticket that is not before it.
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

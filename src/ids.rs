//! Identifiers: newtypes with no logic of their own.
//!
//! A *block* is what a sequence owns; its id never changes while it lives. A *frame* is a physical place that
//! holds one block's bytes. The two are in bijection over the whole pool, and equal until something moves.

use std::fmt;

/// Frames (and therefore blocks) that one pool can address: the frame field of a block word has this many values.
pub const FRAMES_MAX: usize = 1 << crate::config::FRAME_BITS;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[repr(transparent)]
        pub struct $name(pub $raw);

        impl $name {
            /// The raw number.
            #[inline]
            pub const fn get(self) -> $raw {
                self.0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

id! {
    /// A block, by the id that it keeps while it lives.
    BlockId(u32)
}
id! {
    /// A physical place for one block.
    FrameId(u32)
}
id! {
    /// log2 of the length of an aligned run of frames.
    Order(u8)
}
id! {
    /// A sequence: one request's tokens, as the engine numbers it.
    SequenceId(u64)
}
id! {
    /// A point in the order of batches. A frame retired at a ticket is reusable once every batch up to it has ended.
    Ticket(u64)
}
id! {
    /// How many times a block has been freed. A handle with another generation than its block's is stale.
    Generation(u64)
}
id! {
    /// Tells the pools of one process apart, so that a handle of another pool is refused.
    PoolTag(u32)
}

impl BlockId {
    /// As an index into a table of blocks.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl FrameId {
    /// As an index into a table of frames.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl Order {
    /// The length of a run of this order, in frames.
    #[inline]
    pub const fn frames(self) -> usize {
        1 << self.0
    }
}

impl SequenceId {
    /// The owner of a block that belongs to no sequence.
    pub const NONE: Self = Self(u64::MAX);
}

/// Consecutive frames: `start .. start + len`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Run {
    /// The first frame.
    pub start: FrameId,
    /// How many frames.
    pub len: u32,
}

impl Run {
    /// The frame after the last.
    #[inline]
    pub const fn end(self) -> u32 {
        self.start.0 + self.len
    }

    /// Returns both runs as one, if `other` is adjacent to either end of this one.
    #[inline]
    pub const fn join(self, other: Self) -> Option<Self> {
        let start = if self.end() == other.start.0 {
            self.start
        } else if other.end() == self.start.0 {
            other.start
        } else {
            return None;
        };
        Some(Self { start, len: self.len + other.len })
    }

    /// Every frame of the run, ascending.
    pub fn frames(self) -> impl DoubleEndedIterator<Item = FrameId> + ExactSizeIterator {
        (self.start.0..self.end()).map(FrameId)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frames {}..{}", self.start, self.end())
    }
}

/// Where a pool's memory is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[non_exhaustive]
pub enum DeviceId {
    /// The memory of the host.
    #[default]
    Host,
    /// A CUDA device, by ordinal.
    Cuda(u16),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A counted reference to one block, as an engine that keeps its own tables holds it: the block, the generation
/// that it was handed out in, and the pool that it came from. It does not free on drop.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockHandle {
    /// The block.
    pub id: BlockId,
    /// The pool that handed it out.
    pub pool: PoolTag,
    /// The block's generation when it was handed out.
    pub generation: Generation,
}

impl BlockHandle {
    /// As one number, for tables in other languages: id in bits 0..32, pool in 32..64, generation above.
    #[inline]
    pub const fn to_bits(self) -> u128 {
        self.id.0 as u128 | (self.pool.0 as u128) << 32 | (self.generation.0 as u128) << 64
    }

    /// The inverse of [`to_bits`](Self::to_bits). Any number is accepted here; the pool checks the handle when it
    /// is used.
    #[inline]
    pub const fn from_bits(bits: u128) -> Self {
        Self {
            id: BlockId(bits as u32),
            pool: PoolTag((bits >> 32) as u32),
            generation: Generation((bits >> 64) as u64),
        }
    }
}

impl fmt::Display for BlockHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} of pool {}, generation {}", self.id, self.pool, self.generation)
    }
}

/// Who goes first where requests compete.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[repr(u8)]
pub enum Priority {
    /// Throughput work.
    #[default]
    Normal,
    /// Ahead of normal requests.
    High,
    /// Ahead of all others.
    Urgent,
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Normal => "normal",
            Self::High => "high",
            Self::Urgent => "urgent",
        })
    }
}

//! Identifiers: newtypes without logic.
//!
//! A *block* is the unit that a sequence owns; its id never changes while it lives. A *frame* is a
//! physical place that holds one block's bytes. Blocks and frames are in bijection over the whole
//! pool: a block's id equals its frame's until the first move.

use std::fmt;

/// Maximum number of frames, and of blocks, of a pool: the range of a block word's frame field.
pub const FRAMES_MAX: usize = 1 << crate::config::FRAME_BITS;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($raw:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        #[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
        #[repr(transparent)]
        pub struct $name(pub $raw);

        impl $name {
            /// Returns the raw number.
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
    /// Id of a block.
    BlockId(u32)
}
id! {
    /// Number of a frame.
    FrameId(u32)
}
id! {
    /// log2 of the length of an aligned run of frames.
    Order(u8)
}
id! {
    /// Id of a sequence (the tokens of one request), chosen by the engine.
    SequenceId(u64)
}
id! {
    /// Id of a session (the requests of one conversation), chosen by the engine.
    SessionId(u64)
}
id! {
    /// Id of a tenant (an owner of requests, with limits of its own), chosen by the engine.
    TenantId(u64)
}
id! {
    /// Position in the order of batches. A frame retired at a ticket waits for all batches up to
    /// it.
    Ticket(u64)
}
id! {
    /// Number of times that a block was freed. A handle of another generation is stale.
    Generation(u64)
}
id! {
    /// Version of a model's or an adapter's weights, chosen by the engine; 0 until the first
    /// change.
    WeightsVersion(u64)
}
id! {
    /// Identifies a pool of this process, so that another pool rejects its handles.
    PoolTag(u32)
}

impl BlockId {
    /// Returns the id as an index into a table of blocks.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl FrameId {
    /// Returns the id as an index into a table of frames.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl Order {
    /// Returns the length of a run of this order, in frames.
    #[inline]
    pub const fn frames(self) -> usize {
        1 << self.0
    }
}

impl SequenceId {
    /// Owner of a block that belongs to no sequence.
    pub const NONE: Self = Self(u64::MAX);
}

/// Consecutive frames: `start .. start + len`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Run {
    /// First frame.
    pub start: FrameId,
    /// Number of frames.
    pub len: u32,
}

impl Run {
    /// Returns the frame after the last one.
    #[inline]
    pub const fn end(self) -> u32 {
        self.start.0 + self.len
    }

    /// Returns both runs as one, if `other` is adjacent to either end.
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

    /// Returns every frame of the run, ascending.
    pub fn frames(self) -> impl DoubleEndedIterator<Item = FrameId> + ExactSizeIterator {
        (self.start.0..self.end()).map(FrameId)
    }
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "frames {}..{}", self.start, self.end())
    }
}

/// Device that holds a pool's memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum DeviceId {
    /// Host memory.
    #[default]
    Host,
    /// CUDA device, by ordinal.
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

/// Names a block in one generation, for inspection and pins. Holds no reference.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct BlockHandle {
    /// Id of the block.
    pub id: BlockId,
    /// Pool that created the handle.
    pub pool: PoolTag,
    /// Generation of the block when the handle was created.
    pub generation: Generation,
}

impl BlockHandle {
    /// Returns the handle as one number: id in bits 0..32, pool in 32..64, generation above.
    #[inline]
    pub const fn to_bits(self) -> u128 {
        self.id.0 as u128 | (self.pool.0 as u128) << 32 | (self.generation.0 as u128) << 64
    }

    /// Inverse of [`to_bits`](Self::to_bits). Accepts any number: each use checks the handle.
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

/// Priority of a request in the queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[repr(u8)]
pub enum Priority {
    /// Throughput work.
    #[default]
    Normal,
    /// Served before normal requests.
    High,
    /// Served before all other requests.
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

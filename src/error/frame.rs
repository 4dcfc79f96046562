use std::fmt;

use thiserror::Error;

use super::ShrinkError;
use crate::ids::{FrameId, PoolTag};

/// Reason why a frame pool refused a call, with the position in the caller's list. Nothing was
/// changed, unless the call documents an exception.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The frame's number is not below the number of frames.
    #[error("entry {index}: frame {frame} of a pool of {frames} frames")]
    OutOfRange {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
        /// Number of frames, including the null block's.
        frames: usize,
    },
    /// The frame is the null block's, which has no references.
    #[error("entry {index}: frame {frame} is the null block's")]
    Null {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// The frame has no references and no cached contents: never allocated, freed, or evicted.
    #[error("entry {index}: frame {frame} is free")]
    Free {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// The frame has cached contents but no references: it was already freed.
    #[error("entry {index}: frame {frame} is cached and has no references")]
    Unreferenced {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// The list contains the frame more often than it has references or, when claiming, twice.
    #[error("entry {index}: frame {frame} is listed {listed} times and has {references} references")]
    Repeated {
        /// Position in the list of the first excess occurrence.
        index: usize,
        /// The frame.
        frame: FrameId,
        /// Number of occurrences in the list.
        listed: usize,
        /// Number of references.
        references: u32,
    },
    /// The frame has the maximum number of references.
    #[error("entry {index}: frame {frame} has {max} references, the maximum")]
    TooManyReferences {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
        /// Maximum number of references.
        max: u32,
    },
    /// The frame to claim has references.
    #[error("entry {index}: frame {frame} is in use, with {references} references")]
    InUse {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
        /// Number of references.
        references: u32,
    },
    /// The frame to claim has no references but cannot be taken now: it is retired until a batch
    /// ends, held by a move, in the reserve, or in the magazine of a running thread.
    #[error("entry {index}: frame {frame} has no references and cannot be claimed now")]
    Unavailable {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// The frame that should receive hashes has hashes already, or is the source.
    #[error("entry {index}: frame {frame} has hashes already")]
    Cached {
        /// Position in the list.
        index: usize,
        /// The frame.
        frame: FrameId,
    },
    /// The hash has zero bytes, which distinguishes nothing.
    #[error("entry {index}: the hash is empty")]
    EmptyHash {
        /// Position in the list.
        index: usize,
    },
    /// The key was made by another pool.
    #[error("entry {index}: a key of pool {key}, in pool {pool}")]
    ForeignKey {
        /// Position in the list.
        index: usize,
        /// Pool that made the key.
        key: PoolTag,
        /// This pool.
        pool: PoolTag,
    },
    /// The cache was not cleared because frames have references.
    #[error("{frames} frames are in use")]
    NotIdle {
        /// Number of frames with references.
        frames: usize,
    },
}

/// Reason why a frame pool did not shrink. It keeps its size.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum FrameShrinkError {
    /// The pool cannot shrink to this size.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// Frames that would be removed have references, so they cannot move.
    #[error("{} frames to be removed are in use, first {}", frames.len(), FirstOf(frames))]
    InUse {
        /// These frames, in ascending order.
        frames: Vec<FrameId>,
    },
    /// Frames that would be removed are not free yet: retired until a batch ends, held by
    /// uncommitted moves, or in the magazine of a running thread.
    #[error("{frames} frames to be removed are not free yet")]
    NotFree {
        /// Number of these frames.
        frames: usize,
    },
}

/// Displays the first few frames of a list.
struct FirstOf<'a>(&'a [FrameId]);

impl fmt::Display for FirstOf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        for (i, frame) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{frame}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

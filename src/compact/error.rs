//! Why a compaction, or a change of size, did not do all that it was asked for.

use std::fmt;

use thiserror::Error;

use crate::error::{GrowError, ShrinkError, StorageError};
use crate::ids::BlockId;

use super::{DefragReport, OverdueCopy};

/// Why a compaction ended early, or did not begin. Blocks that had moved have moved; all others are where they were.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum DefragError {
    /// The pool was built without storage, and with nobody who copies frames in its place.
    #[error("this pool has no storage, and was given nothing that copies frames")]
    NoBytes,
    /// An option makes no sense.
    #[error("{option}: {reason}")]
    Option {
        /// Which one.
        option: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A copy failed. Its wave was put back.
    #[error("a copy failed, and was put back: {error}")]
    Copy {
        /// What the storage said.
        error: StorageError,
        /// What had been done before.
        report: Box<DefragReport>,
    },
    /// Whoever copies dropped a copy without saying how it ended. Its wave was put back.
    #[error("a copy was dropped by the storage, and was put back")]
    CopyDropped {
        /// What had been done before.
        report: Box<DefragReport>,
    },
    /// A copy is not over although its deadline has passed: one of this run, or of an earlier one. Until it is, no others
    /// begin.
    #[error("{copy}, past its deadline; its blocks stay held until the copier says how it ended")]
    CopyOverdue {
        /// The copy.
        copy: OverdueCopy,
        /// What had been done before.
        report: Box<DefragReport>,
    },
    /// There is no tokio runtime here to run a task on.
    #[error("a background task needs a tokio runtime")]
    NoRuntime,
}

/// Why a pool did not get the size that was asked for. It has the size that it had.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// It cannot grow so far.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// It cannot shrink so.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// Too much is in use: what lies beyond the new end has no room below it.
    #[error("{used} blocks are in use; they do not fit into {asked}")]
    NoRoom {
        /// Blocks asked for.
        asked: usize,
        /// Blocks in use, those of the reserve among them.
        used: usize,
    },
    /// Something that lies beyond the new end cannot move, or does not become free.
    #[error("{} in the way: {}", Count(blocks.len() + retired), Blockers(blocks, *retired))]
    Blocked {
        /// Blocks asked for.
        asked: usize,
        /// Blocks that cannot move, by id, and why.
        blocks: Vec<(BlockId, Blocker)>,
        /// Frames that are free, and wait for a batch in flight to end or for a thread to leave its cache.
        retired: usize,
    },
    /// Blocks could not be copied.
    #[error(transparent)]
    Defrag(#[from] DefragError),
}

/// Why a block cannot be moved out of the way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Blocker {
    /// It is pinned.
    Pinned,
    /// Its bytes are not final: it is not sealed.
    Open,
    /// It could move, and did not come to; or the pool has nothing that copies frames.
    Busy,
}

impl fmt::Display for Blocker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pinned => "pinned",
            Self::Open => "not sealed",
            Self::Busy => "busy",
        })
    }
}

struct Count(usize);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} block{}", self.0, if self.0 == 1 { " is" } else { "s are" })
    }
}

/// The first few by id, and how many more.
struct Blockers<'a>(&'a [(BlockId, Blocker)], usize);

impl fmt::Display for Blockers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let mut separator = "";
        for (block, why) in self.0.iter().take(SHOWN) {
            write!(f, "{separator}{block} {why}")?;
            separator = ", ";
        }
        if self.0.len() > SHOWN {
            write!(f, ", and {} more", self.0.len() - SHOWN)?;
            separator = ", ";
        }
        if self.1 > 0 {
            write!(f, "{separator}{} freed and still in use by a batch or a thread", self.1)?;
        }
        Ok(())
    }
}

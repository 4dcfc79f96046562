use std::fmt;

use thiserror::Error;

use crate::error::{Also, GrowError, ShrinkError, StorageError, TurnHolder};
use crate::ids::BlockId;

use super::{DefragReport, OverdueCopy};

/// Why a compaction ended early, or did not begin.
///
/// Moves completed before the error stay in effect; all other blocks are unchanged.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum DefragError {
    /// The pool was built without storage, and without a copier for frames.
    #[error("this pool has neither storage nor a copier for frames")]
    NoBytes,
    /// An option is invalid.
    #[error("{option}: {reason}")]
    Option {
        /// Name of the option.
        option: &'static str,
        /// Why its value is invalid.
        reason: &'static str,
    },
    /// A copy failed. Its wave was undone.
    #[error("a copy failed, and its wave was undone: {error}")]
    Copy {
        /// Error returned by the storage.
        error: StorageError,
        /// Work done before the failure.
        report: Box<DefragReport>,
    },
    /// The copier dropped a copy without reporting its outcome. The wave was undone.
    #[error("the copier dropped a copy without reporting its outcome, and the wave was undone")]
    CopyDropped {
        /// Work done before the failure.
        report: Box<DefragReport>,
    },
    /// A copy of this run, or of an earlier one, is past its deadline. No copy begins until it
    /// ends.
    #[error("{copy}, past its deadline; its blocks stay held until the copier reports its outcome")]
    CopyOverdue {
        /// The overdue copy.
        copy: OverdueCopy,
        /// Work done before the failure.
        report: Box<DefragReport>,
    },
    /// The calling thread is not in a tokio runtime, or the feature `tokio` is off.
    #[error("a background task needs a tokio runtime, and the feature `tokio`")]
    NoRuntime,
}

/// Why a pool could not be resized. It keeps its size.
#[derive(Clone, PartialEq, Debug, Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// The pool cannot grow to this size.
    #[error(transparent)]
    Grow(#[from] GrowError),
    /// The pool cannot shrink to this size.
    #[error(transparent)]
    Shrink(#[from] ShrinkError),
    /// Too many blocks are in use to fit below the new end.
    #[error("{used} blocks are in use; they do not fit into {asked}")]
    NoRoom {
        /// Requested number of blocks.
        asked: usize,
        /// Blocks in use, including the reserve, and cached ones that floors of tenants protect.
        used: usize,
    },
    /// The floors of the pool's tenants exceed the new size without the reserve: lower them first.
    #[error("the floors of the pool's tenants are {floors} blocks together; they do not fit into {asked}")]
    Floors {
        /// Requested number of blocks.
        asked: usize,
        /// Sum of the floors in blocks.
        floors: usize,
    },
    /// Blocks beyond the new end cannot move, or frames there do not become free.
    #[error("{} in the way: {}", Count(blocks.len() + retired), Blockers(blocks, *retired))]
    Blocked {
        /// Requested number of blocks.
        asked: usize,
        /// Blocks that cannot move, by id, and the reason for each.
        blocks: Vec<(BlockId, Blocker)>,
        /// Free frames that wait for the end of a batch, or that a thread holds.
        retired: usize,
    },
    /// Another task had the turn to move blocks for the whole patience of the resize.
    #[error("no turn to move blocks in time for a resize to {asked} blocks{}", Also(holder, ": "))]
    NoTurn {
        /// Requested number of blocks.
        asked: usize,
        /// Task that had the turn.
        holder: Option<TurnHolder>,
    },
    /// Blocks could not be copied, or an option is invalid.
    #[error(transparent)]
    Defrag(#[from] DefragError),
}

/// Why a block cannot move out of the way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Blocker {
    /// It is pinned.
    Pinned,
    /// It is not sealed: its bytes are not final.
    Open,
    /// It was movable, but not moved in time; or the pool has no copier for frames.
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

/// Displays the first few blocks by id, and the number of the others.
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

//! Why a command did not run, and the exit code that says so.

use kvpool::error::LayoutError;
use kvpool::prefix::policy::PolicyKind;
use thiserror::Error;

use crate::backend::DeviceArg;
use crate::trace::TraceError;
use crate::{EXIT_UNSOUND, EXIT_USAGE};

/// Why a command did not run.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The layout is unknown or impossible.
    #[error("--layout {name}: {reason}")]
    Layout {
        /// The name given.
        name: String,
        /// What is wrong with it.
        reason: LayoutError,
    },
    /// The device cannot be used.
    #[error("--device {device}: {reason}")]
    Device {
        /// The device.
        device: DeviceArg,
        /// Why not.
        reason: String,
    },
    /// A policy for a cache that there is not to be.
    #[error(
        "--policy {policy} says how cached blocks are evicted, and --prefix-cache off that none are cached"
    )]
    PolicyOfNothing {
        /// The policy.
        policy: PolicyKind,
    },
    /// Columns for a trace that has none.
    #[error("--columns names the columns of a CSV trace, and --format mooncake is JSON lines")]
    ColumnsOfJson,
    /// The pool would not fit into the memory that there is.
    #[error(
        "a pool of {blocks} blocks of {block_bytes} bytes (metadata included) does not fit into the {free} bytes that are free (--blocks, --layout)"
    )]
    TooLarge {
        /// Blocks of the pool.
        blocks: usize,
        /// Bytes of one, with what the pool keeps about it.
        block_bytes: usize,
        /// Bytes that are free there.
        free: u64,
    },
    /// The pool cannot be built as asked.
    #[error("cannot build a pool of {blocks} blocks: {reason}")]
    Pool {
        /// Blocks of the pool.
        blocks: usize,
        /// What the pool said.
        reason: String,
    },
    /// The trace does not say which prompts begin alike.
    #[error(
        "{trace}: no request has hash_ids, so that nothing says which prompts begin alike (Mooncake traces do)"
    )]
    NoHashes {
        /// The trace.
        trace: String,
    },
    /// The replay ended before there was anything to look at.
    #[error("nothing was drawn: {reason}")]
    NoPicture {
        /// Why not.
        reason: String,
    },
    /// A picture or a page could not be written.
    #[error("cannot write {}: {error}", .path.display())]
    File {
        /// Where it was to go.
        path: std::path::PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// The report could not be written.
    #[error("cannot write the report: {0}")]
    Output(std::io::Error),
}

impl CommandError {
    /// What was asked for cannot be done, or it was done and could not be told.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Output(_) | Self::NoPicture { .. } => EXIT_UNSOUND,
            _ => EXIT_USAGE,
        }
    }
}

//! Why a command did not run, and its exit code.

use std::io;
use std::path::PathBuf;

use indicatif::{BinaryBytes, HumanCount};
use kvpool::prefix::policy::PolicyKind;
use kvpool::{DeviceId, Invalid};
use thiserror::Error;

use crate::trace::TraceError;
use crate::{EXIT_UNSOUND, EXIT_USAGE};

/// Why a command did not run.
#[derive(Debug, Error)]
pub enum CommandError {
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("--layout {name}: {reason}")]
    Layout { name: String, reason: Invalid },
    #[error("--device {device}: {reason}")]
    Device { device: DeviceId, reason: String },
    #[error("--policy {0} has no effect with --prefix-cache off")]
    PolicyWithoutCache(PolicyKind),
    #[error("--tolerance is of LRU, which this command does not use: add --policy lru")]
    ToleranceWithoutLru,
    #[error("--compare free-list does not follow --resize-at: a free list keeps its size")]
    ComparedSizes,
    #[error(
        "--sweep: {} requests are too few: none begins after open sequences hold {percent} % of {} blocks, and ends before the last one begins (--requests, --blocks)",
        HumanCount(*.requests as u64), HumanCount(*.blocks as u64)
    )]
    NotFilled { percent: usize, blocks: usize, requests: usize },
    #[error("NOT SOUND: {}", .0.join("; "))]
    NotSound(Vec<String>),
    #[error("{0} tells how a trace is read, and none is given")]
    WithoutTrace(&'static str),
    #[error("--columns is for CSV traces, and --format names one in JSON")]
    ColumnsOfJson,
    #[error(
        "a pool of {} blocks of {} (metadata included) does not fit into the {} that are free (--blocks, --layout)",
        HumanCount(*.blocks as u64), BinaryBytes(*.block_bytes as u64), BinaryBytes(*.free)
    )]
    TooLarge { blocks: usize, block_bytes: usize, free: u64 },
    #[error("cannot build a pool of {} blocks: {reason}", HumanCount(*.blocks as u64))]
    Pool { blocks: usize, reason: String },
    #[error(
        "{0}: no request has hash_ids, which identify common prefixes of prompts (traces in JSON have them)"
    )]
    NoHashIds(String),
    #[error("nothing was drawn: {0}")]
    NoPicture(String),
    #[error("cannot write {}: {error}", .path.display())]
    File { path: PathBuf, error: io::Error },
    #[cfg(not(feature = "top"))]
    #[error("this build lacks the command: cargo install --path cli --features {0}")]
    Absent(&'static str),
    #[error("cannot write the report: {0}")]
    Output(io::Error),
    #[cfg(feature = "node")]
    #[error(transparent)]
    Settings(#[from] kvpool_node::settings::SettingsError),
    #[cfg(feature = "node")]
    #[error(transparent)]
    Serve(#[from] crate::serve::ServeError),
    #[cfg(feature = "node")]
    #[error(transparent)]
    Bind(#[from] kvpool_node::admin::BindError),
    #[cfg(feature = "node")]
    #[error(transparent)]
    Client(#[from] kvpool_node::admin::ClientError),
    #[cfg(feature = "top")]
    #[error(transparent)]
    Top(#[from] crate::top::TopError),
    #[cfg(feature = "node")]
    #[error("--tls-ca: {0}")]
    Authorities(#[from] crate::serve::NetworkError),
    #[cfg(feature = "node")]
    #[error("--token-file: {0}")]
    Token(#[from] kvpool_node::settings::TokenError),
    #[cfg(feature = "node")]
    #[error("{}: {reason}", .path.display())]
    Machine { path: PathBuf, reason: String },
    #[cfg(feature = "node")]
    #[error(transparent)]
    Endpoint(#[from] kvpool_node::topology::UnknownEndpoint),
}

impl CommandError {
    /// Returns the exit code: that of bad usage, unless the command ran.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Output(_) | Self::NoPicture(_) | Self::NotSound(_) => EXIT_UNSOUND,
            #[cfg(feature = "node")]
            Self::Client(_) => EXIT_UNSOUND,
            #[cfg(feature = "top")]
            Self::Top(error) if !error.is_usage() => EXIT_UNSOUND,
            _ => EXIT_USAGE,
        }
    }
}

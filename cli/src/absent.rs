//! Commands of features that this build lacks: they say how to build with them.

use clap::{Args, Subcommand};

/// The commands over a live pool, in a build without their feature.
#[derive(Clone, Debug, Subcommand)]
pub enum AbsentCommand {
    /// Serve a pool, with an admin interface [build with --features node]
    #[cfg(not(feature = "node"))]
    Serve(Unread),
    /// Print the statistics of a node [build with --features node]
    #[cfg(not(feature = "node"))]
    Stats(Unread),
    /// Compact the pool of a node [build with --features node]
    #[cfg(not(feature = "node"))]
    Defrag(Unread),
    /// Change the size of a node's pool [build with --features node]
    #[cfg(not(feature = "node"))]
    Resize(Unread),
    /// Migrate a sequence from a node to another one [build with --features node]
    #[cfg(not(feature = "node"))]
    Migrate(Unread),
    /// Print the migrations of a node [build with --features node]
    #[cfg(not(feature = "node"))]
    MigrationStatus(Unread),
    /// Declare that a peer's process has ended [build with --features node]
    #[cfg(not(feature = "node"))]
    DeclareEnded(Unread),
    /// Print who holds the blocks of a node's pool [build with --features node]
    #[cfg(not(feature = "node"))]
    Owners(Unread),
    /// Follow a node [build with --features node]
    #[cfg(not(feature = "node"))]
    Events(Unread),
    /// Recount every frame of a node's pool [build with --features node]
    #[cfg(not(feature = "node"))]
    Audit(Unread),
    /// Print devices and the paths between them [build with --features node]
    #[cfg(not(feature = "node"))]
    Topology(Unread),
    /// Show a node on the terminal [build with --features top]
    Top(Unread),
}

/// The arguments of an absent command, which are not read.
#[derive(Clone, Debug, Args)]
pub struct Unread {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    words: Vec<std::ffi::OsString>,
}

impl AbsentCommand {
    /// Returns the feature that has the command.
    pub const fn feature(&self) -> &'static str {
        match self {
            Self::Top(_) => "top",
            #[cfg(not(feature = "node"))]
            _ => "node",
        }
    }
}

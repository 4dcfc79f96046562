use kvpool::TransferError;
use kvpool::transport::TransportError;

use crate::admin::AccessError;
use crate::transport::tcp::LinkError;

/// Why a node does not start, or refuses a request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NodeError {
    /// The pool has no memory to transfer.
    #[error(transparent)]
    Pool(#[from] TransferError),
    /// The network side could not be started.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// A transport could not be started.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The admin interface lacks a token or a certificate that it needs.
    #[error(transparent)]
    Admin(#[from] AccessError),
    /// The node was given another number of heads than a block of the pool has.
    #[error("the blocks have {layout} heads, and {} were given", .heads.heads().len())]
    Heads {
        /// Heads given.
        heads: kvpool::transfer::HeadRange,
        /// Heads of a block.
        layout: usize,
    },
    /// The pool belongs to another node of this process.
    #[error("another node has this pool, and did not end yet")]
    PoolInUse,
    /// No peer of this name is configured or connected.
    #[error("no peer is known as {name}")]
    UnknownPeer {
        /// The name.
        name: String,
    },
    /// A peer that is declared to have ended still has a link.
    #[error("{name} has a link, so that its process lives")]
    PeerLives {
        /// Its name.
        name: String,
    },
    /// The engine does not release this sequence, or does not have it.
    #[error("sequence {id} does not exist here, or must stay")]
    NotOffered {
        /// Its id.
        id: kvpool::SequenceId,
    },
    /// The migration did not begin.
    #[error("sequence {id} stays here: {reason}")]
    NotBegun {
        /// Id of the sequence.
        id: kvpool::SequenceId,
        /// Why.
        reason: String,
    },
    /// The node is shutting down.
    #[error("the node is stopping")]
    Stopped,
}

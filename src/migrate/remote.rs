//! Nodes that a pool can send blocks to, by name.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use crate::error::TransferError;
use crate::prefix::BlockHash;
use crate::sequence::GroupedSequence;

use super::export::Export;
use super::held::Finished;
use super::report::{Carried, MigrationReport};

/// Future of an operation of a [`Remote`].
pub type RemoteFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The nodes that a pool knows.
pub trait Remotes: Send + Sync {
    /// Returns the node of this name.
    fn remote(&self, name: &str) -> Option<Arc<dyn Remote>>;
}

/// Another node, to which blocks of a pool can be sent.
pub trait Remote: Send + Sync {
    /// Transfers an export to the node, and finishes it when the node has committed.
    ///
    /// If the future is dropped, the transfer either completes or is cancelled; the export's
    /// sequence is closed in both cases. If it is unknown whether the node has committed, the
    /// transfer keeps its export, and does not complete until that is known.
    fn send(&self, export: Export<GroupedSequence>) -> RemoteFuture<Result<Sent, SendError>>;

    /// Copies the cached blocks with these hashes from the node into the pool's cache, up to the
    /// first one that the node lacks or finds damaged.
    ///
    /// # Errors
    /// [`TransferError`]; no block was copied.
    fn fetch(&self, hashes: Vec<BlockHash>) -> RemoteFuture<Result<Fetched, TransferError>>;

    /// Asks for each hash whether the node has cached a block for it, as part of a chain or not, at
    /// that moment; one value for each, in their order. If the answer may be lost, the remote
    /// bounds the time.
    ///
    /// # Errors
    /// [`TransferError`]; nothing is known of any hash.
    fn cached(&self, hashes: Vec<BlockHash>) -> RemoteFuture<Result<Vec<bool>, TransferError>>;
}

/// Result of a [fetch](Remote::fetch).
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Fetched {
    /// Copied blocks.
    pub carried: Carried,
    /// Blocks that the node dropped, because its memory had damaged them.
    pub damaged: Vec<BlockHash>,
}

/// Result of a transfer to another node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sent {
    /// Blocks that were cached there.
    pub shared_blocks: usize,
    /// Copied blocks.
    pub carried: Carried,
    /// Result of [finishing](Export::finish) the export.
    pub finished: Finished,
}

impl Sent {
    /// Returns the report of a sequence with this number of tokens.
    pub(crate) fn report(&self, tokens: usize) -> MigrationReport {
        MigrationReport { tokens, shared_blocks: self.shared_blocks, carried: self.carried }
    }
}

/// A transfer that failed, with its export.
#[derive(Debug, thiserror::Error)]
#[error("the blocks were not sent: {error}")]
pub struct SendError {
    /// The cause.
    pub error: TransferError,
    /// Not committed by the node, now or later, unless the cause is [`TransferError::InDoubt`].
    pub export: Box<Export<GroupedSequence>>,
}

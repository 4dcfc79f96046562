use kvpool::transfer::{Export, Sent};
use kvpool::{Invalid, TransferError};
use tokio::sync::oneshot;

use super::driver::Input;
use super::node::Node;
use super::parcel::Parcel;
use crate::protocol::{MigrationId, Part, PartFault};

/// Why a part was not sent.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartError {
    /// The export belongs to another pool, whose engine writes its frames.
    #[error("the export is not of this node's pool")]
    ForeignExport,
    /// The node does not know [its heads](super::NodeBuilder::heads).
    #[error("the node was not told which heads it has")]
    HeadsUnknown,
    /// The heads of the node are not those of its blocks.
    #[error(transparent)]
    Form(#[from] Invalid),
    /// The part cannot exist.
    #[error("{part} of the copy: {fault}")]
    Part {
        /// The part.
        part: Part,
        /// What is wrong with it.
        fault: PartFault,
    },
    /// The target refused it, or the copy has ended.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}

/// A part that was not sent, with its export.
#[derive(Debug, thiserror::Error)]
#[error("the part was not sent: {error}")]
pub struct SendPartError {
    /// The cause.
    pub error: PartError,
    /// The export. The target has not committed the copy, and never will, except after
    /// [`TransferError::InDoubt`].
    pub export: Box<Export>,
}

impl Node {
    /// Sends this rank's part of a sequence to a peer of another tensor-parallel split, and
    /// finishes the export when the peer has committed the copy.
    ///
    /// The engine calls the node of each rank that has heads of the peer, with its part and the
    /// same `copy`, a random number that it uses once. The peer commits all parts or none: a part
    /// that fails, or does not arrive within the transfer deadline of the first one, ends the
    /// others, and each source gets its export back. An export that owns its sequence moves it; a
    /// [copy](kvpool::Pool::export_copy) leaves it open here. A rank that feeds several peers
    /// copies the sequence to each under a separate number, and closes it once all have it, since
    /// some of these copies may fail.
    ///
    /// # Limits
    ///
    /// - Both nodes must know [their heads](super::NodeBuilder::heads). Block sizes, layers,
    ///   dtypes, and the static scales of shared heads must be equal.
    /// - All heads of this rank are sent, also those that the peer does not need.
    /// - The bytes travel over TCP. The peer needs [memory](super::NodeBuilder::staging_bytes) for
    ///   all blocks of the part that it lacks, and checks them there.
    /// - Only sequences move in parts.
    ///
    /// # Errors
    /// [`SendPartError`] with the export, whose sequence is unchanged. A refusal of the peer is a
    /// [`TransferError::Node`] with the reason. After [`TransferError::InDoubt`] the peer may have
    /// the copy.
    pub async fn send_part(
        &self,
        export: Export,
        copy: MigrationId,
        part: Part,
        to: &str,
    ) -> Result<Sent, SendPartError> {
        let mut export = export;
        if let Err(error) = self.check_part(&mut export, part) {
            return Err(SendPartError { error, export: Box::new(export) });
        }
        let stopped = || TransferError::Node { node: to.to_owned(), reason: "this node has ended".into() };
        let (answer, answered) = oneshot::channel();
        match self.inputs.reserve().await {
            Ok(permit) => {
                let parcel = Parcel::new(to, export.into_grouped(), Some(answer));
                permit.send(Input::Send(Box::new(parcel), Some((copy, part))));
            }
            Err(_) => {
                return Err(SendPartError { error: stopped().into(), export: Box::new(export) });
            }
        }
        // A parcel answers wherever it is dropped.
        let result =
            answered.await.unwrap_or_else(|_| unreachable!("a parcel was dropped without an answer"));
        result.map_err(|failed| {
            let export = failed.export.into_one().unwrap_or_else(|_| unreachable!("it was one"));
            SendPartError { error: failed.error.into(), export: Box::new(export) }
        })
    }

    fn check_part(&self, export: &mut Export, part: Part) -> Result<(), PartError> {
        if !self.pool().has_exported(export) {
            return Err(PartError::ForeignExport);
        }
        if export.sequence().is_none() {
            return Err(PartError::Part { part, fault: PartFault::Cached });
        }
        export.set_heads(self.heads.ok_or(PartError::HeadsUnknown)?)?;
        Ok(())
    }
}

//! An export on its way to a peer, with the request that waits for its end.
//!
//! Wherever a parcel is dropped, in a job, a task, a queue or with the runtime, the request gets
//! its export back with an error. No export is closed because its driver is gone.

use kvpool::transfer::{Export, SendError, Sent};
use kvpool::{Carried, GroupedSequence, TransferError};
use tokio::sync::oneshot;

pub(super) type SendAnswer = oneshot::Sender<Result<Sent, SendError>>;

#[derive(Debug)]
pub(super) struct Parcel {
    node: String,
    /// `None` once it has ended.
    export: Option<Export<GroupedSequence>>,
    /// `None` for an export that a peer asked for.
    answer: Option<SendAnswer>,
    /// Whether the peer was sent `Commit`.
    is_told: bool,
}

impl Parcel {
    pub(super) fn new(node: &str, export: Export<GroupedSequence>, answer: Option<SendAnswer>) -> Self {
        Self { node: node.to_owned(), export: Some(export), answer, is_told: false }
    }

    pub(super) fn node(&self) -> &str {
        &self.node
    }

    pub(super) fn export(&self) -> &Export<GroupedSequence> {
        self.export.as_ref().unwrap_or_else(|| unreachable!("an export that has ended"))
    }

    pub(super) fn export_mut(&mut self) -> &mut Export<GroupedSequence> {
        self.export.as_mut().unwrap_or_else(|| unreachable!("an export that has ended"))
    }

    /// Notes that the peer is sent `Commit`: from now on it may have the sequence.
    pub(super) fn tell(&mut self) {
        self.is_told = true;
    }

    /// Returns whether the peer may have a copy that only one side may continue with.
    pub(super) fn is_in_doubt(&self) -> bool {
        self.is_told && self.export.as_ref().is_some_and(Export::owns_sequence)
    }

    /// Ends the export after the peer has committed.
    pub(super) fn finish(mut self, shared_blocks: usize, carried: Carried) {
        let Some(export) = self.export.take() else { return };
        let finished = export.finish();
        if let Some(answer) = self.answer.take() {
            let _ = answer.send(Ok(Sent { shared_blocks, carried, finished }));
        }
    }

    /// Returns the export with an error: the peer has not committed, and never will.
    pub(super) fn fail(mut self, error: TransferError) {
        self.give_back(error);
    }

    fn give_back(&mut self, error: TransferError) {
        let Some(export) = self.export.take() else { return };
        let Some(answer) = self.answer.take() else {
            // Cached blocks, which return to the cache.
            return drop(export.cancel());
        };
        if let Err(Err(unread)) = answer.send(Err(SendError { error, export: Box::new(export) }))
            && unread.export.owns_sequence()
        {
            // `Pool::migrate` guarantees this for a dropped future.
            let (sequence, error) = (unread.export.sequence(), &unread.error);
            tracing::info!(?sequence, %error, "closed here: its request was dropped");
        }
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        let (node, reason) = (self.node.clone(), "this node has ended".to_owned());
        let in_doubt = self.is_in_doubt();
        self.give_back(match in_doubt {
            true => TransferError::InDoubt { node, reason },
            false => TransferError::Node { node, reason },
        });
    }
}

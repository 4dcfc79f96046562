//! The peers of a node as destinations of its pool.

use std::sync::Arc;

use kvpool::prefix::BlockHash;
use kvpool::transfer::{Export, Fetched, Remote, RemoteFuture, Remotes, SendError, Sent};
use kvpool::{GroupedSequence, TransferError};
use tokio::sync::{mpsc, oneshot};

use super::driver::Input;
use super::parcel::Parcel;
use crate::protocol::QUESTION_MAX;

pub(super) struct NodeRemotes {
    pub(super) inputs: mpsc::Sender<Input>,
}

struct NodeRemote {
    name: String,
    inputs: mpsc::Sender<Input>,
}

impl Remotes for NodeRemotes {
    fn remote(&self, name: &str) -> Option<Arc<dyn Remote>> {
        // The driver knows whether there is such a peer, and answers.
        Some(Arc::new(NodeRemote { name: name.to_owned(), inputs: self.inputs.clone() }))
    }
}

impl NodeRemote {
    fn stopped(&self) -> TransferError {
        TransferError::Node { node: self.name.clone(), reason: "this node has ended".into() }
    }
}

impl Remote for NodeRemote {
    fn send(&self, export: Export<GroupedSequence>) -> RemoteFuture<Result<Sent, SendError>> {
        let (name, inputs, stopped) = (self.name.clone(), self.inputs.clone(), self.stopped());
        Box::pin(async move {
            let permit = match inputs.reserve().await {
                Ok(permit) => permit,
                Err(_) => return Err(SendError { error: stopped, export: Box::new(export) }),
            };
            let (answer, answered) = oneshot::channel();
            permit.send(Input::Send(Box::new(Parcel::new(&name, export, Some(answer))), None));
            answered.await.unwrap_or_else(|_| unreachable!("a parcel was dropped without an answer"))
        })
    }

    fn fetch(&self, hashes: Vec<BlockHash>) -> RemoteFuture<Result<Fetched, TransferError>> {
        let (name, inputs, stopped) = (self.name.clone(), self.inputs.clone(), self.stopped());
        Box::pin(async move {
            let (answer, answered) = oneshot::channel();
            if inputs.send(Input::Fetch(name, hashes, answer)).await.is_err() {
                return Err(stopped);
            }
            answered.await.unwrap_or(Err(stopped))
        })
    }

    fn cached(&self, hashes: Vec<BlockHash>) -> RemoteFuture<Result<Vec<bool>, TransferError>> {
        let (name, inputs, stopped) = (self.name.clone(), self.inputs.clone(), self.stopped());
        Box::pin(async move {
            let mut all = Vec::with_capacity(hashes.len());
            for hashes in hashes.chunks(QUESTION_MAX) {
                let (cached, answered) = oneshot::channel();
                if inputs.send(Input::AskCached(name.clone(), hashes.to_vec(), cached)).await.is_err() {
                    return Err(stopped);
                }
                all.extend(answered.await.unwrap_or_else(|_| Err(stopped.clone()))?);
            }
            Ok(all)
        })
    }
}

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use kvpool::Sequence;
use tokio::sync::mpsc;

/// A sequence from a peer, open in this node's pool.
#[derive(Debug)]
pub struct Arrival {
    /// The sequence, with its id, tokens, committed length and priority.
    pub sequence: Sequence,
    /// Name of the sending node; for a copy in parts, that of the first part.
    pub from: String,
    /// Number of its blocks.
    pub blocks: usize,
}

/// Stream of arriving sequences, for the engine's scheduler. Ends with the node.
///
/// Sequences that are not taken stay open, and keep their blocks. Each needs a slot: a node refuses
/// further ones until the engine takes some. Dropping the stream closes those that were not taken,
/// and the node refuses all.
#[derive(Debug)]
pub struct Arrivals(pub(super) mpsc::Receiver<Arrival>);

impl Arrivals {
    /// Waits for the next one; `None` once the node has ended. Cancel safe.
    pub async fn recv(&mut self) -> Option<Arrival> {
        self.0.recv().await
    }

    /// Returns the next one, if any.
    pub fn try_recv(&mut self) -> Option<Arrival> {
        self.0.try_recv().ok()
    }
}

impl Stream for Arrivals {
    type Item = Arrival;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Arrival>> {
        self.0.poll_recv(cx)
    }
}

//! Sequences that arrive.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures_core::Stream;
use kvpool::Sequence;
use tokio::sync::mpsc;

/// A sequence that came from a peer. It is open in this node's pool.
#[derive(Debug)]
pub struct Arrival {
    /// The sequence, with the id, tokens, committed length and priority that it had.
    pub sequence: Sequence,
    /// Name of the node that it came from; of a copy in parts, the node with the first part.
    pub from: String,
    /// Number of its blocks.
    pub blocks: usize,
}

/// Arriving sequences, as a stream for the engine's scheduler. Ends with the node.
///
/// Sequences that are not taken stay open, and keep their blocks. There is a place for each
/// sequence on its way: a node refuses those for which there is none, until the engine takes some.
/// Once this is dropped, the node refuses all, and those that were not taken are closed.
#[derive(Debug)]
pub struct Arrivals(pub(super) mpsc::Receiver<Arrival>);

impl Arrivals {
    /// Waits for the next one; `None` once the node has ended.
    pub async fn recv(&mut self) -> Option<Arrival> {
        self.0.recv().await
    }

    /// Returns the next one if there is one.
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

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
    /// Name of the node that it came from.
    pub from: String,
    /// Number of its blocks.
    pub blocks: usize,
}

/// Arriving sequences, as a stream for the engine's scheduler. Ends with the node.
///
/// Sequences that are not taken stay open, and keep their blocks.
#[derive(Debug)]
pub struct Arrivals(pub(super) mpsc::UnboundedReceiver<Arrival>);

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

use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};

use futures_core::Stream;
use kvpool::{AnySequence, GroupedSequence, Sequence};
use tokio::sync::mpsc;

/// A sequence from a peer, open in this node's pool.
#[derive(Debug)]
pub struct Arrival<S: AnySequence = Sequence> {
    /// The sequence, with its id, tokens, committed length and priority.
    pub sequence: S,
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
pub struct Arrivals<S: AnySequence = Sequence> {
    arrived: mpsc::Receiver<Arrival<GroupedSequence>>,
    /// Whether sequences of several groups of layers are taken; others have one list.
    takes_grouped: Arc<AtomicBool>,
    of: PhantomData<fn() -> S>,
}

impl Arrivals {
    pub(super) fn new(
        arrived: mpsc::Receiver<Arrival<GroupedSequence>>,
        takes_grouped: Arc<AtomicBool>,
    ) -> Self {
        Self { arrived, takes_grouped, of: PhantomData }
    }

    /// Takes sequences of any number of groups of layers from now on, for an engine over such a
    /// pool; until then, those of several are refused.
    pub fn grouped(self) -> Arrivals<GroupedSequence> {
        let Self { arrived, takes_grouped, .. } = self;
        takes_grouped.store(true, Relaxed);
        Arrivals { arrived, takes_grouped, of: PhantomData }
    }
}

impl<S: AnySequence> Arrivals<S> {
    /// Waits for the next one; `None` once the node has ended. Cancel safe.
    pub async fn recv(&mut self) -> Option<Arrival<S>> {
        self.arrived.recv().await.map(of_kind)
    }

    /// Returns the next one, if any.
    pub fn try_recv(&mut self) -> Option<Arrival<S>> {
        self.arrived.try_recv().ok().map(of_kind)
    }
}

impl<S: AnySequence> Stream for Arrivals<S> {
    type Item = Arrival<S>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Arrival<S>>> {
        self.arrived.poll_recv(cx).map(|arrived| arrived.map(of_kind))
    }
}

fn of_kind<S: AnySequence>(arrived: Arrival<GroupedSequence>) -> Arrival<S> {
    let Arrival { sequence, from, blocks } = arrived;
    Arrival { sequence: S::of_lists(sequence), from, blocks }
}

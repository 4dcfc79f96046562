//! A future that waits for the end of batches, on any runtime, and keeps their pool alive.

use std::pin::Pin;
use std::task::{Context, Poll};

use crate::block::core::Blocks;
use crate::clock::{BatchRef, BatchSet, EndPlace};
use crate::ids::Ticket;

#[must_use = "futures do nothing unless they are polled"]
pub(crate) struct BatchesEnd {
    blocks: Blocks,
    batches: BatchSet,
    place: EndPlace,
}

impl Blocks {
    pub(crate) fn batches_end(&self, batches: BatchSet) -> BatchesEnd {
        BatchesEnd { blocks: self.clone(), batches, place: EndPlace::default() }
    }
}

impl BatchesEnd {
    /// Returns a batch of the set that has not ended, the newest one found.
    pub(crate) fn in_flight(&self) -> Option<Ticket> {
        self.blocks.clock().state(&self.batches).awaited().map(BatchRef::ticket)
    }
}

impl Future for BatchesEnd {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Self { blocks, batches, place } = &mut *self;
        blocks.clock().poll_ended(batches, place, context)
    }
}

impl Drop for BatchesEnd {
    fn drop(&mut self) {
        self.blocks.clock().leave_ends(&mut self.place);
    }
}

//! A lease: ownership of blocks that ends when it is dropped.

use smallvec::SmallVec;

use crate::block::Anchor;
use crate::ids::{BlockHandle, BlockId, FrameId, Run};
use crate::sync::Arc;

/// Owns one reference on each of its blocks, and releases it when dropped, on whichever thread that is.
///
/// Up to 16 blocks live in the lease itself; more are on the heap.
#[must_use = "dropping a lease frees its blocks"]
pub struct Lease {
    anchor: Arc<Anchor>,
    blocks: SmallVec<[BlockId; 16]>,
}

impl Lease {
    #[inline]
    pub(super) fn empty(anchor: Arc<Anchor>) -> Self {
        Self { anchor, blocks: SmallVec::new() }
    }

    #[inline]
    pub(super) fn push(&mut self, id: BlockId) {
        self.blocks.push(id);
    }

    /// The blocks, in the order in which they were handed out.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// A handle for each block. They stay good for as long as the lease lives.
    pub fn handles(&self) -> impl ExactSizeIterator<Item = BlockHandle> + '_ {
        self.blocks.iter().map(|&id| self.anchor.blocks().handle(id))
    }

    /// Where each block's bytes are now. A frame number stays true while the caller's batch is in flight.
    pub fn frames(&self) -> impl ExactSizeIterator<Item = FrameId> + '_ {
        self.blocks.iter().map(|&id| self.anchor.blocks().frame(id))
    }

    /// The frames as runs: what a transfer needs one descriptor each for.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        let mut frames = self.frames().peekable();
        std::iter::from_fn(move || {
            let mut run = Run { start: frames.next()?, len: 1 };
            while frames.next_if(|frame| frame.0 == run.end()).is_some() {
                run.len += 1;
            }
            Some(run)
        })
    }

    /// Frees the blocks from `keep` on: the tail of the lease.
    pub fn truncate(&mut self, keep: usize) {
        if keep < self.blocks.len() {
            self.anchor.blocks().release(&self.blocks[keep..]);
            self.blocks.truncate(keep);
        }
    }

    /// Splits off the blocks from `at` on into a lease of their own.
    ///
    /// # Panics
    ///
    /// If `at` is past the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        let tail = SmallVec::from_slice(&self.blocks[at..]);
        self.blocks.truncate(at);
        Self { anchor: Arc::clone(&self.anchor), blocks: tail }
    }

    /// Frees the first `count` blocks (or all, if there are fewer).
    pub fn free_first(&mut self, count: usize) {
        let count = count.min(self.blocks.len());
        self.anchor.blocks().release(&self.blocks[..count]);
        self.blocks.drain(..count);
    }

    /// Gives the references away as handles: what is not passed to [`Pool::free`](super::Pool::free) stays allocated.
    pub fn into_raw(mut self) -> Vec<BlockHandle> {
        let handles = self.handles().collect();
        self.blocks.clear();
        handles
    }

    /// The blocks, taken out of the lease; the references are the caller's.
    pub(super) fn take(mut self) -> SmallVec<[BlockId; 16]> {
        std::mem::take(&mut self.blocks)
    }

    pub(super) fn anchor(&self) -> &Arc<Anchor> {
        &self.anchor
    }
}

impl Drop for Lease {
    #[inline]
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            self.anchor.blocks().release(&self.blocks);
        }
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lease").field(&self.blocks).finish()
    }
}

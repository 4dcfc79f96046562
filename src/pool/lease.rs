//! A lease: ownership of blocks that ends when it is dropped.

use smallvec::SmallVec;

use crate::block::{Anchor, Blocks};
use crate::ids::{BlockHandle, BlockId, FrameId, PoolTag, Run};
use crate::sync::Arc;

use super::ids::LeasedIds;

/// Owns one reference on each of its blocks, and releases it when dropped, on whichever thread that is.
///
/// [`Pool::allocate`](super::Pool::allocate) gives a lease that borrows the pool, which costs no reference count;
/// [`Pool::allocate_owned`](super::Pool::allocate_owned) one that keeps what it needs of the pool alive, a
/// `Lease<'static>`, to be moved into threads, tasks and tables.
///
/// Up to 16 blocks live in the lease itself; more are on the heap.
#[must_use = "dropping a lease frees its blocks"]
pub struct Lease<'p> {
    root: Root<'p>,
    blocks: LeasedIds,
}

/// What the lease reaches its blocks through.
#[derive(Clone)]
pub(super) enum Root<'p> {
    Borrowed(&'p Blocks),
    Owned(Arc<Anchor>),
}

impl<'p> Lease<'p> {
    #[inline]
    pub(super) fn new(root: Root<'p>, blocks: LeasedIds) -> Self {
        Self { root, blocks }
    }

    #[inline]
    fn pool_blocks(&self) -> &Blocks {
        match &self.root {
            Root::Borrowed(blocks) => blocks,
            Root::Owned(anchor) => anchor.blocks(),
        }
    }

    /// A lease of the same blocks that borrows nothing.
    pub fn into_owned(mut self) -> Lease<'static> {
        let root = match &self.root {
            Root::Borrowed(blocks) => Root::Owned(blocks.anchor()),
            Root::Owned(anchor) => Root::Owned(Arc::clone(anchor)),
        };
        Lease { root, blocks: std::mem::take(&mut self.blocks) }
    }

    /// The blocks, in the order in which they were handed out.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// A handle for each block. They stay good for as long as the lease lives.
    pub fn handles(&self) -> impl ExactSizeIterator<Item = BlockHandle> + '_ {
        self.blocks.iter().map(|&id| self.pool_blocks().handle(id))
    }

    /// Where each block's bytes are now. A frame number stays true while the caller's batch is in flight.
    pub fn frames(&self) -> impl ExactSizeIterator<Item = FrameId> + '_ {
        self.blocks.iter().map(|&id| self.pool_blocks().frame(id))
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
            self.pool_blocks().release(&self.blocks[keep..]);
            self.blocks.truncate(keep);
        }
    }

    /// Splits off the blocks from `at` on into a lease of their own.
    ///
    /// # Panics
    ///
    /// If `at` is past the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        let tail = LeasedIds::more(SmallVec::from_slice(&self.blocks[at..]));
        self.blocks.truncate(at);
        Self { root: self.root.clone(), blocks: tail }
    }

    /// Frees the first `count` blocks (or all, if there are fewer).
    pub fn free_first(&mut self, count: usize) {
        let count = count.min(self.blocks.len());
        self.pool_blocks().release(&self.blocks[..count]);
        self.blocks.drop_first(count);
    }

    /// Gives the references away as handles: what is not passed to [`Pool::free`](super::Pool::free) stays allocated.
    pub fn into_raw(mut self) -> Vec<BlockHandle> {
        let handles = self.handles().collect();
        self.blocks.truncate(0);
        handles
    }

    /// The blocks, taken out of the lease; the references are the caller's.
    pub(super) fn take(mut self) -> LeasedIds {
        std::mem::take(&mut self.blocks)
    }

    pub(super) fn tag(&self) -> PoolTag {
        self.pool_blocks().tag()
    }
}

impl Drop for Lease<'_> {
    #[inline]
    fn drop(&mut self) {
        if !self.blocks.is_empty() {
            self.pool_blocks().release(&self.blocks);
        }
    }
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lease").field(&&*self.blocks).finish()
    }
}

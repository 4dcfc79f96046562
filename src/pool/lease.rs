//! A lease: ownership of blocks that ends when it is dropped.

use std::ops::RangeBounds;

use smallvec::SmallVec;

use crate::block::{Blocks, KeepAlive};
use crate::error::HandleError;
use crate::ids::{BlockHandle, BlockId, FrameId, PoolTag, Run};
use crate::sync::Arc;

use super::Pool;
use super::ids::LeasedIds;

/// Owns its blocks: has the only reference on each, and releases it when dropped, on whichever thread that is.
///
/// [Handles](Self::handles) of a lease's blocks can be asked about, and [pin](super::Pool::pin_scoped) them. Whatever else
/// changes a block goes through the lease: a handle that would free, share, seal or reopen it is refused
/// ([`HandleError::Guarded`]). [`into_raw`](Self::into_raw) and [`from_raw`](Self::from_raw) pass the references to handles
/// and back.
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
    Owned(Arc<KeepAlive>),
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
            Root::Owned(keep_alive) => keep_alive.blocks(),
        }
    }

    /// A lease of the same blocks that borrows nothing.
    pub fn into_owned(mut self) -> Lease<'static> {
        let root = match &self.root {
            Root::Borrowed(blocks) => Root::Owned(blocks.keep_alive()),
            Root::Owned(keep_alive) => Root::Owned(Arc::clone(keep_alive)),
        };
        Lease { root, blocks: std::mem::take(&mut self.blocks) }
    }

    /// The blocks, in the order in which they were handed out.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// A handle for each block, to look at it and to pin it. They stay good for as long as the lease lives.
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
            // Out of the lease first: a release may run a storage's or a waker's code, and that may panic.
            let tail = LeasedIds::more(SmallVec::from_slice(&self.blocks[keep..]));
            self.blocks.truncate(keep);
            self.pool_blocks().release_leased(&tail);
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
        // As in `truncate`.
        let first = LeasedIds::more(SmallVec::from_slice(&self.blocks[..count]));
        self.blocks.drop_first(count);
        self.pool_blocks().release_leased(&first);
    }

    /// Says that the bytes of these blocks, by their places in the lease, are final: nobody writes them from now on, and
    /// compaction may move them.
    ///
    /// # Panics
    ///
    /// If the range is not within the lease.
    pub fn seal(&mut self, places: impl RangeBounds<usize>) {
        let blocks = self.pool_blocks();
        let sealed = &self.blocks[(places.start_bound().cloned(), places.end_bound().cloned())];
        sealed.iter().for_each(|&id| blocks.seal_guarded(blocks.handle(id)));
        // A request that waits for a run can have them moved out of the way now.
        blocks.announce();
    }

    /// Makes a sealed block writable again, by its place in the lease: false if its bytes are just being moved, and so are
    /// being read; then write to another block.
    ///
    /// # Panics
    ///
    /// If `place` is past the end.
    pub fn reopen(&mut self, place: usize) -> bool {
        self.pool_blocks().reopen_guarded(self.blocks[place])
    }

    /// Gives the references away as handles: what is not passed to [`Pool::free`](super::Pool::free) stays allocated. Blocks
    /// that were allocated [pinned](super::AllocRequest::pinned) stay so until they are [unpinned](super::Pool::unpin).
    pub fn into_raw(mut self) -> Vec<BlockHandle> {
        let handles = self.handles().collect();
        self.pool_blocks().unguard(self.blocks.iter().copied());
        self.blocks.truncate(0);
        handles
    }

    /// Takes the references of handles over: the handles are then as those of any lease, and not to be freed.
    ///
    /// # Errors
    ///
    /// [`HandleError`]: [`Shared`](HandleError::Shared) for a block that has other references,
    /// [`Guarded`](HandleError::Guarded) for one that is a lease's or a sequence's, or in the list twice. Nothing was
    /// changed.
    pub fn from_raw(pool: &'p Pool, handles: &[BlockHandle]) -> Result<Self, HandleError> {
        let blocks = pool.blocks();
        let ids = handles.iter().map(|handle| handle.id).collect();
        blocks.guard(handles)?;
        Ok(Self::new(Root::Borrowed(blocks), LeasedIds::more(ids)))
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
            self.pool_blocks().release_leased(&self.blocks);
        }
    }
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lease").field(&&*self.blocks).finish()
    }
}

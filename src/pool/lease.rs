use std::mem::ManuallyDrop;
use std::ops::RangeBounds;

use crate::block::{Blocks, Exposure, Operation};
#[cfg(debug_assertions)]
use crate::block::{Noted, Site};
#[cfg(debug_assertions)]
use crate::error::AllocError;
use crate::error::HandleError;
use crate::ids::{BlockHandle, BlockId, FrameId, Run};
use crate::sync::call;

use super::leased::{Leased, Root};

/// Owns its blocks: holds a reference on each, and releases it when dropped, on any thread.
///
/// A lease borrows the pool or, as a `Lease<'static>`, keeps the needed part of it alive. The
/// [handles](Self::handles) of its blocks can be inspected and [pinned](super::Pool::pin_scoped);
/// all other changes go through the lease. The owner may write to the blocks until it
/// [seals](Self::seal) them. Compaction moves only sealed blocks: unsealed ones stay, even in the
/// way of a contiguous request. A lease takes two words: it holds one block inline, and more on the
/// heap.
#[must_use = "dropping a lease frees its blocks"]
pub struct Lease<'p>(ManuallyDrop<Leased<'p>>);

impl<'p> Lease<'p> {
    #[inline]
    pub(super) fn new(leased: Leased<'p>) -> Self {
        Self(ManuallyDrop::new(leased))
    }

    // Takes a reference to the result, which release builds would otherwise move through memory.
    #[cfg(debug_assertions)]
    pub(super) fn note_made(made: &Result<Self, AllocError>, site: Site) {
        made.iter().for_each(|lease| lease.note_site(site));
    }

    #[cfg(debug_assertions)]
    fn note_site(&self, site: Site) {
        self.pool_blocks().note_sites(Noted::Allocated, self.blocks().iter().copied(), site);
    }

    #[inline]
    fn pool_blocks(&self) -> &Blocks {
        self.0.pool_blocks()
    }

    /// Turns the lease into one that does not borrow the pool.
    pub fn into_owned(self) -> Lease<'static> {
        let keep_alive = match self.0.root() {
            Root::Borrowed(blocks) => blocks.keep_alive(),
            Root::Owned(keep_alive) => keep_alive,
        };
        Lease::new(self.take().rooted(Root::Owned(keep_alive)))
    }

    /// Returns the blocks, in the order of their allocation.
    #[inline]
    pub fn blocks(&self) -> &[BlockId] {
        self.0.ids()
    }

    /// Returns a handle for each block, for inspection and pins; valid while the lease lives.
    pub fn handles(&self) -> impl ExactSizeIterator<Item = BlockHandle> + '_ {
        self.0.note_seen();
        self.blocks().iter().map(|&id| self.pool_blocks().handle(id))
    }

    /// Returns the current frame of each block, valid while the caller's batch is in flight.
    pub fn frames(&self) -> impl ExactSizeIterator<Item = FrameId> + '_ {
        self.blocks().iter().map(|&id| self.pool_blocks().frame(id))
    }

    /// Returns the frames as runs; a transfer needs one descriptor per run.
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

    /// Frees the blocks from index `keep` on.
    pub fn truncate(&mut self, keep: usize) {
        let _call = call();
        if keep < self.blocks().len() {
            // First: a release may run code of a storage or waker, which may panic.
            let tail = self.0.split_off(keep);
            self.pool_blocks().release_exposed(tail.ids(), tail.exposure());
        }
    }

    /// Splits the blocks from index `at` on into another lease. Panics if `at` is past the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        Self::new(self.0.split_off(at))
    }

    /// Returns a second lease of the same blocks, which stay allocated until both are dropped.
    /// Fails if a block has the maximum of 8,191 references. Neither lease can
    /// [reopen](Self::reopen) a block while the other has it. Both may write to open blocks, in an
    /// order that the engine ensures.
    pub fn share(&self) -> Result<Self, HandleError> {
        let _call = call();
        self.pool_blocks().share(self.blocks())?;
        Ok(Self::new(self.0.shared()))
    }

    /// Marks the bytes of the blocks in this index range as final, so that compaction may move
    /// them. All writes to them, also through leases that [share](Self::share) the blocks, must
    /// precede this call. Panics if the range is not within the lease.
    pub fn seal(&mut self, places: impl RangeBounds<usize>) {
        let _call = call();
        let blocks = self.pool_blocks();
        let sealed = &self.blocks()[(places.start_bound().cloned(), places.end_bound().cloned())];
        sealed.iter().for_each(|&id| blocks.seal(blocks.handle(id)));
        // A waiting request for a run may now be able to move these blocks.
        blocks.announce();
    }

    /// Makes the sealed block at index `place` writable again. Returns false if another lease
    /// [shares](Self::share) it, or a move is reading its bytes or just ends; write to another block then.
    /// Panics if `place` is past the end.
    pub fn reopen(&mut self, place: usize) -> bool {
        let _call = call();
        self.pool_blocks().reopen(self.blocks()[place])
    }

    /// Takes the blocks and their references out of the lease.
    pub(super) fn take(self) -> Leased<'p> {
        let mut lease = ManuallyDrop::new(self);
        // SAFETY: the lease is not dropped, so its field is moved out once.
        unsafe { ManuallyDrop::take(&mut lease.0) }
    }
}

impl Drop for Lease<'_> {
    #[inline]
    fn drop(&mut self) {
        let _call = call();
        match &*self.0 {
            // A case of its own: the id stays in a register, and nothing else is left to drop.
            Leased::One { id, seen, blocks } if seen.exposure() == Exposure::Private => {
                blocks.release_unseen(*id)
            }
            _ => drop_more(&mut self.0),
        }
    }
}

#[inline(never)]
fn drop_more(leased: &mut ManuallyDrop<Leased<'_>>) {
    // SAFETY: called once, by the drop of the lease.
    let leased = unsafe { ManuallyDrop::take(leased) };
    let blocks = leased.pool_blocks();
    let _timing = leased.is_timed().then(|| blocks.latencies().time(Operation::Free));
    blocks.release_exposed(leased.ids(), leased.exposure());
}

impl std::fmt::Debug for Lease<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Lease").field(&self.blocks()).finish()
    }
}

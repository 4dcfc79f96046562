//! Allocation, from the current thread's cache or from that of a pool handle.
//!
//! Both have a short path for one block, which keeps its id in registers, and a long path for all
//! other requests. The short path is skipped when it is the allocation's turn to be timed.

use smallvec::SmallVec;

#[cfg(debug_assertions)]
use crate::block::Site;
use crate::block::{AllocRequest, INLINE_BLOCKS, KeepAlive, Operation, Owned};
use crate::error::AllocError;
use crate::ids::{BlockHandle, BlockId};
use crate::sync::Arc;

use super::lease::Lease;
use super::leased::{Leased, Root, Seen, Several};
use super::pool::Pool;

/// A thread cache from which requests take their blocks.
///
/// `GUARDED` blocks are for leases, others for handles.
pub(super) trait BlockSource {
    /// Returns the pool of the cache.
    fn pool(&self) -> &Pool;

    /// Returns a reference that keeps the pool's blocks alive.
    fn keep_alive(&self) -> Arc<KeepAlive>;

    /// Takes one block from the cache, if it has one.
    fn take_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<Owned<'_>>;

    /// Takes a few blocks from the cache, and passes each to `take`, with its index. False if the
    /// cache has fewer than requested; then none was taken.
    fn take_inline<'a, const GUARDED: bool>(
        &'a self,
        request: &AllocRequest,
        take: impl FnMut(usize, Owned<'a>),
    ) -> bool;

    /// Takes any number of blocks, from the cache or from the rest of the pool.
    fn take_any<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError>;

    /// Allocates one block on the short path.
    #[inline(always)]
    fn one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<Owned<'_>> {
        if self.pool().0.sampler.is_due(Operation::Allocate) || request.blocks != 1 {
            None
        } else {
            self.take_one::<GUARDED>(request)
        }
    }

    /// Allocates one block for a lease on the long path.
    #[inline(never)]
    fn one_on_the_long_path(&self, request: &AllocRequest) -> Result<BlockId, AllocError> {
        let mut one = BlockId(0);
        if !self.take_inline::<true>(request, |_, owned| one = owned.id) {
            self.take_any::<true>(request, &mut |id| one = id)?;
        }
        Ok(one)
    }

    /// Allocates one block and times it. The release is timed too, which a lease of one block has
    /// no room to note.
    #[cold]
    #[inline(never)]
    fn one_timed<'p>(&self, request: &AllocRequest, root: Root<'p>) -> Result<Box<Several<'p>>, AllocError> {
        // Made for the sake of the timing, and not timed.
        let mut several = Several::new(root);
        several.time();
        let _timing = self.pool().0.sampler.time(Operation::Allocate);
        several.inline_places()[0] = self.one_on_the_long_path(request)?;
        several.truncate(1);
        Ok(several)
    }

    /// Allocates any number of blocks for a lease on the long path.
    #[inline(never)]
    fn several<'p>(&self, request: &AllocRequest, root: Root<'p>) -> Result<Box<Several<'p>>, AllocError> {
        let timing = self.pool().0.sampler.time(Operation::Allocate);
        // The list comes first: the ids are written where they stay.
        let mut several = Several::new(root);
        if timing.is_on() {
            several.time();
        }
        let places = several.inline_places();
        if self.take_inline::<true>(request, |i, owned| places[i] = owned.id) {
            several.truncate(request.blocks);
        } else {
            several.truncate(0);
            self.take_any::<true>(request, &mut |id| several.push(id))?;
        }
        Ok(several)
    }

    /// Allocates any number of blocks on the long path, as handles.
    #[inline(never)]
    fn many_handles(&self, request: &AllocRequest, out: &mut Vec<BlockHandle>) -> Result<(), AllocError> {
        let _timing = self.pool().0.sampler.time(Operation::Allocate);
        let tag = self.pool().tag();
        // First, so that a failure to allocate loses no block.
        out.reserve(INLINE_BLOCKS);
        if !self.take_inline::<false>(request, |_, owned| out.push(owned.handle(tag))) {
            let mut ids = SmallVec::<[BlockId; INLINE_BLOCKS]>::new();
            self.take_any::<false>(request, &mut |id| ids.push(id))?;
            out.extend(ids.iter().map(|&id| self.pool().0.blocks.handle(id)));
        }
        Ok(())
    }

    /// Allocates blocks for a lease, which reaches them through `root`.
    // The long paths return the parts of a lease: a whole one would be returned in memory, and then
    // that of the short path would be moved through the same memory.
    #[inline(always)]
    fn lease<'p>(
        &self,
        request: &AllocRequest,
        root: impl FnOnce() -> Root<'p>,
    ) -> Result<Lease<'p>, AllocError> {
        let leased = if let Some(owned) = self.one::<true>(request) {
            Leased::one(root(), owned.id, Seen::new(false))
        } else if request.blocks != 1 {
            Leased::Several(self.several(request, root())?)
        } else if self.pool().0.sampler.is_timed(Operation::Allocate) {
            Leased::Several(self.one_timed(request, root())?)
        } else {
            Leased::one(root(), self.one_on_the_long_path(request)?, Seen::new(false))
        };
        Ok(Lease::new(leased))
    }

    /// Allocates blocks for a lease that borrows the pool.
    #[inline(always)]
    fn borrowed(&self, request: &AllocRequest) -> Result<Lease<'_>, AllocError> {
        self.lease(request, || Root::Borrowed(&self.pool().0.blocks))
    }

    /// Allocates blocks for a lease that does not borrow the pool.
    #[inline(always)]
    fn owned(&self, request: &AllocRequest) -> Result<Lease<'static>, AllocError> {
        self.lease(request, || Root::Owned(self.keep_alive()))
    }
}

/// The current thread's cache.
impl BlockSource for Pool {
    #[inline(always)]
    fn pool(&self) -> &Pool {
        self
    }

    #[inline]
    fn keep_alive(&self) -> Arc<KeepAlive> {
        self.0.blocks.keep_alive()
    }

    #[inline(always)]
    fn take_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<Owned<'_>> {
        self.0.blocks.allocate_one::<GUARDED>(request)
    }

    #[inline]
    fn take_inline<'a, const GUARDED: bool>(
        &'a self,
        request: &AllocRequest,
        take: impl FnMut(usize, Owned<'a>),
    ) -> bool {
        self.0.blocks.allocate_inline::<GUARDED>(request, take)
    }

    fn take_any<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        if GUARDED {
            self.0.blocks.allocate_guarded(request, None, take)?;
            // Nothing lists the blocks of a lease.
            self.0.blocks.count_further(request.blocks as isize);
            Ok(())
        } else {
            self.0.blocks.allocate(request, take)
        }
    }
}

impl Pool {
    /// Allocates blocks for a lease that borrows the pool. Never waits, and takes no lock.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline]
    pub fn allocate(&self, request: AllocRequest) -> Result<Lease<'_>, AllocError> {
        let lease = self.borrowed(&request);
        #[cfg(debug_assertions)]
        Lease::note_made(&lease, Site::here());
        lease
    }

    /// Allocates blocks for a lease that does not borrow the pool, at the cost of a reference
    /// count.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline]
    pub fn allocate_owned(&self, request: AllocRequest) -> Result<Lease<'static>, AllocError> {
        let lease = self.owned(&request);
        #[cfg(debug_assertions)]
        Lease::note_made(&lease, Site::here());
        lease
    }

    /// Allocates blocks as handles, appended to `out`, for an engine that keeps its own tables.
    ///
    /// Blocks stay allocated until their handles are passed to [`free`](Self::free).
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool and `out` are unchanged.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline]
    pub fn allocate_raw(&self, request: AllocRequest, out: &mut Vec<BlockHandle>) -> Result<(), AllocError> {
        #[cfg(debug_assertions)]
        let before = out.len();
        // `PoolHandle` has the same body: shared through the trait, it takes 30 ns instead of 25
        // (`cargo bench -p kvpool-benches --bench blocks`).
        match self.one::<false>(&request) {
            Some(owned) => out.push(owned.handle(self.tag())),
            None => self.many_handles(&request, out)?,
        }
        #[cfg(debug_assertions)]
        self.0.blocks.note_handles(&out[before..], Site::here());
        Ok(())
    }
}

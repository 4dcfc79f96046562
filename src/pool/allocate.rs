//! Allocation, from the current thread's cache or from that of a pool handle.
//!
//! Both have a short path for one block, which keeps its id in registers, and a long path for all
//! other requests. The short path is skipped when it is the allocation's turn to be timed.

use smallvec::SmallVec;

use crate::block::{AllocRequest, INLINE_BLOCKS, KeepAlive};
use crate::error::AllocError;
use crate::ids::{BlockHandle, BlockId};
use crate::sync::Arc;

use super::ids::LeasedIds;
use super::lease::{Lease, Root};
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
    fn take_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<BlockId>;

    /// Takes a few blocks from the cache, if it has as many as requested.
    fn take_inline<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        out: &mut [BlockId; INLINE_BLOCKS],
    ) -> bool;

    /// Takes any number of blocks, from the cache or from the rest of the pool.
    fn take_any<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError>;

    /// Allocates one block on the short path.
    #[inline(always)]
    fn one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<BlockId> {
        if self.pool().0.sampler.is_due() || request.blocks != 1 {
            None
        } else {
            self.take_one::<GUARDED>(request)
        }
    }

    /// Allocates any number of blocks on the long path.
    #[inline(never)]
    fn many<const GUARDED: bool>(&self, request: &AllocRequest) -> Result<LeasedIds, AllocError> {
        self.pool().0.sampler.time(|| {
            let mut few = [BlockId(0); INLINE_BLOCKS];
            if self.take_inline::<GUARDED>(request, &mut few) {
                return Ok(LeasedIds::few(few, request.blocks));
            }
            let mut ids = SmallVec::new();
            self.take_any::<GUARDED>(request, &mut |id| ids.push(id))?;
            Ok(LeasedIds::more(ids))
        })
    }

    /// Allocates blocks for a lease, which reaches them through `root`.
    // One arm per path: merging the ids before the lease is made would move a single id to memory.
    #[inline(always)]
    fn lease<'p>(
        &self,
        request: &AllocRequest,
        root: impl FnOnce() -> Root<'p>,
    ) -> Result<Lease<'p>, AllocError> {
        match self.one::<true>(request) {
            Some(id) => Ok(Lease::new(root(), LeasedIds::one(id))),
            None => {
                let ids = self.many::<true>(request)?;
                Ok(Lease::new(root(), ids))
            }
        }
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
    fn take_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<BlockId> {
        self.0.blocks.allocate_one::<GUARDED>(request)
    }

    #[inline]
    fn take_inline<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        out: &mut [BlockId; INLINE_BLOCKS],
    ) -> bool {
        self.0.blocks.allocate_inline::<GUARDED>(request, out)
    }

    fn take_any<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        if GUARDED {
            self.0.blocks.allocate_guarded(request, None, take)
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
    #[inline]
    pub fn allocate(&self, request: AllocRequest) -> Result<Lease<'_>, AllocError> {
        self.borrowed(&request)
    }

    /// Allocates blocks for a lease that does not borrow the pool, at the cost of a reference
    /// count.
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[inline]
    pub fn allocate_owned(&self, request: AllocRequest) -> Result<Lease<'static>, AllocError> {
        self.owned(&request)
    }

    /// Allocates blocks as handles, appended to `out`, for an engine that keeps its own tables.
    ///
    /// Blocks stay allocated until their handles are passed to [`free`](Self::free).
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool and `out` are unchanged.
    #[inline]
    pub fn allocate_raw(&self, request: AllocRequest, out: &mut Vec<BlockHandle>) -> Result<(), AllocError> {
        // `PoolHandle` has the same body: shared through the trait, it takes 30 ns instead of 25
        // (`cargo bench -p kvpool-benches --bench blocks`).
        match self.one::<false>(&request) {
            Some(id) => out.push(self.0.blocks.handle(id)),
            None => {
                let ids = self.many::<false>(&request)?;
                out.extend(ids.iter().map(|&id| self.0.blocks.handle(id)));
            }
        }
        Ok(())
    }
}

//! A pool handle: an explicit thread cache, for a task that moves between threads.

use std::cell::Cell;
use std::marker::PhantomData;

use smallvec::SmallVec;

use crate::block::{AllocRequest, CacheHandle, INLINE_BLOCKS};
use crate::error::{AllocError, HandleError};
use crate::ids::{BlockHandle, BlockId};
use crate::sync::Arc;

use super::ids::LeasedIds;
use super::lease::Root;
use super::{Lease, Pool};

/// Allocates and frees through its own magazines.
///
/// It is `Send` and not `Sync`: it moves with its task, and may be held across an `await`. Dropping
/// it returns its magazines to the pool. While its task sleeps, other threads may take the contents
/// of the magazines.
pub struct PoolHandle {
    pool: Pool,
    cache_handle: CacheHandle,
    /// Only one thread at a time may use the cache.
    not_sync: PhantomData<Cell<()>>,
}

impl PoolHandle {
    pub(super) fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), cache_handle: CacheHandle::new(pool.blocks()), not_sync: PhantomData }
    }

    /// Allocates like [`Pool::allocate`].
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[inline]
    pub fn allocate(&self, request: AllocRequest) -> Result<Lease<'_>, AllocError> {
        match self.allocate_one::<true>(&request) {
            Some(id) => Ok(Lease::new(Root::Borrowed(self.pool.blocks()), LeasedIds::one(id))),
            None => Ok(Lease::new(Root::Borrowed(self.pool.blocks()), self.allocate_ids::<true>(&request)?)),
        }
    }

    /// Allocates like [`Pool::allocate_owned`].
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[inline]
    pub fn allocate_owned(&self, request: AllocRequest) -> Result<Lease<'static>, AllocError> {
        let ids = match self.allocate_one::<true>(&request) {
            Some(id) => LeasedIds::one(id),
            None => self.allocate_ids::<true>(&request)?,
        };
        Ok(Lease::new(Root::Owned(Arc::clone(self.cache_handle.keep_alive())), ids))
    }

    /// Allocates like [`Pool::allocate_raw`].
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool and `out` are unchanged.
    #[inline]
    pub fn allocate_raw(&self, request: AllocRequest, out: &mut Vec<BlockHandle>) -> Result<(), AllocError> {
        match self.allocate_one::<false>(&request) {
            Some(id) => out.push(self.pool.blocks().handle(id)),
            None => {
                let ids = self.allocate_ids::<false>(&request)?;
                out.extend(ids.iter().map(|&id| self.pool.blocks().handle(id)));
            }
        }
        Ok(())
    }

    /// One block for a lease (guarded), or for a handle.
    #[inline]
    fn allocate_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<BlockId> {
        if self.pool.0.sampler.is_due() || request.blocks != 1 {
            None
        } else {
            self.cache_handle.allocate_one::<GUARDED>(request)
        }
    }

    /// Any number of them.
    #[inline(never)]
    fn allocate_ids<const GUARDED: bool>(&self, request: &AllocRequest) -> Result<LeasedIds, AllocError> {
        self.pool.0.sampler.time(|| {
            let mut fast_path = [BlockId(0); INLINE_BLOCKS];
            if self.cache_handle.allocate_inline::<GUARDED>(request, &mut fast_path) {
                return Ok(LeasedIds::fast_path(fast_path, request.blocks));
            }
            let mut ids = SmallVec::new();
            self.cache_handle.allocate(request, GUARDED, &mut |id| ids.push(id))?;
            Ok(LeasedIds::more(ids))
        })
    }

    /// Frees like [`Pool::free`].
    ///
    /// # Errors
    ///
    /// As [`Pool::free`].
    #[inline]
    pub fn free(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        self.cache_handle.free(handles)
    }

    /// Releases a lease into this handle's magazines instead of those of the current thread.
    ///
    /// A lease of another pool is dropped as usual.
    pub fn release(&self, lease: Lease<'_>) {
        if lease.tag() == self.pool.tag() {
            self.cache_handle.release_leased(&lease.take());
        }
    }

    /// Returns the magazines to the pool, so that no free block is stranded here while the task
    /// sleeps.
    pub fn flush(&self) {
        self.cache_handle.flush();
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl std::fmt::Debug for PoolHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolHandle").field("pool", &self.pool).finish_non_exhaustive()
    }
}

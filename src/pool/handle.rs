//! A pool handle: an explicit thread cache, for a task that moves between threads.

use std::cell::Cell;
use std::marker::PhantomData;

#[cfg(debug_assertions)]
use crate::block::Site;
use crate::block::{AllocRequest, CacheHandle, KeepAlive, Owned};
use crate::error::{AllocError, HandleError};
use crate::ids::{BlockHandle, BlockId};
use crate::sync::Arc;

use super::allocate::BlockSource;
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

impl Pool {
    /// Returns a new pool handle, for a task that moves between threads, or to avoid thread-locals.
    pub fn handle(&self) -> PoolHandle {
        PoolHandle::new(self)
    }
}

/// The handle's own cache.
impl BlockSource for PoolHandle {
    #[inline(always)]
    fn pool(&self) -> &Pool {
        &self.pool
    }

    #[inline]
    fn keep_alive(&self) -> Arc<KeepAlive> {
        Arc::clone(self.cache_handle.keep_alive())
    }

    #[inline(always)]
    fn take_one<const GUARDED: bool>(&self, request: &AllocRequest) -> Option<Owned<'_>> {
        self.cache_handle.allocate_one::<GUARDED>(request)
    }

    #[inline]
    fn take_inline<'a, const GUARDED: bool>(
        &'a self,
        request: &AllocRequest,
        take: impl FnMut(usize, Owned<'a>),
    ) -> bool {
        self.cache_handle.allocate_inline::<GUARDED>(request, take)
    }

    fn take_any<const GUARDED: bool>(
        &self,
        request: &AllocRequest,
        take: &mut dyn FnMut(BlockId),
    ) -> Result<(), AllocError> {
        self.cache_handle.allocate(request, GUARDED, take)
    }
}

impl PoolHandle {
    fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), cache_handle: CacheHandle::new(pool.blocks()), not_sync: PhantomData }
    }

    /// Allocates like [`Pool::allocate`].
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

    /// Allocates like [`Pool::allocate_owned`].
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

    /// Allocates like [`Pool::allocate_raw`].
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool and `out` are unchanged.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline]
    pub fn allocate_raw(&self, request: AllocRequest, out: &mut Vec<BlockHandle>) -> Result<(), AllocError> {
        #[cfg(debug_assertions)]
        let before = out.len();
        match self.one::<false>(&request) {
            Some(owned) => out.push(owned.handle(self.pool.tag())),
            None => self.many_handles(&request, out)?,
        }
        #[cfg(debug_assertions)]
        self.pool.blocks().note_handles(&out[before..], Site::here());
        Ok(())
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
            let leased = lease.take();
            self.cache_handle.release_leased(leased.ids(), leased.owner());
        }
    }

    /// Returns the magazines to the pool.
    ///
    /// Call it before the task sleeps, so that no free block is stranded in them.
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

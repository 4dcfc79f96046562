//! An explicit handle: a cache of its own, for a task that moves between threads.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::block::{AllocRequest, Resident};
use crate::error::{AllocError, HandleError};
use crate::ids::BlockHandle;
use crate::sync::Arc;

use super::{Lease, Pool};

/// Allocates and frees through magazines of its own. `Send` and not `Sync`: it goes where its task goes, and may be
/// held across an `await`. When it is dropped its magazines go back to the pool; while it sleeps, others may take
/// what is in them.
pub struct PoolHandle {
    pool: Pool,
    resident: Resident,
    /// One thread at a time.
    not_sync: PhantomData<Cell<()>>,
}

impl PoolHandle {
    pub(super) fn new(pool: &Pool) -> Self {
        Self { pool: pool.clone(), resident: Resident::new(pool.blocks()), not_sync: PhantomData }
    }

    /// As [`Pool::allocate`].
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool is unchanged.
    #[inline]
    pub fn allocate(&self, request: AllocRequest) -> Result<Lease, AllocError> {
        let mut lease = Lease::empty(Arc::clone(self.resident.anchor()));
        self.pool.0.sampler.time(|| self.resident.allocate(&request, |id| lease.push(id)))?;
        Ok(lease)
    }

    /// As [`Pool::allocate_raw`].
    ///
    /// # Errors
    ///
    /// [`AllocError`]; the pool and `out` are unchanged.
    #[inline]
    pub fn allocate_raw(&self, request: AllocRequest, out: &mut Vec<BlockHandle>) -> Result<(), AllocError> {
        let blocks = self.pool.blocks();
        self.pool.0.sampler.time(|| self.resident.allocate(&request, |id| out.push(blocks.handle(id))))
    }

    /// As [`Pool::free`].
    ///
    /// # Errors
    ///
    /// As [`Pool::free`].
    #[inline]
    pub fn free(&self, handles: &[BlockHandle]) -> Result<(), HandleError> {
        self.resident.free(handles)
    }

    /// Drops a lease into this handle's magazines, rather than into those of the thread that it is on. A lease of
    /// another pool goes back to its own.
    pub fn release(&self, lease: Lease) {
        if lease.anchor().blocks().tag() == self.pool.tag() {
            self.resident.release(&lease.take());
        }
    }

    /// Gives the magazines back to the pool, so that nothing is stranded here while the task sleeps.
    pub fn flush(&self) {
        self.resident.flush();
    }

    /// The pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }
}

impl std::fmt::Debug for PoolHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PoolHandle").field("pool", &self.pool).finish_non_exhaustive()
    }
}

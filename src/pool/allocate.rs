//! Allocation: a short path for one block, which keeps its id in registers, and a long path for all
//! other requests and for allocations to be timed.

#[cfg(debug_assertions)]
use crate::block::Site;
use crate::block::{AllocRequest, Operation};
use crate::error::AllocError;
use crate::ids::BlockId;
use crate::sync::call;

use super::lease::Lease;
use super::leased::{Leased, Root, Seen, Several};
use super::pool::Pool;

impl Pool {
    #[inline(always)]
    fn one(&self, request: &AllocRequest) -> Option<BlockId> {
        if self.0.sampler.is_due(Operation::Allocate) || request.blocks != 1 {
            None
        } else {
            self.0.blocks.allocate_one(request).map(|owned| owned.id)
        }
    }

    #[inline(never)]
    fn one_on_the_long_path(&self, request: &AllocRequest) -> Result<BlockId, AllocError> {
        let mut one = BlockId(0);
        if !self.0.blocks.allocate_inline(request, |_, owned| one = owned.id) {
            self.0.blocks.allocate(request, &mut |id| one = id)?;
        }
        Ok(one)
    }

    /// Allocates one block and times it. Returns a list, since a lease of one block cannot record
    /// that its release is timed too.
    #[cold]
    #[inline(never)]
    fn one_timed<'p>(&self, request: &AllocRequest, root: Root<'p>) -> Result<Box<Several<'p>>, AllocError> {
        // Outside the timing.
        let mut several = Several::new(root);
        several.time();
        let _timing = self.0.sampler.time(Operation::Allocate);
        several.inline_places()[0] = self.one_on_the_long_path(request)?;
        several.truncate(1);
        Ok(several)
    }

    #[inline(never)]
    fn several<'p>(&self, request: &AllocRequest, root: Root<'p>) -> Result<Box<Several<'p>>, AllocError> {
        let timing = self.0.sampler.time(Operation::Allocate);
        // First, so that the ids are written in place.
        let mut several = Several::new(root);
        if timing.is_on() {
            several.time();
        }
        let places = several.inline_places();
        if self.0.blocks.allocate_inline(request, |i, owned| places[i] = owned.id) {
            several.truncate(request.blocks);
        } else {
            several.truncate(0);
            self.0.blocks.allocate(request, &mut |id| several.push(id))?;
        }
        Ok(several)
    }

    // The long paths return the parts of a lease: a whole lease would be returned in memory, and
    // the short path's result would then be moved through the same memory.
    #[inline(always)]
    fn lease<'p>(
        &self,
        request: &AllocRequest,
        root: impl FnOnce() -> Root<'p>,
    ) -> Result<Lease<'p>, AllocError> {
        let leased = if let Some(id) = self.one(request) {
            Leased::one(root(), id, Seen::new(false))
        } else if request.blocks != 1 {
            Leased::Several(self.several(request, root())?)
        } else if self.0.sampler.is_timed(Operation::Allocate) {
            Leased::Several(self.one_timed(request, root())?)
        } else {
            Leased::one(root(), self.one_on_the_long_path(request)?, Seen::new(false))
        };
        Ok(Lease::new(leased))
    }

    /// Allocates blocks for a lease that borrows the pool. Never waits, and takes no lock.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline]
    pub fn allocate(&self, request: AllocRequest) -> Result<Lease<'_>, AllocError> {
        let _call = call();
        let lease = self.lease(&request, || Root::Borrowed(&self.0.blocks));
        #[cfg(debug_assertions)]
        Lease::note_made(&lease, Site::here());
        lease
    }

    /// Allocates blocks for a lease that owns a reference-counted pointer to the pool.
    #[cfg_attr(debug_assertions, track_caller)]
    #[inline]
    pub fn allocate_owned(&self, request: AllocRequest) -> Result<Lease<'static>, AllocError> {
        let _call = call();
        let lease = self.lease(&request, || Root::Owned(self.0.blocks.keep_alive()));
        #[cfg(debug_assertions)]
        Lease::note_made(&lease, Site::here());
        lease
    }
}

//! Pages of the host that are registered with the driver: the device reads and writes them itself.
//!
//! Registered *portably*: all devices of the process may access the pages. Child processes do not get
//! them: after a fork, the parent's next write to a page that the child shares would get a copy, and
//! the device would go on with the child's page.
//!
//! **The pages stay registered, and their addresses reserved, while a copy may access them.** A copy
//! holds the registration until its end is known. If the context is stuck, a copy may go on at any
//! time, and if the driver refuses to forget the pages, it would take a later mapping at these
//! addresses for them: in both cases the addresses are never given back.

use std::any::Any;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult};

use kvpool::StorageError;
use kvpool::storage::backend::{Pages, Refusal};

use super::context::Context;
use super::host_pages::set_inherited;

/// Registered pages; see the [module](self).
pub(super) struct Registered {
    context: Arc<Context>,
    /// Kept from child processes.
    hidden: Vec<Range<usize>>,
    /// Registered.
    ranges: Vec<Range<usize>>,
    memory: Option<Arc<dyn Any + Send + Sync>>,
}

impl Registered {
    /// Registers all of the pages, which takes memory for those that have none.
    ///
    /// # Errors
    /// [`Refusal::ForNow`] if there is too little memory, or the gates do not open; [`Refusal::Final`],
    /// for example for pages that other code has registered; [`Refusal::OfCaller`] if the device is
    /// lost. No page is registered.
    pub(super) fn new(context: &Arc<Context>, pages: Pages) -> Result<Self, Refusal> {
        let refusal = |error: StorageError| match error {
            error if error.is_lost() => Refusal::OfCaller,
            _ => Refusal::ForNow,
        };
        let _passes = context.pass_all().map_err(refusal)?;
        let _entered = context.enter().map_err(refusal)?;
        let (hidden, ranges, memory) = (Vec::new(), Vec::new(), Some(pages.memory));
        let mut all = Self { context: context.clone(), hidden, ranges, memory };
        for range in pages.ranges {
            // Before: a fork in between would share the pages.
            if !set_inherited(&range, false) {
                return Err(Refusal::ForNow);
            }
            all.hidden.push(range.clone());
            let at = ptr::with_exposed_provenance_mut(range.start);
            // Kernels access them, too.
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            // SAFETY: mapped memory, which stays mapped while it is registered. The context is
            // current.
            let made = unsafe { sys::cuMemHostRegister_v2(at, range.len(), flags) };
            match made {
                CUresult::CUDA_SUCCESS => all.ranges.push(range),
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(Refusal::ForNow),
                // Drivers may refuse by any error. If the context is lost, the next query will tell.
                _ => return Err(Refusal::Final),
            }
        }
        Ok(all)
    }

    /// Returns false if the device that has registered the pages is lost.
    pub(super) fn is_good(&self) -> bool {
        self.context.good().is_ok()
    }

    /// Unregisters all pages. Returns false if that is not certain.
    fn forget(&self) -> bool {
        if self.context.is_stuck() {
            return false;
        }
        let Ok(_passes) = self.context.pass_all() else { return false };
        let _entered = self.context.enter_even_if_lost();
        self.ranges.iter().all(|range| {
            let at = ptr::with_exposed_provenance_mut(range.start);
            // SAFETY: registered here, and no copy accesses the pages any more.
            unsafe { sys::cuMemHostUnregister(at) == CUresult::CUDA_SUCCESS }
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.ranges.is_empty() && !self.forget() {
            return std::mem::forget(self.memory.take());
        }
        for range in &self.hidden {
            set_inherited(range, true);
        }
    }
}

//! Pages of the host that are registered with the driver: the device reads and writes them itself.
//!
//! Registered *portably*: all devices of the process may access the pages.
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

use crate::error::StorageError;
use crate::storage::Pages;

use super::context::Context;

/// Registered pages; see the [module](self).
pub(super) struct Registered {
    context: Arc<Context>,
    ranges: Vec<Range<usize>>,
    memory: Option<Arc<dyn Any + Send + Sync>>,
}

impl Registered {
    /// Registers all of the pages, which takes memory for those that have none.
    ///
    /// # Errors
    /// [`StorageError::Device`], for example for pages that other code has registered;
    /// [`StorageError::DeviceLost`]. No page is registered.
    pub(super) fn new(context: &Arc<Context>, pages: Pages) -> Result<Self, StorageError> {
        let _entered = context.enter()?;
        let mut all = Self { context: context.clone(), ranges: Vec::new(), memory: Some(pages.memory) };
        for range in pages.ranges {
            let at = ptr::with_exposed_provenance_mut(range.start);
            // SAFETY: mapped memory, which stays mapped while it is registered. The context is
            // current.
            let made =
                unsafe { sys::cuMemHostRegister_v2(at, range.len(), sys::CU_MEMHOSTREGISTER_PORTABLE) };
            context.check_optional(made, "registering memory of the host")?;
            all.ranges.push(range);
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
        let _entered = self.context.enter_anyhow();
        self.ranges.iter().all(|range| {
            let at = ptr::with_exposed_provenance_mut(range.start);
            // SAFETY: registered here, and no copy accesses the pages any more.
            unsafe { sys::cuMemHostUnregister(at) == CUresult::CUDA_SUCCESS }
        })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if !self.forget() {
            std::mem::forget(self.memory.take());
        }
    }
}

//! A device's primary context: entered for every call, and lost at most once.
//!
//! All engines of a process use the primary context, so that their pointers and streams are valid
//! here.
//!
//! ```text
//! good ── an error that ends contexts, or a failed query ──> lost (final)
//! ```
//!
//! Nothing runs in a lost context any more, so its memory is unused: pending waits get an error,
//! and later calls are refused. The engine has to restart its process.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult};

use crate::error::StorageError;
use crate::ids::DeviceId;

use super::capture::Relaxed;
use super::error::{CudaError, check, describe, is_of_capture, is_sticky};

/// A device's primary context; see the [module](self).
pub(super) struct Context {
    id: DeviceId,
    device: CUdevice,
    raw: CUcontext,
    lost: OnceLock<Box<str>>,
}

// SAFETY: a context can be current on any thread, and on several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Keeps the context current on this thread, and its capture mode relaxed, until it is dropped.
#[must_use = "dropping it restores the previous context"]
pub(super) struct Entered<'a> {
    before: CUcontext,
    _relaxed: Relaxed,
    /// Not `Send`: dropping it changes the state of this thread.
    _here: PhantomData<(&'a Context, *const ())>,
}

impl Context {
    /// Retains the device's primary context.
    pub(super) fn new(ordinal: u16, device: CUdevice) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _relaxed = Relaxed::enter();
        // SAFETY: the pointer is valid and the device exists.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }, "retaining the device's context")?;
        Ok(Self { id: DeviceId::Cuda(ordinal), device, raw, lost: OnceLock::new() })
    }

    pub(super) fn id(&self) -> DeviceId {
        self.id
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    pub(super) fn ordinal(&self) -> c_int {
        self.device
    }

    /// Makes the context current, unless it is lost.
    ///
    /// # Errors
    /// [`StorageError::DeviceLost`].
    pub(super) fn enter(&self) -> Result<Entered<'_>, StorageError> {
        self.good()?;
        Ok(self.enter_anyhow())
    }

    /// Makes the context current even if it is lost, to release resources of the driver.
    pub(super) fn enter_anyhow(&self) -> Entered<'_> {
        let _relaxed = Relaxed::enter();
        let mut before = std::ptr::null_mut();
        // SAFETY: the pointer is valid, and the context is retained while `self` lives. Neither
        // call fails for existing contexts.
        unsafe {
            let _ = sys::cuCtxGetCurrent(&mut before);
            if before != self.raw {
                let _ = sys::cuCtxSetCurrent(self.raw);
            }
        }
        // A context that is already current stays so.
        Entered { before, _relaxed, _here: PhantomData }
    }

    /// # Errors
    /// [`StorageError::DeviceLost`].
    pub(super) fn good(&self) -> Result<(), StorageError> {
        match self.lost.get() {
            None => Ok(()),
            Some(reason) => Err(StorageError::DeviceLost { device: self.id, reason: reason.clone() }),
        }
    }

    /// Converts a result of the driver. An error that ends contexts marks this one as lost.
    pub(super) fn check(&self, result: CUresult, doing: &'static str) -> Result<(), StorageError> {
        if result == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        if is_sticky(result) {
            return Err(self.lose(describe(result)));
        }
        Err(StorageError::Device { device: self.id, doing, reason: describe(result) })
    }

    /// Converts the result of a query or a wait.
    ///
    /// These fail only if the context is lost, or if a capture interferes.
    pub(super) fn check_or_lose(&self, result: CUresult) -> Result<(), StorageError> {
        match result {
            CUresult::CUDA_SUCCESS => Ok(()),
            refused if is_of_capture(refused) => self.check(refused, "waiting"),
            failed => Err(self.lose(describe(failed))),
        }
    }

    /// Marks the context as lost. The first reason is kept.
    pub(super) fn lose(&self, reason: Box<str>) -> StorageError {
        let reason = self.lost.get_or_init(|| reason).clone();
        StorageError::DeviceLost { device: self.id, reason }
    }

    /// Returns the device's free and total memory in bytes.
    pub(super) fn memory(&self) -> Result<(u64, u64), StorageError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are valid and the context is current.
        let asked = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        self.check(asked, "reading the amount of free memory")?;
        Ok((free as u64, total as u64))
    }

    /// Waits until all work in this context is complete, including that of other code.
    pub(super) fn synchronise(&self) -> Result<(), StorageError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        self.check(unsafe { sys::cuCtxSynchronize() }, "waiting for the device")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // SAFETY: retained once, by `new`; all users held a reference. A failure could not be
        // reported.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // SAFETY: restores this thread's previous context. If it has been destroyed meanwhile, the
        // driver refuses.
        let _ = unsafe { sys::cuCtxSetCurrent(self.before) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.id).field("lost", &self.lost.get()).finish()
    }
}

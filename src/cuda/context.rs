//! A device's primary context: entered for every call, and lost at most once.
//!
//! The primary context is the one that every engine of this process uses, so that its pointers and streams are good here.
//!
//! ```text
//! good ── an error that ends contexts, or a query that fails ──> lost        and never back
//! ```
//!
//! Nothing runs any more in a context that is lost, so that its memory is nobody's: what waited for the device is told, and
//! what comes later is refused. The engine has to start its process anew.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUresult};

use crate::error::StorageError;
use crate::ids::DeviceId;

use super::capture::Relaxed;
use super::error::{CudaError, check, describe, is_of_capture, is_sticky};

/// See the [module](self).
pub(super) struct Context {
    id: DeviceId,
    device: CUdevice,
    raw: CUcontext,
    lost: OnceLock<Box<str>>,
}

// SAFETY: a context may be made current to any thread, and to several.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The context is current to this thread, and its capture mode relaxed, until this is dropped.
#[must_use = "the context is current until it is dropped"]
pub(super) struct Entered<'a> {
    before: CUcontext,
    _relaxed: Relaxed,
    /// What is undone is this thread's.
    _here: PhantomData<(&'a Context, *const ())>,
}

impl Context {
    /// Retains the device's primary context.
    pub(super) fn new(ordinal: u16, device: CUdevice) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        let _relaxed = Relaxed::enter();
        // SAFETY: the place is valid and the device exists.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }, "taking the device's context")?;
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

    /// Makes the context current, if it is good.
    ///
    /// # Errors
    /// [`StorageError::DeviceLost`].
    pub(super) fn enter(&self) -> Result<Entered<'_>, StorageError> {
        self.good()?;
        Ok(self.enter_anyhow())
    }

    /// The same, also if it is lost: to give back what is the driver's.
    pub(super) fn enter_anyhow(&self) -> Entered<'_> {
        let _relaxed = Relaxed::enter();
        let mut before = std::ptr::null_mut();
        // SAFETY: the place is valid, and the context is retained while `self` lives. Neither call fails for contexts that exist.
        unsafe {
            let _ = sys::cuCtxGetCurrent(&mut before);
            if before != self.raw {
                let _ = sys::cuCtxSetCurrent(self.raw);
            }
        }
        // What is current already is left so.
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

    /// The driver's answer, as a result. An error that ends contexts ends this one.
    pub(super) fn check(&self, result: CUresult, doing: &'static str) -> Result<(), StorageError> {
        if result == CUresult::CUDA_SUCCESS {
            return Ok(());
        }
        if is_sticky(result) {
            return Err(self.lose(describe(result)));
        }
        Err(StorageError::Device { device: self.id, doing, reason: describe(result) })
    }

    /// The same for what fails only where the context is lost, whatever it says: queries, and waits. Unless somebody captures
    /// a graph just there.
    pub(super) fn check_or_lose(&self, result: CUresult) -> Result<(), StorageError> {
        match result {
            CUresult::CUDA_SUCCESS => Ok(()),
            refused if is_of_capture(refused) => self.check(refused, "waiting"),
            failed => Err(self.lose(describe(failed))),
        }
    }

    /// Nothing can be done with the device any more. The first reason stays.
    pub(super) fn lose(&self, reason: Box<str>) -> StorageError {
        let reason = self.lost.get_or_init(|| reason).clone();
        StorageError::DeviceLost { device: self.id, reason }
    }

    /// Bytes that are free on the device, and bytes in all.
    pub(super) fn memory(&self) -> Result<(u64, u64), StorageError> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places are valid and the context is current.
        let asked = unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) };
        self.check(asked, "asking for free memory")?;
        Ok((free as u64, total as u64))
    }

    /// Waits until everything is over that runs in this context, whose ever it is.
    pub(super) fn synchronise(&self) -> Result<(), StorageError> {
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        self.check(unsafe { sys::cuCtxSynchronize() }, "waiting for the device")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let _relaxed = Relaxed::enter();
        // SAFETY: it was retained once, by `new`; whoever used it held a reference. Nobody could be told of a failure.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // SAFETY: what was current before to this thread. A context that was destroyed meanwhile is refused.
        let _ = unsafe { sys::cuCtxSetCurrent(self.before) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.id).field("lost", &self.lost.get()).finish()
    }
}

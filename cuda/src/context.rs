//! A device's primary context: entered for every call, and lost at most once.
//!
//! All engines of a process use the primary context, so that their pointers and streams are valid
//! here.
//!
//! ```text
//! good ── an error that ends contexts, or a failed query ──> lost (final)
//!      ── its work will never end, or nothing tells when ───> lost and stuck (final)
//! ```
//!
//! In a *stuck* context the driver has reported no error that ends contexts, but work waits for
//! something that never comes, or its end cannot be detected. Calls that wait for its work may not
//! return, and the work may still access its memory: neither that nor memory adopted from an engine
//! is given back. The primary context is stuck for all handles of the device, which are lost with it.
//!
//! Nothing runs in a lost context any more, so its memory is unused: pending waits get an error,
//! and later calls are refused. The engine has to restart its process.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::{mem, ptr};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUevent, CUevent_flags, CUresult};

use kvpool::DeviceId;
use kvpool::StorageError;

use super::capture::Relaxed;
use super::error::{CudaError, check, describe, is_of_capture, is_sticky};
use super::gate::{self, Flight, Gate, Pass, Shut};

/// A device's primary context; see the [module](self).
pub(super) struct Context {
    pub(super) id: DeviceId,
    /// Its ordinal, as the driver has it.
    pub(super) device: CUdevice,
    pub(super) raw: CUcontext,
    lost: OnceLock<Box<str>>,
    /// Shared with the other handles of the device.
    pub(super) gate: Arc<Gate>,
    /// Events that are not in use. Creating one costs more than recording it.
    events: Mutex<Vec<CUevent>>,
}

/// What a gate was passed for, and why it has not opened.
const PASSING: &str = "waiting for copies between devices";
const LATE: &str = "they do not end, or a call that waits for the device does not return";

/// Number of events that are created when a device is opened, and the maximum number of unused ones.
const EVENTS: usize = 32;

// SAFETY: a context can be current on any thread, and on several at once.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Keeps the context current on this thread, and its capture mode relaxed, until it is dropped.
///
/// Entering a context again, inside of this, makes no driver call: an operation of several calls
/// enters once around all of them.
#[must_use = "dropping it restores the previous context"]
pub(super) struct Entered<'a> {
    /// The context entered around this one, or null; `None` if this one was entered before on this
    /// thread.
    outer: Option<(CUcontext, Relaxed)>,
    /// Not `Send`: dropping it changes the state of this thread.
    _here: PhantomData<(&'a Context, *const ())>,
}

thread_local! {
    /// The context that this thread has entered, or null.
    static INSIDE: Cell<CUcontext> = const { Cell::new(ptr::null_mut()) };
}

impl Context {
    /// Retains the device's primary context.
    pub(super) fn new(ordinal: u16, device: CUdevice) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        let gate = Gate::of(device);
        let _pass = gate.pass().map_err(|shut| CudaError::Driver {
            doing: "opening the device",
            reason: match shut {
                Shut::Stuck(reason) => reason,
                Shut::Late => LATE.into(),
            },
        })?;
        let _relaxed = Relaxed::enter();
        // SAFETY: the pointer is valid and the device exists.
        check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) }, "retaining the device's context")?;
        Ok(Self {
            id: DeviceId::Cuda(ordinal),
            device,
            raw,
            lost: OnceLock::new(),
            gate,
            events: Mutex::default(),
        })
    }

    /// Makes the context current, unless it is lost.
    ///
    /// # Errors
    /// [`StorageError::DeviceLost`].
    pub(super) fn enter(&self) -> Result<Entered<'_>, StorageError> {
        self.good()?;
        Ok(self.enter_even_if_lost())
    }

    /// Makes the context current even if it is lost, to release resources of the driver.
    pub(super) fn enter_even_if_lost(&self) -> Entered<'_> {
        if INSIDE.get() == self.raw {
            return Entered { outer: None, _here: PhantomData };
        }
        let relaxed = Relaxed::enter();
        // SAFETY: the context is retained while `self` lives.
        let pushed = unsafe { sys::cuCtxPushCurrent_v2(self.raw) };
        let outer = (pushed == CUresult::CUDA_SUCCESS).then(|| (INSIDE.replace(self.raw), relaxed));
        Entered { outer, _here: PhantomData }
    }

    /// # Errors
    /// [`StorageError::DeviceLost`].
    pub(super) fn good(&self) -> Result<(), StorageError> {
        match (self.lost.get(), self.gate.stuck()) {
            (None, None) => Ok(()),
            (Some(reason), _) => Err(StorageError::DeviceLost { device: self.id, reason: reason.clone() }),
            (None, Some(reason)) => Err(self.lose(reason.into())),
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
    /// These fail only if the context is lost, or if a capture interferes. After any other error the
    /// end of the work cannot be detected, and the work may still be running.
    pub(super) fn check_or_lose(&self, result: CUresult) -> Result<(), StorageError> {
        match result {
            CUresult::CUDA_SUCCESS => Ok(()),
            refused if is_of_capture(refused) => self.check(refused, "waiting"),
            failed if is_sticky(failed) => Err(self.lose(describe(failed))),
            failed => Err(self.lose_stuck(describe(failed))),
        }
    }

    /// Marks the context as lost. The first reason is kept.
    pub(super) fn lose(&self, reason: Box<str>) -> StorageError {
        let reason = self.lost.get_or_init(|| reason).clone();
        StorageError::DeviceLost { device: self.id, reason }
    }

    /// Creates the events that operations then use.
    pub(super) fn create_events(&self) -> Result<(), StorageError> {
        let _entered = self.enter()?;
        (0..EVENTS).try_for_each(|_| self.create_event().map(|event| self.put_event(event)))
    }

    fn create_event(&self) -> Result<CUevent, StorageError> {
        let mut raw = ptr::null_mut();
        // A waiting thread sleeps, because a spinning thread would take a core from the engine.
        let flags =
            CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 | CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32;
        // SAFETY: the pointer is valid and the context is current.
        self.check(unsafe { sys::cuEventCreate(&mut raw, flags) }, "creating an event")?;
        Ok(raw)
    }

    /// Returns an event for one record. The context must be current.
    pub(super) fn take_event(&self) -> Result<CUevent, StorageError> {
        let unused = self.events.lock().unwrap_or_else(PoisonError::into_inner).pop();
        unused.map_or_else(|| self.create_event(), Ok)
    }

    /// Takes an event back. Streams that wait for its record are not affected when it is recorded
    /// again.
    pub(super) fn put_event(&self, event: CUevent) {
        {
            let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
            if events.len() < EVENTS {
                return events.push(event);
            }
        }
        self.destroy_event(event);
    }

    fn destroy_event(&self, event: CUevent) {
        let _entered = self.enter_even_if_lost();
        // SAFETY: created here, and not used any more.
        let _ = unsafe { sys::cuEventDestroy_v2(event) };
    }

    /// Marks the context as lost although the driver has reported no error: some of its work will
    /// never end.
    pub(super) fn lose_stuck(&self, reason: Box<str>) -> StorageError {
        // Before the context counts as lost: what is given back on a lost device is not on a stuck one.
        self.gate.jam(reason.clone());
        self.lose(reason)
    }

    /// Returns true if calls that wait for work of the context may not return.
    pub(super) fn is_stuck(&self) -> bool {
        self.gate.stuck().is_some()
    }

    /// Waits until no copy to another device is in flight: before a call that may wait in the driver
    /// for all work of the context, and until it has returned. Given also for a lost context, to
    /// release its resources.
    ///
    /// # Errors
    /// [`StorageError::DeviceLost`] if the device is stuck; [`StorageError::Device`] if copies to another
    /// device do not end. The call must not be made.
    pub(super) fn pass(&self) -> Result<Pass, StorageError> {
        self.gate.pass().map_err(|shut| self.shut(shut))
    }

    /// Does the same for all open devices: before calls that concern memory of the host.
    ///
    /// # Errors
    /// As for [`pass`](Self::pass), if any device is stuck or its copies do not end.
    pub(super) fn pass_all(&self) -> Result<Vec<Pass>, StorageError> {
        gate::pass_all().map_err(|shut| match shut {
            Shut::Stuck(reason) if !self.is_stuck() => {
                StorageError::Device { device: self.id, doing: PASSING, reason }
            }
            shut => self.shut(shut),
        })
    }

    /// Waits until no call of [`pass`](Self::pass) is in the driver: before copies to another device, and
    /// until their end is known. The thread passes no gate meanwhile.
    ///
    /// # Errors
    /// As for [`pass`](Self::pass).
    pub(super) fn fly(&self) -> Result<Flight, StorageError> {
        self.gate.fly().map_err(|shut| self.shut(shut))
    }

    fn shut(&self, shut: Shut) -> StorageError {
        match shut {
            Shut::Stuck(reason) => self.lose(reason),
            Shut::Late => StorageError::Device { device: self.id, doing: PASSING, reason: LATE.into() },
        }
    }

    /// Gives the context access to another device's memory, if supported. Otherwise the driver copies
    /// through the host. Without effect if this was done before.
    ///
    /// # Errors
    /// As for [`pass`](Self::pass) of either device.
    pub(super) fn befriend(&self, other: &Self) -> Result<(), StorageError> {
        if self.gate.is_friend(other.device) {
            return Ok(());
        }
        let _passes = [self.pass()?, other.pass()?];
        let _entered = self.enter_even_if_lost();
        // SAFETY: the context is current and the other one lives. Access that is already enabled or not
        // supported is no error here.
        let _ = unsafe { sys::cuCtxEnablePeerAccess(other.raw, 0) };
        self.gate.befriend(other.device);
        Ok(())
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
    ///
    /// # Errors
    /// Also as for [`pass`](Self::pass); the work may then still be running.
    pub(super) fn synchronise(&self) -> Result<(), StorageError> {
        let _pass = self.pass()?;
        let _entered = self.enter()?;
        // SAFETY: the context is current.
        self.check(unsafe { sys::cuCtxSynchronize() }, "waiting for the device")
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let events = mem::take(&mut *self.events.lock().unwrap_or_else(PoisonError::into_inner));
        events.into_iter().for_each(|event| self.destroy_event(event));
        let Ok(_pass) = self.pass() else { return };
        let _relaxed = Relaxed::enter();
        // SAFETY: retained once, by `new`; all users held a reference. A failure could not be
        // reported.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if let Some((around, _)) = &self.outer {
            INSIDE.set(*around);
            let mut popped = ptr::null_mut();
            // SAFETY: restores this thread's previous context; the pointer is valid.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("device", &self.id).field("lost", &self.lost.get()).finish()
    }
}

//! What can be wrong with a driver or a device, and which of its errors end it.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};
use thiserror::Error;

use crate::error::StorageError;

use super::version::Version;

/// Why a CUDA device cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver.
    #[error("no CUDA driver: {reason}")]
    NoDriver {
        /// What the loader said.
        reason: Box<str>,
    },
    /// The driver is older than the kernels.
    #[error("the CUDA driver is of version {found}; {needed} is needed")]
    DriverTooOld {
        /// The driver's version of CUDA.
        found: Version,
        /// The version that is needed.
        needed: Version,
    },
    /// The library is no CUDA driver, or one that lacks a function.
    #[error("the CUDA driver has no {name}")]
    NoFunction {
        /// The function.
        name: &'static str,
    },
    /// There is no such device.
    #[error("no CUDA device {ordinal}; there are {count}")]
    NoDevice {
        /// The device that was asked for.
        ordinal: usize,
        /// Devices that there are.
        count: usize,
    },
    /// The device is older than the kernels.
    #[error("the device has compute capability {capability}; {needed} is needed")]
    DeviceTooOld {
        /// The device's compute capability.
        capability: Version,
        /// The one that is needed.
        needed: Version,
    },
    /// The device cannot map memory to addresses that were reserved before.
    #[error("the device has no virtual memory management")]
    NoVirtualMemory,
    /// The thread that watches the device could not be started.
    #[error("no thread to watch the device: {reason}")]
    NoThread {
        /// What the system said.
        reason: std::io::ErrorKind,
    },
    /// The driver refused.
    #[error("{doing} failed: {reason}")]
    Driver {
        /// What was asked for.
        doing: &'static str,
        /// What it said.
        reason: Box<str>,
    },
}

impl CudaError {
    /// What a device refused while it was opened.
    pub(super) fn of(error: StorageError) -> Self {
        match error {
            StorageError::Device { doing, reason, .. } => Self::Driver { doing, reason },
            StorageError::DeviceLost { reason, .. } => Self::Driver { doing: "opening the device", reason },
            other => Self::Driver { doing: "opening the device", reason: other.to_string().into() },
        }
    }
}

/// The driver's answer, as a result.
pub(super) fn check(result: CUresult, doing: &'static str) -> Result<(), CudaError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(CudaError::Driver { doing, reason: describe(error) }),
    }
}

/// An error's name and meaning.
pub(super) fn describe(error: CUresult) -> Box<str> {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: the driver was loaded, or there would be no error; both places are valid, and what is written there are
    // strings of the driver's own, or null.
    let [name, text] = unsafe {
        let _ = sys::cuGetErrorName(error, &mut name);
        let _ = sys::cuGetErrorString(error, &mut text);
        [name, text].map(|text| (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy()))
    };
    match (name, text) {
        (Some(name), Some(text)) => format!("{name} ({text})").into(),
        (Some(name), None) => name.into_owned().into(),
        _ => format!("{error:?}").into(),
    }
}

/// Whether nothing runs in the context any more after such an error: the documentation says of these that the process
/// must end, or that the device is gone.
pub(super) fn is_sticky(error: CUresult) -> bool {
    use CUresult::*;
    matches!(
        error,
        CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_ILLEGAL_ADDRESS
            | CUDA_ERROR_LAUNCH_TIMEOUT
            | CUDA_ERROR_CONTEXT_IS_DESTROYED
            | CUDA_ERROR_ASSERT
            | CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUDA_ERROR_MISALIGNED_ADDRESS
            | CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUDA_ERROR_INVALID_PC
            | CUDA_ERROR_LAUNCH_FAILED
            | CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_UNKNOWN
    )
}

/// Whether a call was refused since a graph is being captured.
pub(super) fn is_of_capture(error: CUresult) -> bool {
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32
        ..=CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as u32)
        .contains(&(error as u32))
}

//! Errors of the driver and of devices, and which of them end a context.

use std::ffi::CStr;

use cudarc::driver::sys::{self, CUresult};
use thiserror::Error;

use kvpool::StorageError;

use super::version::Version;

/// Why a CUDA device cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver was found.
    #[error("no CUDA driver: {reason}")]
    NoDriver {
        /// Message of the loader.
        reason: Box<str>,
    },
    /// The driver is too old for the kernels.
    #[error("the CUDA driver has version {found}; at least {needed} is needed")]
    DriverTooOld {
        /// The driver's CUDA version.
        found: Version,
        /// Minimum version.
        needed: Version,
    },
    /// The library is not a CUDA driver, or lacks a function.
    #[error("the CUDA driver has no function {name}")]
    NoFunction {
        /// Name of the function.
        name: &'static str,
    },
    /// The device does not exist.
    #[error("no CUDA device {ordinal}; the number of devices is {count}")]
    NoDevice {
        /// Requested ordinal.
        ordinal: usize,
        /// Number of devices.
        count: usize,
    },
    /// The device is too old for the kernels.
    #[error("the device has compute capability {capability}; at least {needed} is needed")]
    DeviceTooOld {
        /// The device's compute capability.
        capability: Version,
        /// Minimum compute capability.
        needed: Version,
    },
    /// The device cannot map memory to addresses that were reserved before.
    #[error("the device does not support virtual memory management")]
    NoVirtualMemory,
    /// The thread that watches the device could not be started.
    #[error("could not start a thread to watch the device: {reason}")]
    NoThread {
        /// Error of the system.
        reason: std::io::ErrorKind,
    },
    /// A call of the driver failed.
    #[error("{doing} failed: {reason}")]
    Driver {
        /// The operation.
        doing: &'static str,
        /// The driver's error.
        reason: Box<str>,
    },
}

impl CudaError {
    /// Converts an error that occurred while a device was opened.
    pub(super) fn of(error: StorageError) -> Self {
        match error {
            StorageError::Device { doing, reason, .. } => Self::Driver { doing, reason },
            StorageError::DeviceLost { reason, .. } => Self::Driver { doing: "opening the device", reason },
            other => Self::Driver { doing: "opening the device", reason: other.to_string().into() },
        }
    }
}

/// Converts a result of the driver.
pub(super) fn check(result: CUresult, doing: &'static str) -> Result<(), CudaError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(CudaError::Driver { doing, reason: describe(error) }),
    }
}

/// Returns an error's name and meaning.
pub(super) fn describe(error: CUresult) -> Box<str> {
    let (mut name, mut text) = (std::ptr::null(), std::ptr::null());
    // SAFETY: the driver is loaded, since it has returned an error; both pointers are valid, and
    // receive static strings of the driver, or null.
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

/// Returns true if nothing runs in the context after such an error.
///
/// By the documentation, the process must end after these errors, or the device is gone.
pub(super) fn is_sticky(error: CUresult) -> bool {
    use CUresult::*;
    matches!(
        error,
        CUDA_ERROR_DEINITIALIZED
            | CUDA_ERROR_ECC_UNCORRECTABLE
            | CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUDA_ERROR_CONTAINED
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
            | CUDA_ERROR_TENSOR_MEMORY_LEAK
            | CUDA_ERROR_MPS_CLIENT_TERMINATED
            | CUDA_ERROR_EXTERNAL_DEVICE
            | CUDA_ERROR_UNKNOWN
    )
}

/// Returns true if a call was refused because a graph is being captured.
pub(super) fn is_of_capture(error: CUresult) -> bool {
    (CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED as u32
        ..=CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD as u32)
        .contains(&(error as u32))
}

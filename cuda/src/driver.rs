//! The driver: its presence, its version, and its devices.
//!
//! Every function is looked up before the first call, because the bindings panic if a library or a
//! symbol is missing, and a process without a GPU must get an error instead.

use std::error::Error;
use std::ffi::c_int;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcomputemode, CUdevice, CUdevice_attribute, CUdevice_attribute_enum as Attribute,
};
use libloading::Library;

use super::error::{CudaError, check};
use super::version::Version;

/// The names under which the bindings look for the library.
const LIBRARIES: &[&str] = if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so", "libcuda.so.1"] };

/// The minimum versions, which the kernels are compiled for.
const DRIVER_NEEDED: Version = Version { major: 12, minor: 0 };
const CAPABILITY_NEEDED: Version = Version { major: 8, minor: 0 };

/// Every driver function that this crate calls.
const FUNCTIONS: &[&str] = &[
    "cuCtxEnablePeerAccess",
    "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuInit",
    "cuLaunchHostFunc",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpy2DAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyPeerAsync",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuPointerGetAttribute",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// A device, as described by the driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Ordinal, from 0: the N of `cuda:N`.
    pub ordinal: u16,
    /// Product name.
    pub name: String,
    /// Compute capability.
    pub capability: Version,
    /// Total memory in bytes.
    pub memory_bytes: u64,
    /// Number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// True if only one process at a time may use the device (compute mode EXCLUSIVE_PROCESS).
    pub is_exclusive: bool,
    /// Why the device cannot be used, if it cannot.
    pub unusable: Option<CudaError>,
}

/// Returns all devices, including unsupported ones.
///
/// # Errors
///
/// [`CudaError::NoDriver`], [`CudaError::NoFunction`], [`CudaError::DriverTooOld`];
/// [`CudaError::Driver`] if the driver does not start.
pub fn devices() -> Result<Vec<DeviceInfo>, CudaError> {
    start()?;
    (0..count()?).map(|ordinal| describe(ordinal).map(|(_, info)| info)).collect()
}

/// Returns the handle and the description of a usable device.
pub(super) fn device(ordinal: usize) -> Result<(CUdevice, DeviceInfo), CudaError> {
    start()?;
    let count = count()?;
    if ordinal >= count {
        return Err(CudaError::NoDevice { ordinal, count });
    }
    let (device, mut info) = describe(ordinal)?;
    match info.unusable.take() {
        None => Ok((device, info)),
        Some(error) => Err(error),
    }
}

/// Finds and starts the driver. A driver that was found is kept; otherwise the next call searches
/// again.
fn start() -> Result<(), CudaError> {
    static FOUND: OnceLock<Library> = OnceLock::new();
    if FOUND.get().is_none() {
        let library = find()?;
        for &name in FUNCTIONS {
            // SAFETY: the symbol is looked up and not called.
            let symbol = unsafe { library.get::<unsafe extern "C" fn()>(name) };
            symbol.map_err(|_| CudaError::NoFunction { name })?;
        }
        // If another thread was first, its library is the same.
        let _ = FOUND.set(library);
    }
    // SAFETY: the driver is loaded and has all functions; the pointer for the version is valid.
    let version = unsafe {
        check(sys::cuInit(0), "starting the driver")?;
        let mut version = 0;
        check(sys::cuDriverGetVersion(&mut version), "reading the driver's version")?;
        version
    };
    let found = driver_version(version);
    if found < DRIVER_NEEDED {
        return Err(CudaError::DriverTooOld { found, needed: DRIVER_NEEDED });
    }
    Ok(())
}

fn find() -> Result<Library, CudaError> {
    let mut reasons = Vec::new();
    for &name in LIBRARIES {
        // SAFETY: only the driver's own initialisation and cleanup code runs on loading and
        // unloading.
        match unsafe { Library::new(name) } {
            Ok(library) => return Ok(library),
            // The loader's message, which names the file, is in the source.
            Err(error) => reasons.push(error.source().map_or_else(|| error.to_string(), ToString::to_string)),
        }
    }
    // Report all: it may be the second library that exists and cannot be loaded.
    Err(CudaError::NoDriver { reason: reasons.join("; ").into() })
}

/// Decodes a version: 12080 is 12.8.
fn driver_version(number: c_int) -> Version {
    let number = number.max(0) as u32;
    Version { major: number / 1000, minor: number % 1000 / 10 }
}

fn count() -> Result<usize, CudaError> {
    let mut count = 0;
    // SAFETY: the pointer is valid.
    check(unsafe { sys::cuDeviceGetCount(&mut count) }, "counting devices")?;
    Ok(count.max(0) as usize)
}

fn describe(ordinal: usize) -> Result<(CUdevice, DeviceInfo), CudaError> {
    let (mut device, mut name, mut memory_bytes) = (0, [0u8; 256], 0);
    // SAFETY: the pointers are valid, and the name's length is that of its buffer.
    unsafe {
        check(sys::cuDeviceGet(&mut device, ordinal as c_int), "getting a device")?;
        let (start, len) = (name.as_mut_ptr().cast(), name.len() as c_int - 1);
        check(sys::cuDeviceGetName(start, len, device), "reading a device's name")?;
        check(sys::cuDeviceTotalMem_v2(&mut memory_bytes, device), "reading a device's memory size")?;
    }
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    let asked = |which| attribute(device, which).map(|value| value.max(0) as u32);
    let capability = Version {
        major: asked(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: asked(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    };
    let unusable = if capability < CAPABILITY_NEEDED {
        Some(CudaError::DeviceTooOld { capability, needed: CAPABILITY_NEEDED })
    } else if asked(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? == 0 {
        Some(CudaError::NoVirtualMemory)
    } else {
        None
    };
    let info = DeviceInfo {
        ordinal: ordinal as u16,
        name: String::from_utf8_lossy(name).into_owned(),
        capability,
        memory_bytes: memory_bytes as u64,
        multiprocessors: asked(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        is_exclusive: asked(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)?
            == CUcomputemode::CU_COMPUTEMODE_EXCLUSIVE_PROCESS as u32,
        unusable,
    };
    Ok((device, info))
}

/// Returns a device's attribute.
pub(super) fn attribute(device: CUdevice, which: CUdevice_attribute) -> Result<c_int, CudaError> {
    let mut value = 0;
    // SAFETY: the pointer is valid.
    check(unsafe { sys::cuDeviceGetAttribute(&mut value, which, device) }, "reading a device's attributes")?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_the_driver_writes_them() {
        assert_eq!(driver_version(12080).to_string(), "12.8");
        assert_eq!(driver_version(11040), Version { major: 11, minor: 4 });
        assert!(driver_version(12000) >= DRIVER_NEEDED && driver_version(11080) < DRIVER_NEEDED);
    }

    #[test]
    fn the_functions_are_those_that_are_called() {
        let sources = [
            include_str!("adopted.rs"),
            include_str!("arena.rs"),
            include_str!("capture.rs"),
            include_str!("context.rs"),
            include_str!("crossing.rs"),
            include_str!("device.rs"),
            include_str!("device_rows.rs"),
            include_str!("driver.rs"),
            include_str!("error.rs"),
            include_str!("event.rs"),
            include_str!("command_scope.rs"),
            include_str!("kernels.rs"),
            include_str!("memory.rs"),
            include_str!("moves.rs"),
            include_str!("packed.rs"),
            include_str!("registered.rs"),
            include_str!("rows.rs"),
            include_str!("staging.rs"),
            include_str!("storage.rs"),
            include_str!("stream.rs"),
            include_str!("tables.rs"),
            include_str!("watch.rs"),
        ];
        let mut called: Vec<&str> = Vec::new();
        for source in sources {
            for call in source.split("sys::cu").skip(1) {
                let end = call.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(call.len());
                // The occurrence in this test has no name.
                called.extend((end > 0).then_some(&call[..end]));
            }
        }
        called.sort_unstable();
        called.dedup();
        let listed: Vec<&str> = FUNCTIONS.iter().map(|name| &name[2..]).collect();
        assert_eq!(called, listed);
    }
}

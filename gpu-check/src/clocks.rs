//! The device's current clocks, from the management library of the driver if there is one.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

use libloading::Library;
use serde::{Deserialize, Serialize};

/// Names of the management library.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// `NVML_CLOCK_SM`, `NVML_CLOCK_MEM`.
const SM: c_int = 1;
const MEMORY: c_int = 2;
/// `NVML_TEMPERATURE_GPU`.
const OF_GPU: c_int = 0;

/// Clocks at one moment.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Clocks {
    /// Clock of the multiprocessors in MHz.
    pub sm_mhz: u32,
    /// Clock of the memory in MHz.
    pub memory_mhz: u32,
    /// Temperature in degrees Celsius, if known.
    pub celsius: Option<u32>,
    /// Reasons why the clocks are not the maximum ones: the bits of
    /// `nvmlDeviceGetCurrentClocksThrottleReasons`, if known.
    pub reasons: Option<u64>,
}

/// Returns the clocks of the device at an address of the PCI bus; `None` if there is no management
/// library, or it does not know them.
#[must_use]
pub fn now(pci: &str) -> Option<Clocks> {
    // SAFETY: only the library's own initialisation runs.
    let library = LIBRARIES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
    read(&library, pci)
}

/// Does so with a library that was loaded.
#[must_use]
pub fn read(library: &Library, pci: &str) -> Option<Clocks> {
    type Device = *mut c_void;
    let pci = CString::new(pci).ok()?;
    // SAFETY: the types are those of nvml.h; all pointers are valid during the calls, and the device is
    // one that the library returned between its start and its end.
    unsafe {
        let start = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlInit_v2").ok()?;
        let end = library.get::<unsafe extern "C" fn() -> c_int>(b"nvmlShutdown").ok()?;
        let find = library
            .get::<unsafe extern "C" fn(*const c_char, *mut Device) -> c_int>(
                b"nvmlDeviceGetHandleByPciBusId_v2",
            )
            .ok()?;
        type Number = unsafe extern "C" fn(Device, c_int, *mut c_uint) -> c_int;
        let clock = library.get::<Number>(b"nvmlDeviceGetClockInfo").ok()?;
        let temperature = library.get::<Number>(b"nvmlDeviceGetTemperature").ok();
        let reasons = library
            .get::<unsafe extern "C" fn(Device, *mut c_ulonglong) -> c_int>(
                b"nvmlDeviceGetCurrentClocksThrottleReasons",
            )
            .ok();
        if start() != 0 {
            return None;
        }
        let found = (|| {
            let mut device = std::ptr::null_mut();
            if find(pci.as_ptr(), &mut device) != 0 {
                return None;
            }
            let number = |ask: &Number, which| {
                let mut value = 0;
                (ask(device, which, &mut value) == 0).then_some(value)
            };
            let reasons = reasons.and_then(|ask| {
                let mut value = 0;
                (ask(device, &mut value) == 0).then_some(value)
            });
            Some(Clocks {
                sm_mhz: number(&clock, SM)?,
                memory_mhz: number(&clock, MEMORY)?,
                celsius: temperature.and_then(|ask| number(&ask, OF_GPU)),
                reasons,
            })
        })();
        let _ = end();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_library_or_a_device_there_are_no_clocks() {
        assert_eq!(now("ffff:ff:1f.0"), None);
        // A library that is not the right one.
        // SAFETY: this program itself.
        let own = unsafe { Library::new("libc.so.6") };
        assert!(own.is_err() || read(&own.unwrap(), "0000:00:00.0").is_none());
    }
}

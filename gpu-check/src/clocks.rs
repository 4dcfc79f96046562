//! The device's clocks during a section, from the management library of the driver if there is one.
//!
//! A thread asks for them while the section runs: after its end the device is idle, and its clocks
//! fall.

use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use libloading::Library;
use serde::{Deserialize, Serialize};

/// Names of the management library.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// `NVML_CLOCK_SM`, `NVML_CLOCK_MEM`.
const SM: c_int = 1;
const MEMORY: c_int = 2;
/// `NVML_TEMPERATURE_GPU`.
const OF_GPU: c_int = 0;

/// Pause between two samples.
const PAUSE: Duration = Duration::from_millis(250);

/// Samples taken during a section.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Clocks {
    /// Number of samples.
    pub samples: usize,
    /// Lowest and highest clock of the multiprocessors in MHz.
    pub sm_mhz: [u32; 2],
    /// Lowest and highest clock of the memory in MHz.
    pub memory_mhz: [u32; 2],
    /// Highest temperature in degrees Celsius, if known.
    pub celsius: Option<u32>,
    /// All reasons why the clocks were not the maximum ones in any sample: the bits of
    /// `nvmlDeviceGetCurrentClocksThrottleReasons`, if known.
    pub reasons: Option<u64>,
}

impl Clocks {
    /// Summarises the samples of both.
    #[must_use]
    pub fn merged(self, other: Self) -> Self {
        let range = |[a, b]: [u32; 2], [c, d]: [u32; 2]| [a.min(c), b.max(d)];
        let both = self.reasons.zip(other.reasons).map(|(a, b)| a | b);
        Self {
            samples: self.samples + other.samples,
            sm_mhz: range(self.sm_mhz, other.sm_mhz),
            memory_mhz: range(self.memory_mhz, other.memory_mhz),
            celsius: self.celsius.max(other.celsius),
            reasons: both.or(self.reasons).or(other.reasons),
        }
    }
}

/// A thread that samples the clocks until it is stopped.
#[derive(Debug)]
pub struct Sampler {
    stop: Sender<()>,
    thread: JoinHandle<Vec<Clocks>>,
}

impl Sampler {
    /// Starts to sample the device at an address of the PCI bus. `None` if there is no management
    /// library, or it does not know the device's clocks.
    #[must_use]
    pub fn start(pci: &str) -> Option<Self> {
        // SAFETY: only the library's own initialisation runs.
        let library = LIBRARIES.iter().find_map(|name| unsafe { Library::new(*name) }.ok())?;
        Self::start_with(library, pci)
    }

    /// Does so with a library that was loaded.
    #[must_use]
    pub fn start_with(library: Library, pci: &str) -> Option<Self> {
        let pci = pci.to_owned();
        // One sample before the section: without it there is no use in a thread.
        let mut samples = vec![read(&library, &pci)?];
        let (stop, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("clocks".into()).spawn(move || {
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(PAUSE) {
                samples.extend(read(&library, &pci));
            }
            // Of a section that was over before the first pause, the idle device is all that is known.
            if samples.len() > 1 {
                samples.remove(0);
            }
            samples
        });
        Some(Self { stop, thread: thread.ok()? })
    }

    /// Stops, and returns what was sampled since the start.
    #[must_use]
    pub fn stop(self) -> Option<Clocks> {
        drop(self.stop);
        self.thread.join().ok()?.into_iter().reduce(Clocks::merged)
    }
}

/// Returns the current clocks of the device at an address of the PCI bus; `None` if the library does not
/// know them.
#[must_use]
pub fn read(library: &Library, pci: &str) -> Option<Clocks> {
    type Device = *mut c_void;
    type Call = unsafe extern "C" fn() -> c_int;
    type Find = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
    type Number = unsafe extern "C" fn(Device, c_int, *mut c_uint) -> c_int;
    type Reasons = unsafe extern "C" fn(Device, *mut c_ulonglong) -> c_int;
    let pci = CString::new(pci).ok()?;
    // SAFETY: the types are those of nvml.h; all pointers are valid during the calls, and the device is
    // one that the library returned between its start and its end.
    unsafe {
        let start = library.get::<Call>(b"nvmlInit_v2").ok()?;
        let end = library.get::<Call>(b"nvmlShutdown").ok()?;
        let find = library.get::<Find>(b"nvmlDeviceGetHandleByPciBusId_v2").ok()?;
        let clock = library.get::<Number>(b"nvmlDeviceGetClockInfo").ok()?;
        let temperature = library.get::<Number>(b"nvmlDeviceGetTemperature").ok();
        let reasons = library.get::<Reasons>(b"nvmlDeviceGetCurrentClocksThrottleReasons").ok();
        if start() != 0 {
            return None;
        }
        let mut device = std::ptr::null_mut();
        let found = (find(pci.as_ptr(), &mut device) == 0).then(|| {
            let number = |ask: &Number, which| {
                let mut value = 0;
                (ask(device, which, &mut value) == 0).then_some(value)
            };
            let mut bits = 0;
            Some(Clocks {
                samples: 1,
                sm_mhz: [number(&clock, SM)?; 2],
                memory_mhz: [number(&clock, MEMORY)?; 2],
                celsius: temperature.and_then(|ask| number(&ask, OF_GPU)),
                reasons: reasons.filter(|ask| ask(device, &mut bits) == 0).map(|_| bits),
            })
        });
        let _ = end();
        found.flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_summarised_by_their_extremes() {
        let sample = |sm_mhz: u32, celsius, reasons| {
            let (samples, sm_mhz, memory_mhz) = (1, [sm_mhz; 2], [2619; 2]);
            Clocks { samples, sm_mhz, memory_mhz, celsius, reasons }
        };
        let samples =
            [sample(1980, Some(41), Some(2)), sample(345, None, None), sample(1200, Some(63), Some(4))];
        let clocks = Clocks {
            samples: 3,
            sm_mhz: [345, 1980],
            memory_mhz: [2619, 2619],
            celsius: Some(63),
            reasons: Some(6),
        };
        assert_eq!(samples.into_iter().reduce(Clocks::merged), Some(clocks));
    }

    #[test]
    fn without_a_library_or_a_device_there_are_no_clocks() {
        assert!(Sampler::start("ffff:ff:1f.0").is_none());
        // A library that is not the right one.
        // SAFETY: this program itself.
        let own = unsafe { Library::new("libc.so.6") };
        assert!(own.is_err() || read(&own.unwrap(), "0000:00:00.0").is_none());
    }
}

//! Devices and the links between them, from the CUDA driver.
//!
//! The library has already checked the driver. Functions that it does not use are looked up here;
//! without them, addresses or links are unknown.

use std::ffi::{c_char, c_int};
use std::path::Path;

use kvpool_cuda::DeviceInfo;
use libloading::{Library, Symbol};

use super::machine::{Device, DeviceLink, Machine};
use super::sysfs::pci_device;

/// Values of `CUdevice_P2PAttribute`.
const PERFORMANCE_RANK: c_int = 1;
const NATIVE_ATOMICS: c_int = 3;

type DeviceGet = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type PciBusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type CanAccessPeer = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
type P2pAttribute = unsafe extern "C" fn(*mut c_int, c_int, c_int, c_int) -> c_int;

/// Adds the devices and links to the record, or a note why there are none.
pub(super) fn read_devices(sysfs: &Path, machine: &mut Machine) {
    let infos = match kvpool_cuda::devices() {
        Ok(infos) => infos,
        Err(error) => return machine.notes.push(format!("devices: {error}")),
    };
    // SAFETY: the driver is already loaded, so loading it again runs no code.
    let library = unsafe { Library::new("libcuda.so.1").or_else(|_| Library::new("libcuda.so")) };
    let library = library.map_err(|error| machine.notes.push(format!("links between devices: {error}"))).ok();
    let driver = library.as_ref().map(Driver);
    let handle = |info: &DeviceInfo| driver.as_ref()?.handle(info.ordinal);
    let handles: Vec<_> = infos.iter().map(handle).collect();
    for (info, handle) in infos.iter().zip(&handles) {
        let address = driver.as_ref().zip(*handle).and_then(|(driver, handle)| driver.address(handle));
        let (pci, memory_node) = address.map_or((None, None), |address| pci_device(sysfs, &address));
        machine.devices.push(Device {
            ordinal: info.ordinal,
            name: info.name.clone(),
            memory_bytes: info.memory_bytes,
            memory_node,
            pci,
            unusable: info.unusable.as_ref().map(ToString::to_string),
        });
    }
    let Some(driver) = driver else { return };
    for (from, a) in infos.iter().zip(&handles) {
        for (to, b) in infos.iter().zip(&handles).filter(|(to, _)| to.ordinal != from.ordinal) {
            let Some((a, b)) = a.zip(*b) else { continue };
            match driver.link((from.ordinal, a), (to.ordinal, b)) {
                Some(link) => machine.device_links.push(link),
                None => machine.notes.push(format!(
                    "the driver does not report the link from cuda:{} to cuda:{}",
                    from.ordinal, to.ordinal
                )),
            }
        }
    }
}

struct Driver<'a>(&'a Library);

impl Driver<'_> {
    /// Looks up a function; `None` if the driver lacks it.
    ///
    /// # Safety
    /// The function has this type.
    unsafe fn function<F>(&self, name: &str) -> Option<Symbol<'_, F>> {
        // SAFETY: by the contract of this function.
        unsafe { self.0.get(name) }.ok()
    }

    fn handle(&self, ordinal: u16) -> Option<c_int> {
        // SAFETY: the type is that of the driver's interface, and the pointer is valid.
        unsafe {
            let get = self.function::<DeviceGet>("cuDeviceGet")?;
            number(|into| get(into, c_int::from(ordinal)))
        }
    }

    fn address(&self, device: c_int) -> Option<String> {
        let mut text = [0u8; 32];
        // SAFETY: the type is that of the driver's interface, and the length is the buffer's.
        let status = unsafe {
            let read = self.function::<PciBusId>("cuDeviceGetPCIBusId")?;
            read(text.as_mut_ptr().cast(), text.len() as c_int - 1, device)
        };
        let text = text.split(|&byte| byte == 0).next().unwrap_or_default();
        (status == 0).then(|| String::from_utf8_lossy(text).into_owned())
    }

    /// Returns the link between two devices, given by their ordinals and handles.
    fn link(&self, (from, a): (u16, c_int), (to, b): (u16, c_int)) -> Option<DeviceLink> {
        let attribute = |which| {
            // SAFETY: the type is that of the driver's interface, and the pointer is valid.
            unsafe {
                let read = self.function::<P2pAttribute>("cuDeviceGetP2PAttribute")?;
                number(|into| read(into, which, a, b))
            }
        };
        // SAFETY: as above.
        let peer_access = unsafe {
            let can_access = self.function::<CanAccessPeer>("cuDeviceCanAccessPeer")?;
            number(|into| can_access(into, a, b))? != 0
        };
        let native_atomics = attribute(NATIVE_ATOMICS).is_some_and(|value| value != 0);
        let rank = attribute(PERFORMANCE_RANK).and_then(|rank| u32::try_from(rank).ok());
        Some(DeviceLink { from, to, peer_access, native_atomics, rank })
    }
}

/// Returns the number that a driver function writes, unless it fails.
fn number(read: impl FnOnce(*mut c_int) -> c_int) -> Option<c_int> {
    let mut number = 0;
    (read(&mut number) == 0).then_some(number)
}

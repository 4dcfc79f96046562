//! Devices and the links between them, from the CUDA driver.
//!
//! The library has checked the driver before any function is called here; the three functions that
//! it does not use itself are looked up first, and a driver without them leaves links unknown.

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

/// Adds the devices and the links between them to the record, or a note why there are none.
pub(super) fn read_devices(sysfs: &Path, machine: &mut Machine) {
    match kvpool_cuda::devices() {
        Err(error) => machine.notes.push(format!("devices: {error}")),
        Ok(infos) => match Driver::open() {
            Ok(driver) => driver.read(sysfs, &infos, machine),
            Err(error) => {
                machine.devices = infos.iter().map(|info| device(info, None, sysfs)).collect();
                machine.notes.push(format!("links between devices: {error}"));
            }
        },
    }
}

/// The driver's library.
struct Driver(Library);

impl Driver {
    fn open() -> Result<Self, libloading::Error> {
        // SAFETY: the driver is loaded already, so that no code runs by loading it once more.
        let library = unsafe { Library::new("libcuda.so.1").or_else(|_| Library::new("libcuda.so")) }?;
        Ok(Self(library))
    }

    fn read(&self, sysfs: &Path, infos: &[DeviceInfo], machine: &mut Machine) {
        let handles: Vec<_> = infos.iter().map(|info| self.handle(info.ordinal)).collect();
        for (info, handle) in infos.iter().zip(&handles) {
            let address = handle.and_then(|handle| self.address(handle));
            machine.devices.push(device(info, address.as_deref(), sysfs));
        }
        for (from, a) in infos.iter().zip(&handles) {
            for (to, b) in infos.iter().zip(&handles) {
                let (Some(a), Some(b)) = (*a, *b) else { continue };
                if from.ordinal == to.ordinal {
                    continue;
                }
                match self.link(a, b) {
                    Some((peer_access, native_atomics, rank)) => machine.device_links.push(DeviceLink {
                        from: from.ordinal,
                        to: to.ordinal,
                        peer_access,
                        native_atomics,
                        rank,
                    }),
                    None => machine.notes.push(format!(
                        "the driver does not report the link from cuda:{} to cuda:{}",
                        from.ordinal, to.ordinal
                    )),
                }
            }
        }
    }

    /// Looks up a function; `None` if the driver has none of this name.
    ///
    /// # Safety
    ///
    /// The function has this type.
    unsafe fn function<F>(&self, name: &str) -> Option<Symbol<'_, F>> {
        // SAFETY: by the contract of this function.
        unsafe { self.0.get(name) }.ok()
    }

    fn handle(&self, ordinal: u16) -> Option<c_int> {
        let mut device = 0;
        // SAFETY: the type is that of the driver's interface, and the pointer is valid.
        unsafe {
            let get = self.function::<DeviceGet>("cuDeviceGet")?;
            (get(&mut device, c_int::from(ordinal)) == 0).then_some(device)
        }
    }

    /// Returns the PCI address, such as `0000:01:00.0`.
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

    /// Returns whether there is peer access, whether it has native atomics, and its rank.
    fn link(&self, from: c_int, to: c_int) -> Option<(bool, bool, Option<u32>)> {
        let mut access = 0;
        // SAFETY: the type is that of the driver's interface, and the pointer is valid.
        unsafe {
            let can_access = self.function::<CanAccessPeer>("cuDeviceCanAccessPeer")?;
            if can_access(&mut access, from, to) != 0 {
                return None;
            }
        }
        let atomics = self.attribute(NATIVE_ATOMICS, from, to).is_some_and(|value| value != 0);
        let rank = self.attribute(PERFORMANCE_RANK, from, to).and_then(|rank| u32::try_from(rank).ok());
        Some((access != 0, atomics, rank))
    }

    fn attribute(&self, which: c_int, from: c_int, to: c_int) -> Option<c_int> {
        let mut value = 0;
        // SAFETY: the type is that of the driver's interface, and the pointer is valid.
        unsafe {
            let read = self.function::<P2pAttribute>("cuDeviceGetP2PAttribute")?;
            (read(&mut value, which, from, to) == 0).then_some(value)
        }
    }
}

fn device(info: &DeviceInfo, address: Option<&str>, sysfs: &Path) -> Device {
    let (pci, memory_node) = address.map_or((None, None), |address| pci_device(sysfs, address));
    Device {
        ordinal: info.ordinal,
        name: info.name.clone(),
        memory_bytes: info.memory_bytes,
        memory_node,
        pci,
        unusable: info.unusable.as_ref().map(ToString::to_string),
    }
}

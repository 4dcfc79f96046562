//! Network interfaces, RDMA ports and memory nodes, from a tree such as `/sys`.
//!
//! Read: `class/net/*/{operstate,speed,type,device}`, `class/infiniband/*/ports/*/{state,rate,
//! link_layer}`, `devices/system/node/node*/{cpulist,meminfo}`, `module/*` for the peer memory
//! modules. A missing folder means that there are none. A file that cannot be read, or whose
//! contents have another form, leaves its field unknown and adds a note.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::machine::{LinkLayer, Machine, MemoryNode, Nic, PciPath, RdmaPort};

/// Kernel modules that let adapters access the memory of NVIDIA devices.
const PEER_MEMORY_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// The type of a loopback interface, `ARPHRD_LOOPBACK`.
const LOOPBACK: &str = "772";

/// A folder of the tree cannot be listed.
#[derive(Debug, Error)]
#[error("cannot list {}: {error}", .path.display())]
#[non_exhaustive]
pub struct SysfsError {
    /// The folder.
    pub path: PathBuf,
    /// The system's error.
    pub error: io::Error,
}

/// Adds the parts that a tree shows to the record of a machine.
///
/// # Errors
///
/// [`SysfsError`] if a folder exists and cannot be listed; the record then has the parts that were
/// read before.
pub fn read_sysfs(root: &Path, machine: &mut Machine) -> Result<(), SysfsError> {
    let mut tree = Tree { notes: Vec::new() };
    let read = tree.read(root, machine);
    machine.notes.append(&mut tree.notes);
    read
}

/// Returns the place of the PCI device of this address, such as `0000:01:00.0`, and its NUMA node.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices are found by address"))]
pub(super) fn pci_device(root: &Path, address: &str) -> (Option<PciPath>, Option<u32>) {
    let folder = root.join("bus/pci/devices").join(address.to_ascii_lowercase());
    (pci_path(&folder), memory_node(&folder))
}

struct Tree {
    notes: Vec<String>,
}

impl Tree {
    fn read(&mut self, root: &Path, machine: &mut Machine) -> Result<(), SysfsError> {
        for (id, folder) in numbered(&root.join("devices/system/node"), "node")? {
            machine.memory_nodes.push(self.memory_node(id, &folder));
        }
        for folder in list(&root.join("class/net"))? {
            // Beside the interfaces there may be files, such as bonding_masters.
            if folder.is_dir() {
                machine.nics.push(self.nic(&folder));
            }
        }
        for folder in list(&root.join("class/infiniband"))? {
            for (port, ports) in numbered(&folder.join("ports"), "")? {
                machine.rdma_ports.push(self.port(&folder, port, &ports));
            }
        }
        machine.software.gpu_direct =
            PEER_MEMORY_MODULES.iter().any(|module| root.join("module").join(module).is_dir());
        Ok(())
    }

    fn memory_node(&mut self, id: u32, folder: &Path) -> MemoryNode {
        let cpus = self.text(&folder.join("cpulist")).unwrap_or_default();
        // "Node 0 MemTotal:       131072000 kB"
        let total = self.text(&folder.join("meminfo")).and_then(|text| {
            let line = text.lines().find(|line| line.contains("MemTotal:"))?.to_owned();
            let kilobytes = line.split_whitespace().rev().nth(1)?;
            kilobytes.parse::<u64>().ok()?.checked_mul(1024)
        });
        MemoryNode { id, cpus, memory_bytes: total }
    }

    fn nic(&mut self, folder: &Path) -> Nic {
        let is_loopback = self.text(&folder.join("type")).as_deref() == Some(LOOPBACK);
        let state = self.text(&folder.join("operstate")).unwrap_or_default();
        // The speed of an interface that is down, or has none, is an error or -1.
        let speed = fs::read_to_string(folder.join("speed")).unwrap_or_default();
        let device = folder.join("device");
        Nic {
            name: name(folder),
            is_loopback,
            // The state of an interface without a carrier to watch is unknown, and it is usable.
            is_up: state == "up" || state == "unknown",
            is_physical: device.exists(),
            megabits: speed.trim().parse::<u64>().ok().filter(|&megabits| megabits != u64::from(u32::MAX)),
            memory_node: memory_node(&device),
        }
    }

    fn port(&mut self, adapter: &Path, port: u32, folder: &Path) -> RdmaPort {
        let device = adapter.join("device");
        let layer = self.text(&folder.join("link_layer")).unwrap_or_default();
        let rate = self.text(&folder.join("rate"));
        let megabits = rate.as_deref().and_then(megabits);
        if let (Some(rate), None) = (&rate, megabits) {
            self.notes.push(format!("{}: {rate:?} is no rate", folder.join("rate").display()));
        }
        RdmaPort {
            device: name(adapter),
            port,
            // "4: ACTIVE"
            is_active: self.text(&folder.join("state")).is_some_and(|state| state.ends_with("ACTIVE")),
            link_layer: match layer.as_str() {
                "InfiniBand" => LinkLayer::Infiniband,
                "Ethernet" => LinkLayer::Ethernet,
                _ => LinkLayer::Unknown,
            },
            megabits,
            memory_node: memory_node(&device),
            pci: pci_path(&device),
        }
    }

    /// Reads a file of one value.
    fn text(&mut self, path: &Path) -> Option<String> {
        match fs::read_to_string(path) {
            Ok(text) => Some(text.trim().to_owned()),
            Err(error) => {
                self.notes.push(format!("{}: {error}", path.display()));
                None
            }
        }
    }
}

/// Parses a rate such as `400 Gb/sec (4X NDR)` or `2.5 Gb/sec (1X SDR)`.
fn megabits(rate: &str) -> Option<u64> {
    let (number, unit) = rate.split_once(' ')?;
    let number: f64 = number.parse().ok()?;
    let is_rate = unit.starts_with("Gb/sec") && (0.0..1e6).contains(&number);
    is_rate.then_some((number * 1000.0) as u64)
}

/// Returns the NUMA node of a device; -1 in the file means unknown.
fn memory_node(device: &Path) -> Option<u32> {
    fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()
}

/// Returns the place of a device in the tree of PCI bridges, from the path that its link leads to.
fn pci_path(device: &Path) -> Option<PciPath> {
    let real = fs::canonicalize(device).ok()?;
    let parts = real.iter().map(|part| part.to_str()).collect::<Option<Vec<_>>>()?;
    let root = parts.iter().rposition(|part| part.starts_with("pci"))?;
    let is_address = |part: &&&str| part.len() == 12 && part.as_bytes()[10] == b'.';
    let below: Vec<&str> = parts[root + 1..].iter().take_while(is_address).copied().collect();
    (!below.is_empty()).then(|| PciPath(format!("{}/{}", parts[root], below.join("/"))))
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Lists a folder in the order of names; a missing one is empty.
fn list(folder: &Path) -> Result<Vec<PathBuf>, SysfsError> {
    let read = || match fs::read_dir(folder) {
        Ok(entries) => entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error),
    };
    let mut paths = read().map_err(|error| SysfsError { path: folder.to_owned(), error })?;
    paths.sort();
    Ok(paths)
}

/// Lists the folders whose names are a prefix and a number, in the order of numbers.
fn numbered(folder: &Path, prefix: &str) -> Result<Vec<(u32, PathBuf)>, SysfsError> {
    let number = |path: &PathBuf| name(path).strip_prefix(prefix)?.parse().ok();
    let mut found: Vec<_> =
        list(folder)?.into_iter().filter_map(|path| Some((number(&path)?, path))).collect();
    found.sort();
    Ok(found)
}

//! Network interfaces, RDMA ports and memory nodes, from a tree such as `/sys`.
//!
//! Read: `class/net/*/{operstate,speed,type,device}`, `class/infiniband/*/ports/*/{state,rate,
//! link_layer}`, `devices/system/node/node*/{cpulist,meminfo}`, `module/*` for the peer memory
//! modules. A missing folder means that there are none. An unreadable file or folder leaves its
//! part unknown and adds a note.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::machine::{Machine, MemoryNode, Nic, RdmaPort};

/// Kernel modules that let adapters access the memory of NVIDIA devices.
const PEER_MEMORY_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// The type of a loopback interface, `ARPHRD_LOOPBACK`.
const LOOPBACK: &str = "772";

/// Adds the parts found in a tree to the record of a machine.
pub fn read_sysfs(root: &Path, machine: &mut Machine) {
    let notes = &mut machine.notes;
    for (id, folder) in numbered(&root.join("devices/system/node"), "node", notes) {
        machine.memory_nodes.push(read_memory_node(id, &folder, notes));
    }
    for folder in list(&root.join("class/net"), notes) {
        // There may also be files, such as bonding_masters.
        if folder.is_dir() {
            machine.nics.push(read_nic(&folder, notes));
        }
    }
    for folder in list(&root.join("class/infiniband"), notes) {
        for (port, ports) in numbered(&folder.join("ports"), "", notes) {
            machine.rdma_ports.push(read_port(&folder, port, &ports, notes));
        }
    }
    machine.software.gpu_direct =
        PEER_MEMORY_MODULES.iter().any(|module| root.join("module").join(module).is_dir());
}

/// Returns the PCI bridges above the device of an address (`0000:01:00.0`), and its NUMA node.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only devices are found by address"))]
pub(super) fn pci_device(root: &Path, address: &str) -> (Option<String>, Option<u32>) {
    let folder = root.join("bus/pci/devices").join(address.to_ascii_lowercase());
    (pci_path(&folder), memory_node(&folder))
}

fn read_memory_node(id: u32, folder: &Path, notes: &mut Vec<String>) -> MemoryNode {
    let cpus = text(&folder.join("cpulist"), notes).unwrap_or_default();
    // "Node 0 MemTotal:       131072000 kB"
    let memory_bytes = text(&folder.join("meminfo"), notes).and_then(|text| {
        let line = text.lines().find(|line| line.contains("MemTotal:"))?;
        line.split_whitespace().rev().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
    });
    MemoryNode { id, cpus, memory_bytes }
}

fn read_nic(folder: &Path, notes: &mut Vec<String>) -> Nic {
    let state = text(&folder.join("operstate"), notes).unwrap_or_default();
    // For an interface that is down or has no speed, this is an error or -1.
    let speed = fs::read_to_string(folder.join("speed")).unwrap_or_default();
    let device = folder.join("device");
    Nic {
        name: name(folder),
        is_loopback: text(&folder.join("type"), notes).as_deref() == Some(LOOPBACK),
        // Interfaces without a carrier to watch have the state "unknown", and are usable.
        is_up: state == "up" || state == "unknown",
        is_physical: device.exists(),
        megabits: speed.trim().parse::<u64>().ok().filter(|&megabits| megabits != u64::from(u32::MAX)),
        memory_node: memory_node(&device),
    }
}

fn read_port(adapter: &Path, port: u32, folder: &Path, notes: &mut Vec<String>) -> RdmaPort {
    let device = adapter.join("device");
    let rate = text(&folder.join("rate"), notes);
    let megabits = rate.as_deref().and_then(megabits);
    if let (Some(rate), None) = (rate, megabits) {
        notes.push(format!("{}: {rate:?} is no rate", folder.join("rate").display()));
    }
    RdmaPort {
        device: name(adapter),
        port,
        // "4: ACTIVE"
        is_active: text(&folder.join("state"), notes).is_some_and(|state| state.ends_with("ACTIVE")),
        link_layer: text(&folder.join("link_layer"), notes).unwrap_or_else(|| "unknown".to_owned()),
        megabits,
        memory_node: memory_node(&device),
        pci: pci_path(&device),
    }
}

fn text(path: &Path, notes: &mut Vec<String>) -> Option<String> {
    let text = fs::read_to_string(path);
    text.map(|text| text.trim().to_owned()).map_err(|error| note(path, &error, notes)).ok()
}

fn note(path: &Path, error: &io::Error, notes: &mut Vec<String>) {
    notes.push(format!("{}: {error}", path.display()));
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

/// Returns the PCI bridges above a device, from the target of its link.
fn pci_path(device: &Path) -> Option<String> {
    let real = fs::canonicalize(device).ok()?;
    let parts = real.iter().map(|part| part.to_str()).collect::<Option<Vec<_>>>()?;
    let root = parts.iter().rposition(|part| part.starts_with("pci"))?;
    let is_address = |part: &&&str| part.len() == 12 && part.as_bytes()[10] == b'.';
    let below: Vec<&str> = parts[root + 1..].iter().take_while(is_address).copied().collect();
    (!below.is_empty()).then(|| format!("{}/{}", parts[root], below.join("/")))
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Lists a folder, sorted by name.
fn list(folder: &Path, notes: &mut Vec<String>) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect());
    let mut paths: Vec<PathBuf> = entries.unwrap_or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            note(folder, &error, notes);
        }
        Vec::new()
    });
    paths.sort();
    paths
}

/// Lists the folders named by a prefix and a number, sorted by number.
fn numbered(folder: &Path, prefix: &str, notes: &mut Vec<String>) -> Vec<(u32, PathBuf)> {
    let number = |path: &Path| name(path).strip_prefix(prefix)?.parse().ok();
    let mut found: Vec<_> =
        list(folder, notes).into_iter().filter_map(|path| Some((number(&path)?, path))).collect();
    found.sort();
    found
}

//! The choice of a path, as a pure function of the record.
//!
//! | from, to | paths, the preferred one first |
//! |---|---|
//! | the same memory | a copy within it |
//! | two devices | NVLink · peer access over PCIe · through host memory |
//! | host and device | a copy over the device's bus |
//! | a peer on this host | Unix socket · the loopback |
//! | another peer, from a device | RDMA from device memory · RDMA from host memory · TCP |
//! | another peer, from the host | RDMA · TCP |
//!
//! RDMA needs NIXL at both ends and an active port; the nearest one is used. RDMA of device memory
//! needs a peer memory module.

use std::cmp::Reverse;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::machine::{Device, Machine, Peer, RdmaPort};

/// The record has no such part.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{machine} has no {end}; it has {known}")]
pub struct UnknownEnd {
    /// Name of the machine.
    pub machine: String,
    /// The missing part.
    pub end: String,
    /// The existing parts.
    pub known: String,
}

/// Means of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PathTransport {
    /// A copy within one memory.
    Copy,
    /// A copy between host and device memory.
    DeviceBus,
    /// NVLink between two devices.
    NvLink,
    /// Peer access between two devices over PCIe.
    PeerAccess,
    /// From one device to another through host memory.
    ThroughHost,
    /// A Unix socket on this host.
    UnixSocket,
    /// TCP.
    Tcp,
    /// RDMA from and into the pool's memory.
    Rdma,
    /// RDMA from and into host memory, with copies between host and device memory.
    RdmaThroughHost,
    /// Through this node, between two peers: no transfer takes this path by itself.
    Relay,
}

impl fmt::Display for PathTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copy => "copy",
            Self::DeviceBus => "PCIe copy",
            Self::NvLink => "NVLink",
            Self::PeerAccess => "PCIe peer access",
            Self::ThroughHost => "through host memory",
            Self::UnixSocket => "Unix socket",
            Self::Tcp => "TCP",
            Self::Rdma => "RDMA",
            Self::RdmaThroughHost => "RDMA through host memory",
            Self::Relay => "relay",
        })
    }
}

/// The path of a transfer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Path {
    /// One end.
    pub from: String,
    /// The other end.
    pub to: String,
    /// Means.
    pub transport: PathTransport,
    /// What the bytes pass, including both ends.
    pub hops: Vec<String>,
    /// Why this path was chosen over a preferred one.
    pub reason: String,
}

#[derive(Clone, Copy, PartialEq)]
enum End<'a> {
    Host,
    Device(&'a Device),
    Peer(&'a Peer),
}

impl End<'_> {
    fn name(self) -> String {
        match self {
            Self::Host => "host".to_owned(),
            Self::Device(device) => format!("cuda:{}", device.ordinal),
            Self::Peer(peer) => peer.name.clone(),
        }
    }
}

/// The part of a path between its ends: means, hops, and the reason.
type Way = (PathTransport, Vec<String>, String);

fn way(transport: PathTransport, via: &[&str], reason: impl Into<String>) -> Way {
    (transport, via.iter().map(ToString::to_string).collect(), reason.into())
}

fn ends(machine: &Machine) -> Vec<End<'_>> {
    let devices = machine.devices.iter().map(End::Device);
    [End::Host].into_iter().chain(devices).chain(machine.peers.iter().map(End::Peer)).collect()
}

/// Returns the path of a transfer between two ends: `host`, `cuda:N`, or the name of a peer.
///
/// # Errors
/// [`UnknownEnd`] if the record has no such device or peer.
pub fn path(machine: &Machine, from: &str, to: &str) -> Result<Path, UnknownEnd> {
    let all = ends(machine);
    let end = |name: &str| {
        all.iter().copied().find(|end| end.name() == name).ok_or_else(|| UnknownEnd {
            machine: machine.name.clone(),
            end: name.to_owned(),
            known: all.iter().map(|end| end.name()).collect::<Vec<_>>().join(", "),
        })
    };
    Ok(between(machine, end(from)?, end(to)?))
}

/// Returns the paths between all ends of a machine, each pair once.
pub fn paths(machine: &Machine) -> Vec<Path> {
    let ends = ends(machine);
    let pairs =
        ends.iter().enumerate().flat_map(|(at, from)| ends[at + 1..].iter().map(move |to| (from, to)));
    pairs.map(|(&from, &to)| between(machine, from, to)).collect()
}

fn between(machine: &Machine, from: End<'_>, to: End<'_>) -> Path {
    let (transport, via, reason) = match (from, to) {
        _ if from == to => way(PathTransport::Copy, &[], "both ends are the same memory, or the same node"),
        (End::Peer(_), End::Peer(_)) => {
            let reason = "two other nodes transfer directly, over a path that their own topology shows";
            way(PathTransport::Relay, &["this node"], reason)
        }
        (End::Device(a), End::Device(b)) => between_devices(machine, a, b),
        (End::Device(device), End::Peer(peer)) => to_peer(machine, Some(device), peer),
        (_, End::Peer(peer)) => to_peer(machine, None, peer),
        (End::Peer(_), _) => {
            let Path { transport, mut hops, reason, .. } = between(machine, to, from);
            hops.reverse();
            return Path { from: from.name(), to: to.name(), transport, hops, reason };
        }
        _ => {
            let reason = "the device's copy engine reads and writes pinned host memory";
            way(PathTransport::DeviceBus, &[], reason)
        }
    };
    let last = (from != to).then(|| to.name());
    let hops = [from.name()].into_iter().chain(via).chain(last).collect();
    Path { from: from.name(), to: to.name(), transport, hops, reason }
}

fn between_devices(machine: &Machine, a: &Device, b: &Device) -> Way {
    let link = machine.device_links.iter().find(|link| (link.from, link.to) == (a.ordinal, b.ordinal));
    match link {
        Some(link) if link.peer_access && link.native_atomics => {
            let reason =
                "the driver reports peer access and native atomics, which NVLink has and PCIe has not";
            way(PathTransport::NvLink, &["NVLink"], reason)
        }
        Some(link) if link.peer_access => {
            let place = match common_bridges(a.pci.as_ref(), b.pci.as_ref()) {
                None => "",
                Some(0) => ", between two host bridges",
                Some(1) => ", through the host bridge",
                Some(_) => ", behind one PCI switch",
            };
            let reason = format!("the driver reports peer access without NVLink{place}");
            way(PathTransport::PeerAccess, &["PCIe"], reason)
        }
        Some(_) => {
            let reason = "the driver refuses peer access between these devices";
            way(PathTransport::ThroughHost, &["host"], reason)
        }
        None => way(PathTransport::ThroughHost, &["host"], "no link between these devices is known"),
    }
}

fn to_peer(machine: &Machine, device: Option<&Device>, peer: &Peer) -> Way {
    // Only RDMA reads the memory of a device.
    let staged = |transport, via: &str, reason: &str| match device {
        Some(_) => way(transport, &["host", via], reason),
        None => way(transport, &[via], reason),
    };
    if peer.is_local && peer.is_unix {
        return staged(
            PathTransport::UnixSocket,
            "Unix socket",
            "the peer is on this host, on a Unix socket",
        );
    }
    if peer.is_local {
        return staged(PathTransport::Tcp, "loopback", "the peer is on this host, on the loopback");
    }
    if !peer.rdma {
        return staged(PathTransport::Tcp, "TCP", "the peer offers no RDMA, as far as is known");
    }
    let Some((port, why)) = nearest_port(machine, device) else {
        return staged(PathTransport::Tcp, "TCP", "this machine has no active RDMA port");
    };
    if device.is_some() && !machine.software.gpu_direct {
        let why = format!("{why}; adapters cannot read device memory: no peer memory module is loaded");
        return staged(PathTransport::RdmaThroughHost, &port, &why);
    }
    way(PathTransport::Rdma, &[&port], why)
}

/// Returns the active port nearest to a device, and the reason: by PCI bridges, then by NUMA node,
/// then the fastest, then the first by name.
fn nearest_port(machine: &Machine, device: Option<&Device>) -> Option<(String, String)> {
    let bridges =
        |port: &RdmaPort| common_bridges(device?.pci.as_ref(), port.pci.as_ref()).filter(|&n| n > 1);
    let is_far = |port: &RdmaPort| Some(device?.memory_node? != port.memory_node?);
    let key = |port: &&RdmaPort| {
        let name = (port.device.clone(), port.port);
        (Reverse(bridges(port)), is_far(port) == Some(true), Reverse(port.megabits), name)
    };
    let port = machine.rdma_ports.iter().filter(|port| port.is_active).min_by_key(key)?;
    let near = match (bridges(port), is_far(port)) {
        (Some(_), _) => "behind the device's PCI switch",
        (None, Some(false)) => "on the device's NUMA node",
        (None, Some(true)) => "on another NUMA node than the device, where no port is active",
        (None, None) => "the fastest active port",
    };
    let speed = port.megabits.map(|megabits| format!(", {} Gb/s", megabits / 1000)).unwrap_or_default();
    Some((format!("{} port {}", port.device, port.port), format!("{}{speed}: {near}", port.link_layer)))
}

/// Returns the number of PCI bridges that two devices share, including the host bridge, if known.
fn common_bridges(a: Option<&String>, b: Option<&String>) -> Option<usize> {
    let (a, b) = a.zip(b)?;
    Some(a.split('/').zip(b.split('/')).take_while(|(a, b)| a == b).count())
}

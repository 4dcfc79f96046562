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
//! RDMA needs NIXL, an active port, and a peer that offers the same link layer. Of several ports the
//! one nearest to the memory is taken: behind the same PCI switch, then on the same NUMA node, then
//! the fastest, then the first by name. RDMA reads device memory only through a peer memory module.

use std::cmp::Reverse;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::machine::{Device, Machine, Nic, PciDistance, Peer, RdmaPort};

/// An end of a transfer.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Endpoint {
    /// Memory of this host.
    Host,
    /// Memory of a device, by ordinal.
    Device(u16),
    /// A pool of another node, by name.
    Peer(String),
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Device(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Peer(name) => write!(f, "{name}"),
        }
    }
}

impl FromStr for Endpoint {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let ordinal = || text.strip_prefix("cuda:")?.parse().ok();
        Ok(match (text, ordinal()) {
            ("host", _) => Self::Host,
            (_, Some(ordinal)) => Self::Device(ordinal),
            (name, None) => Self::Peer(name.to_owned()),
        })
    }
}

/// The record has no such part.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{machine} has no {endpoint}; it has {known}")]
pub struct UnknownEndpoint {
    /// Name of the machine.
    pub machine: String,
    /// The missing part.
    pub endpoint: Endpoint,
    /// The parts that there are.
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
    /// From one device through host memory to another.
    ThroughHost,
    /// A Unix socket on this host.
    UnixSocket,
    /// TCP.
    Tcp,
    /// RDMA from and into the pool's memory.
    Rdma,
    /// RDMA from and into host memory, beside which device memory is copied.
    RdmaThroughHost,
    /// Through this node, which is between two peers: no transfer takes this path by itself.
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
    /// Means.
    pub transport: PathTransport,
    /// What the bytes pass, with both ends.
    pub hops: Vec<String>,
    /// Why this path was chosen, and not a preferred one.
    pub reason: String,
}

/// Returns the path of a transfer.
///
/// # Errors
///
/// [`UnknownEndpoint`] if the record has no such device or peer.
pub fn path(machine: &Machine, from: &Endpoint, to: &Endpoint) -> Result<Path, UnknownEndpoint> {
    for end in [from, to] {
        check(machine, end)?;
    }
    Ok(match (from, to) {
        (Endpoint::Peer(a), Endpoint::Peer(b)) if a != b => between_peers(from, to),
        _ if from == to => within(from),
        (Endpoint::Device(a), Endpoint::Device(b)) => between_devices(machine, *a, *b),
        (Endpoint::Peer(name), end) => {
            // The same path, in the other direction.
            let mut path = to_peer(machine, end, name);
            path.hops.reverse();
            path
        }
        (end, Endpoint::Peer(name)) => to_peer(machine, end, name),
        _ => Path {
            transport: PathTransport::DeviceBus,
            hops: hops([from, to]),
            reason: "the device's copy engine reads and writes pinned host memory".to_owned(),
        },
    })
}

/// Returns the path between any two ends of a machine, each pair once.
pub fn paths(machine: &Machine) -> Vec<(Endpoint, Endpoint, Path)> {
    let ends = endpoints(machine);
    let pairs =
        ends.iter().enumerate().flat_map(|(at, from)| ends[at + 1..].iter().map(move |to| (from, to)));
    pairs.filter_map(|(from, to)| Some((from.clone(), to.clone(), path(machine, from, to).ok()?))).collect()
}

fn endpoints(machine: &Machine) -> Vec<Endpoint> {
    let devices = machine.devices.iter().map(|device| Endpoint::Device(device.ordinal));
    let peers = machine.peers.iter().map(|peer| Endpoint::Peer(peer.name.clone()));
    [Endpoint::Host].into_iter().chain(devices).chain(peers).collect()
}

fn check(machine: &Machine, end: &Endpoint) -> Result<(), UnknownEndpoint> {
    let is_known = match end {
        Endpoint::Host => true,
        Endpoint::Device(ordinal) => machine.device(*ordinal).is_some(),
        Endpoint::Peer(name) => machine.peer(name).is_some(),
    };
    if is_known {
        return Ok(());
    }
    let known: Vec<_> = endpoints(machine).iter().map(ToString::to_string).collect();
    let (machine, endpoint) = (machine.name.clone(), end.clone());
    Err(UnknownEndpoint { machine, endpoint, known: known.join(", ") })
}

fn hops<const N: usize>(hops: [&dyn fmt::Display; N]) -> Vec<String> {
    hops.iter().map(ToString::to_string).collect()
}

fn within(end: &Endpoint) -> Path {
    let reason = match end {
        Endpoint::Peer(_) => "both ends are the same node, which copies within its own memory",
        _ => "both ends are the same memory",
    };
    Path { transport: PathTransport::Copy, hops: vec![end.to_string()], reason: reason.to_owned() }
}

fn between_peers(from: &Endpoint, to: &Endpoint) -> Path {
    let reason = format!(
        "{from} and {to} are other nodes: they transfer directly, over a path that their own topology shows"
    );
    Path { transport: PathTransport::Relay, hops: hops([from, &"this node", to]), reason }
}

fn between_devices(machine: &Machine, from: u16, to: u16) -> Path {
    let (a, b) = (Endpoint::Device(from), Endpoint::Device(to));
    match machine.link(from, to) {
        Some(link) if link.peer_access && link.native_atomics => Path {
            transport: PathTransport::NvLink,
            hops: hops([&a, &"NVLink", &b]),
            reason: "the driver reports peer access and native atomics, which NVLink has and PCIe has not"
                .to_owned(),
        },
        Some(link) if link.peer_access => Path {
            transport: PathTransport::PeerAccess,
            hops: hops([&a, &"PCIe", &b]),
            reason: format!(
                "the driver reports peer access without NVLink{}",
                place(machine.device(from), machine.device(to))
            ),
        },
        link => Path {
            transport: PathTransport::ThroughHost,
            hops: hops([&a, &"host", &b]),
            reason: match link {
                Some(_) => "the driver refuses peer access between these devices".to_owned(),
                None => "no link between these devices is known".to_owned(),
            },
        },
    }
}

/// Describes where two devices meet.
fn place(a: Option<&Device>, b: Option<&Device>) -> &'static str {
    let pci = |device: Option<&Device>| device.and_then(|device| device.pci.clone());
    match (pci(a), pci(b)) {
        (Some(a), Some(b)) => match a.distance(&b) {
            PciDistance::Switch(_) => ", behind one PCI switch",
            PciDistance::HostBridge => ", through the host bridge",
            PciDistance::Apart => ", between two host bridges",
        },
        _ => "",
    }
}

/// Returns the path from memory of this machine to a peer.
fn to_peer(machine: &Machine, from: &Endpoint, name: &str) -> Path {
    let Some(peer) = machine.peer(name) else { unreachable!("the caller looked the peer up") };
    let device = match from {
        Endpoint::Device(ordinal) => machine.device(*ordinal),
        _ => None,
    };
    if peer.is_local {
        let (transport, hop, reason) = match peer.is_unix {
            true => (PathTransport::UnixSocket, "Unix socket", "the peer is on this host, on a Unix socket"),
            false => (PathTransport::Tcp, "loopback", "the peer is on this host, on the loopback"),
        };
        return staged(transport, from, &[hop.to_owned()], peer, reason.to_owned());
    }
    let refusal = match port(machine, device, peer) {
        Ok((port, why)) => {
            let hop = format!("{} port {}", port.device, port.port);
            return match device {
                Some(_) if !machine.software.gpu_direct => staged(
                    PathTransport::RdmaThroughHost,
                    from,
                    &[hop],
                    peer,
                    format!(
                        "{why}; no peer memory module is loaded, so that adapters cannot read device memory"
                    ),
                ),
                _ => {
                    Path { transport: PathTransport::Rdma, hops: hops([from, &hop, &peer.name]), reason: why }
                }
            };
        }
        Err(refusal) => refusal,
    };
    match nic(machine, from, device) {
        Some(nic) => {
            let megabits = nic.megabits.map(|megabits| format!(" ({megabits} Mb/s)")).unwrap_or_default();
            let reason = format!("{refusal}; {}{megabits} is the best connected interface", nic.name);
            staged(PathTransport::Tcp, from, std::slice::from_ref(&nic.name), peer, reason)
        }
        None => {
            let reason =
                format!("{refusal}; no network interface is connected, so that the route is unknown");
            staged(PathTransport::Tcp, from, &["no interface".to_owned()], peer, reason)
        }
    }
}

/// Returns a path that host memory begins: device memory is copied there first.
fn staged(transport: PathTransport, from: &Endpoint, via: &[String], peer: &Peer, reason: String) -> Path {
    let mut hops = vec![from.to_string()];
    if *from != Endpoint::Host {
        hops.push(Endpoint::Host.to_string());
    }
    hops.extend_from_slice(via);
    hops.push(peer.name.clone());
    Path { transport, hops, reason }
}

/// Returns the port for RDMA to a peer and the reason for it, or why there is none.
fn port<'a>(
    machine: &'a Machine,
    device: Option<&Device>,
    peer: &Peer,
) -> Result<(&'a RdmaPort, String), String> {
    let Some(layer) = peer.rdma else { return Err("the peer offers no RDMA, as far as is known".to_owned()) };
    if machine.rdma_ports.is_empty() {
        return Err("this machine has no RDMA port".to_owned());
    }
    if !machine.software.nixl {
        return Err("NIXL, which drives RDMA, cannot be loaded here".to_owned());
    }
    let fits = |port: &&RdmaPort| port.is_active && port.link_layer == layer;
    let key = |port: &&RdmaPort| {
        let near = distance(device, port);
        (near, Reverse(port.megabits.unwrap_or(0)), port.device.clone(), port.port)
    };
    let best = machine.rdma_ports.iter().filter(fits).min_by_key(key);
    let Some(port) = best else { return Err(format!("no port is active over {layer}, as the peer's is")) };
    let speed = port.megabits.map(|megabits| format!(", {} Gb/s", megabits / 1000)).unwrap_or_default();
    let near = match distance(device, port) {
        Nearness::Switch(_) => "behind the device's PCI switch",
        Nearness::MemoryNode => "on the device's NUMA node",
        Nearness::Unknown => "the fastest active port",
        Nearness::OtherNode => "on another NUMA node than the device, where no port is active",
    };
    Ok((port, format!("{layer}{speed}: {near}")))
}

/// How near an adapter is to memory, the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Nearness {
    Switch(usize),
    MemoryNode,
    Unknown,
    OtherNode,
}

fn distance(device: Option<&Device>, port: &RdmaPort) -> Nearness {
    let Some(device) = device else { return Nearness::Unknown };
    if let (Some(a), Some(b)) = (&device.pci, &port.pci)
        && let PciDistance::Switch(bridges) = a.distance(b)
    {
        return Nearness::Switch(bridges);
    }
    match (device.memory_node, port.memory_node) {
        (Some(a), Some(b)) if a == b => Nearness::MemoryNode,
        (Some(_), Some(_)) => Nearness::OtherNode,
        _ => Nearness::Unknown,
    }
}

/// Returns the interface for TCP: connected, hardware before others, then near, then fast.
fn nic<'a>(machine: &'a Machine, from: &Endpoint, device: Option<&Device>) -> Option<&'a Nic> {
    debug_assert!(!matches!(from, Endpoint::Peer(_)));
    let node = device.and_then(|device| device.memory_node);
    let is_far = |nic: &Nic| matches!((node, nic.memory_node), (Some(a), Some(b)) if a != b);
    let key = |nic: &&Nic| {
        (Reverse(nic.is_physical), Reverse(nic.megabits.unwrap_or(0)), is_far(nic), nic.name.clone())
    };
    machine.nics.iter().filter(|nic| nic.is_up && !nic.is_loopback).min_by_key(key)
}

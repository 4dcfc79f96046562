//! The record of a machine.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A machine, as far as transfers of blocks are concerned.
///
/// The record is plain data, as JSON too. Its parts refer to each other by number and name; a
/// reference to a missing part is not an error, but counts as unknown.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Name of the host.
    pub name: String,
    /// NUMA nodes.
    #[serde(default)]
    pub memory_nodes: Vec<MemoryNode>,
    /// CUDA devices.
    #[serde(default)]
    pub devices: Vec<Device>,
    /// Links between devices, one entry for each direction that the driver reports.
    #[serde(default)]
    pub device_links: Vec<DeviceLink>,
    /// Network interfaces.
    #[serde(default)]
    pub nics: Vec<Nic>,
    /// Ports of RDMA adapters.
    #[serde(default)]
    pub rdma_ports: Vec<RdmaPort>,
    /// Other nodes.
    #[serde(default)]
    pub peers: Vec<Peer>,
    /// Software that paths depend on.
    #[serde(default)]
    pub software: Software,
    /// Parts that could not be read, and why.
    #[serde(default)]
    pub notes: Vec<String>,
}

/// A NUMA node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryNode {
    /// Number.
    pub id: u32,
    /// CPUs, as ranges such as `0-31,64-95`.
    pub cpus: String,
    /// Memory in bytes, if known.
    pub memory_bytes: Option<u64>,
}

/// A CUDA device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// The N of `cuda:N`.
    pub ordinal: u16,
    /// Product name.
    pub name: String,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// NUMA node, if known.
    #[serde(default)]
    pub memory_node: Option<u32>,
    /// Place in the tree of PCI bridges, if known.
    #[serde(default)]
    pub pci: Option<PciPath>,
    /// Why a pool cannot use it, if it cannot.
    #[serde(default)]
    pub unusable: Option<String>,
}

/// A link from one device to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceLink {
    /// Ordinal of the device that reads or writes.
    pub from: u16,
    /// Ordinal of the device whose memory is accessed.
    pub to: u16,
    /// Whether the first can access the memory of the second.
    pub peer_access: bool,
    /// Whether the link executes atomic operations natively: NVLink does, PCIe does not.
    pub native_atomics: bool,
    /// The driver's rank of the link among those of the machine; lower is faster.
    #[serde(default)]
    pub rank: Option<u32>,
}

/// A network interface.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// Name, such as `eth0`.
    pub name: String,
    /// Whether it is the loopback.
    #[serde(default)]
    pub is_loopback: bool,
    /// Whether it is connected.
    pub is_up: bool,
    /// Whether it belongs to hardware; bridges, tunnels and virtual pairs do not.
    #[serde(default)]
    pub is_physical: bool,
    /// Megabits per second, if known.
    #[serde(default)]
    pub megabits: Option<u64>,
    /// NUMA node, if known.
    #[serde(default)]
    pub memory_node: Option<u32>,
}

/// A port of an RDMA adapter.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RdmaPort {
    /// Name of the adapter, such as `mlx5_0`.
    pub device: String,
    /// Number of the port, from 1.
    pub port: u32,
    /// Whether it is active.
    pub is_active: bool,
    /// Link layer.
    pub link_layer: LinkLayer,
    /// Megabits per second, if known.
    #[serde(default)]
    pub megabits: Option<u64>,
    /// NUMA node, if known.
    #[serde(default)]
    pub memory_node: Option<u32>,
    /// Place in the tree of PCI bridges, if known.
    #[serde(default)]
    pub pci: Option<PciPath>,
}

/// Link layer of an RDMA port.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LinkLayer {
    /// InfiniBand.
    Infiniband,
    /// Ethernet: RoCE or iWARP.
    Ethernet,
    /// Anything else.
    Unknown,
}

/// Another node.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Name.
    pub name: String,
    /// Address, as in the settings.
    pub address: String,
    /// Whether it is on this host.
    pub is_local: bool,
    /// Whether it listens on a Unix socket.
    #[serde(default)]
    pub is_unix: bool,
    /// Link layer over which it offers RDMA; `None`: it offers none, or it is not known yet.
    #[serde(default)]
    pub rdma: Option<LinkLayer>,
}

/// Software that paths depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    /// Whether NIXL can be loaded, which drives RDMA.
    #[serde(default)]
    pub nixl: bool,
    /// Whether adapters can access device memory: a peer memory module is loaded.
    #[serde(default)]
    pub gpu_direct: bool,
}

/// Place in the tree of PCI bridges: the addresses from the root to the device, separated by
/// slashes, such as `pci0000:00/0000:00:01.0/0000:01:00.0`.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PciPath(pub String);

/// Distance between two PCI devices, the nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum PciDistance {
    /// A switch joins them below the root, with this many bridges on the way.
    Switch(usize),
    /// The same host bridge.
    HostBridge,
    /// Different host bridges.
    Apart,
}

impl PciPath {
    /// Returns the distance to another device.
    pub(super) fn distance(&self, other: &Self) -> PciDistance {
        let (own, others): (Vec<_>, Vec<_>) = (self.0.split('/').collect(), other.0.split('/').collect());
        let common = own.iter().zip(&others).take_while(|(a, b)| a == b).count();
        match common {
            0 => PciDistance::Apart,
            1 => PciDistance::HostBridge,
            common => PciDistance::Switch(own.len() + others.len() - 2 * common),
        }
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Infiniband => "InfiniBand",
            Self::Ethernet => "Ethernet",
            Self::Unknown => "unknown link layer",
        })
    }
}

impl Machine {
    /// Returns the device of this ordinal.
    pub fn device(&self, ordinal: u16) -> Option<&Device> {
        self.devices.iter().find(|device| device.ordinal == ordinal)
    }

    /// Returns the peer of this name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        self.peers.iter().find(|peer| peer.name == name)
    }

    /// Returns the link from one device to another.
    pub fn link(&self, from: u16, to: u16) -> Option<&DeviceLink> {
        self.device_links.iter().find(|link| (link.from, link.to) == (from, to))
    }
}

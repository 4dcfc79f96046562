use serde::{Deserialize, Serialize};

use crate::settings::Address;

/// A machine, as far as transfers of blocks are concerned.
///
/// Plain data, also as JSON. Its parts refer to each other by number and name; a reference to a
/// missing part counts as unknown.
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
    pub memory_node: Option<u32>,
    /// Addresses of the PCI bridges from the root to it, if known:
    /// `pci0000:00/0000:00:01.0/0000:01:00.0`.
    pub pci: Option<String>,
    /// Why a pool cannot use it, if so.
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
    pub megabits: Option<u64>,
    /// NUMA node, if known.
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
    /// Link layer: `InfiniBand`, or `Ethernet` of RoCE and iWARP.
    pub link_layer: String,
    /// Megabits per second, if known.
    pub megabits: Option<u64>,
    /// NUMA node, if known.
    pub memory_node: Option<u32>,
    /// Addresses of the PCI bridges from the root to it, if known, as for a [`Device`].
    pub pci: Option<String>,
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
    /// Whether both nodes have NIXL; known once they are linked.
    #[serde(default)]
    pub rdma: bool,
}

impl Peer {
    /// Creates the record of an unlinked peer at this address.
    pub fn new(name: &str, address: &Address) -> Self {
        Self {
            name: name.to_owned(),
            is_local: address.is_loopback(),
            is_unix: matches!(address, Address::Unix(_)),
            address: address.to_string(),
            rdma: false,
        }
    }
}

/// Software that paths depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Software {
    /// Whether NIXL, which drives RDMA, can be loaded.
    #[serde(default)]
    pub nixl: bool,
    /// Whether a peer memory module is loaded, by which adapters access device memory.
    #[serde(default)]
    pub gpu_direct: bool,
}

//! Topology of a machine: devices, memory nodes, network interfaces, peers, and the path of a
//! transfer between any two of them.
//!
//! ```text
//! driver, /sys, settings -- probe --> Machine (a record, as JSON) -- path() --> Path
//! ```
//!
//! A [`Machine`] is data. [`path`] is a pure function of it, so that paths are tested on records of
//! machines that are not at hand (`node/tests/machines`).
//!
//! | file | content |
//! |---|---|
//! | `machine` | the record |
//! | `path` | the choice of a path, and its reason |
//! | `sysfs` | network interfaces, RDMA ports and memory nodes, from a tree such as `/sys` |
//! | `driver` | devices and the links between them, from the CUDA driver |
//! | `probe` | this machine |
//! | `report` | a machine with its paths |

#[cfg(feature = "cuda")]
mod driver;
mod machine;
mod path;
mod probe;
mod report;
mod sysfs;

pub use machine::{
    Device, DeviceLink, LinkLayer, Machine, MemoryNode, Nic, PciPath, Peer, RdmaPort, Software,
};
pub use path::{Endpoint, Path, PathTransport, UnknownEndpoint, path, paths};
pub use probe::probe;
pub use report::{PathRecord, PeerLink, TopologyReport};
pub use sysfs::{SysfsError, read_sysfs};

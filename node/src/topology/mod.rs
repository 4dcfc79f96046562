//! Topology of a machine: devices, memory nodes, network interfaces, peers, and the path of a
//! transfer between any two of them.
//!
//! ```text
//! driver, /sys, settings -- probe --> Machine (a record, as JSON) -- path() --> Path
//! ```
//!
//! [`path`] is a pure function of a [`Machine`], so that recorded machines can test it
//! (`node/tests/machines`).

#[cfg(feature = "cuda")]
mod driver;
mod machine;
mod path;
mod probe;
mod report;
mod sysfs;

pub use machine::{Device, DeviceLink, Machine, MemoryNode, Nic, Peer, RdmaPort, Software};
pub use path::{Path, PathTransport, UnknownEnd, path, paths};
pub use probe::probe;
pub use report::{PeerLink, TopologyReport};
pub use sysfs::read_sysfs;

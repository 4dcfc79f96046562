//! This machine.

use std::path::Path;

use crate::settings::{Address, PeerAddress};

use super::machine::{Machine, Peer};
use super::sysfs::read_sysfs;

/// Records this machine. Parts that cannot be read are left out, and named in
/// [`notes`](Machine::notes).
///
/// `sysfs` is `/sys`, or a recorded tree. Peers are recorded as the settings name them: whether they
/// offer RDMA is known only once they are linked.
pub fn probe(name: &str, sysfs: &Path, peers: &[PeerAddress]) -> Machine {
    let mut machine = Machine { name: name.to_owned(), ..Machine::default() };
    if let Err(error) = read_sysfs(sysfs, &mut machine) {
        machine.notes.push(error.to_string());
    }
    #[cfg(feature = "cuda")]
    super::driver::read_devices(sysfs, &mut machine);
    #[cfg(not(feature = "cuda"))]
    machine.notes.push("devices: this program was built without the feature `cuda`: build it with `cargo install --path cli --features cuda`".to_owned());
    machine.peers = peers.iter().map(peer).collect();
    machine
}

fn peer(peer: &PeerAddress) -> Peer {
    Peer {
        name: peer.name.clone(),
        address: peer.address.to_string(),
        is_local: peer.address.is_loopback(),
        is_unix: matches!(peer.address, Address::Unix(_)),
        rdma: None,
    }
}

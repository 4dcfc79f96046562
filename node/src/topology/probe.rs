use std::path::Path;

use crate::settings::PeerAddress;

use super::machine::{Machine, Peer};
use super::sysfs::read_sysfs;

/// Records this machine. Parts that cannot be read are omitted, and listed in
/// [`notes`](Machine::notes).
///
/// `sysfs` is `/sys`, or a recorded tree. Peers are recorded as the settings name them.
pub fn probe(name: &str, sysfs: &Path, peers: &[PeerAddress]) -> Machine {
    let mut machine = Machine { name: name.to_owned(), ..Machine::default() };
    read_sysfs(sysfs, &mut machine);
    #[cfg(feature = "cuda")]
    super::driver::read_devices(sysfs, &mut machine);
    #[cfg(not(feature = "cuda"))]
    machine.notes.push("devices: this program was built without the feature `cuda`: build it with `cargo install --path cli --features cuda`".to_owned());
    machine.peers = peers.iter().map(|peer| Peer::new(&peer.name, &peer.address)).collect();
    machine
}

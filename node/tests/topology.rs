//! Paths on recorded machines, and records from recorded trees of `/sys`.

use std::fs;
use std::path::{Path as FilePath, PathBuf};

use kvpool_node::settings::PeerAddress;
use kvpool_node::topology::PathTransport::{
    self, Copy, DeviceBus, NvLink, PeerAccess, Rdma, RdmaThroughHost, Relay, Tcp, ThroughHost, UnixSocket,
};
use kvpool_node::topology::{Machine, path, paths, probe, read_sysfs};

fn machines() -> PathBuf {
    FilePath::new(env!("CARGO_MANIFEST_DIR")).join("tests/machines")
}

fn machine(name: &str) -> Machine {
    let path = machines().join(format!("{name}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A transport, the hops from one end to the other, and a part of the reason.
type Row<'a> = (PathTransport, &'a str, &'a str);

/// Checks paths, and that the ways back are the same in reverse.
fn lead(machine: &Machine, rows: &[Row<'_>]) {
    for (transport, hops, reason) in rows {
        let hops: Vec<&str> = hops.split(" > ").collect();
        let (from, to) = (hops[0], hops[hops.len() - 1]);
        let found = path(machine, from, to).unwrap();
        assert_eq!((found.transport, found.hops.join(" > ")), (*transport, hops.join(" > ")), "{found:?}");
        assert!(found.reason.contains(reason), "{found:?}");
        let back = path(machine, to, from).unwrap();
        let reversed: Vec<_> = back.hops.iter().rev().cloned().collect();
        assert_eq!((back.transport, reversed), (found.transport, found.hops));
    }
}

#[test]
fn eight_devices_with_nvlink_and_infiniband() {
    let machine = machine("h100_nvlink_ib");
    for from in 0..8 {
        for to in (0..8).filter(|&to| to != from) {
            lead(&machine, &[(NvLink, &format!("cuda:{from} > NVLink > cuda:{to}"), "native atomics")]);
        }
    }
    // Each device has an adapter behind its own switch.
    for at in [0, 3, 4, 7] {
        let reason = "InfiniBand, 400 Gb/s: behind the device's PCI switch";
        lead(&machine, &[(Rdma, &format!("cuda:{at} > mlx5_{at} port 1 > b"), reason)]);
    }
    lead(
        &machine,
        &[
            // The port of device 5 is down: another one of its NUMA node.
            (Rdma, "cuda:5 > mlx5_4 port 1 > b", "on the device's NUMA node"),
            (Rdma, "host > mlx5_0 port 1 > b", "the fastest active port"),
            (Tcp, "cuda:0 > host > TCP > plain", "the peer offers no RDMA, as far as is known"),
            (Tcp, "host > TCP > plain", ""),
            (UnixSocket, "cuda:1 > host > Unix socket > here", ""),
            (DeviceBus, "host > cuda:1", ""),
            (Relay, "b > this node > roce", "transfer directly"),
            (Copy, "host", "the same memory"),
            (Copy, "cuda:2", "the same memory"),
            (Copy, "b", "the same node"),
        ],
    );
    assert_eq!(paths(&machine).len(), 13 * 12 / 2);
}

#[test]
fn devices_on_pcie() {
    let mut machine = machine("l40s_pcie_roce");
    lead(
        &machine,
        &[
            (PeerAccess, "cuda:0 > PCIe > cuda:1", "behind one PCI switch"),
            (PeerAccess, "cuda:2 > PCIe > cuda:3", "through the host bridge"),
            (ThroughHost, "cuda:0 > host > cuda:2", "refuses"),
            (ThroughHost, "cuda:0 > host > cuda:3", "no link"),
            // Adapters cannot read device memory without a peer memory module.
            (RdmaThroughHost, "cuda:1 > host > mlx5_0 port 1 > b", "NUMA node; adapters cannot"),
            (RdmaThroughHost, "cuda:2 > host > mlx5_0 port 1 > b", "another NUMA node"),
            (Rdma, "host > mlx5_0 port 1 > b", ""),
            (Tcp, "cuda:3 > host > TCP > ib", ""),
        ],
    );
    machine.rdma_ports[0].is_active = false;
    lead(&machine, &[(Tcp, "host > TCP > b", "no active RDMA port")]);
}

#[test]
fn machines_with_few_parts() {
    let laptop = machine("laptop");
    lead(
        &laptop,
        &[
            (Tcp, "cuda:0 > host > TCP > desk", ""),
            (Tcp, "host > loopback > second", ""),
            (DeviceBus, "host > cuda:0", ""),
        ],
    );
    let machine = machine("two_sockets");
    lead(&machine, &[(Rdma, "host > mlx4_1 port 1 > b", "InfiniBand, 56 Gb/s: the fastest active port")]);
    let error = path(&machine, "host", "cuda:0").unwrap_err();
    assert_eq!(error.to_string(), "two-sockets has no cuda:0; it has host, b");
    assert!(path(&machine, "c", "host").is_err());
}

#[test]
fn records_survive_json() {
    for name in ["h100_nvlink_ib", "l40s_pcie_roce", "laptop", "two_sockets"] {
        let machine = machine(name);
        let text = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), machine);
    }
    let unknown = serde_json::from_str::<Machine>("{\"name\": \"a\", \"gpus\": []}");
    assert!(unknown.is_err(), "unknown parts are named");
}

/// Builds a tree from its list.
#[cfg(unix)]
fn tree(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(machines().join(name)).unwrap();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let is_link = line.contains(" -> ");
        let (path, value) = line.split_once(if is_link { " -> " } else { " =" }).unwrap();
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        match is_link {
            true => std::os::unix::fs::symlink(value, path).unwrap(),
            false => fs::write(path, format!("{}\n", value.trim().replace("\\n", "\n"))).unwrap(),
        }
    }
    folder
}

#[cfg(unix)]
#[test]
fn a_tree_becomes_a_record() {
    let folder = tree("two_socket_sysfs.txt");
    let mut machine = Machine::default();
    read_sysfs(folder.path(), &mut machine);
    // The rate without a number is named; the missing speed of the loopback is normal.
    assert!(machine.notes[0].contains("\"fast\" is no rate"));
    assert_eq!(machine.notes.len(), 1, "{:?}", machine.notes);
    machine.notes.clear();
    let pci = |device| serde_json::json!(format!("pci0000:80/0000:80:03.0/0000:84:00.{device}"));
    let mut found = serde_json::to_value(&machine).unwrap();
    let ports = found["rdma_ports"].as_array_mut().unwrap();
    assert_eq!(ports[0]["pci"].take(), pci(0));
    ports[1]["pci"].take();
    let expected = serde_json::json!({
        "memory_nodes": [
            {"id": 0, "cpus": "0-23,48-71", "memory_bytes": 197_265_625u64 * 1024},
            {"id": 1, "cpus": "24-47,72-95", "memory_bytes": 197_656_250u64 * 1024},
        ],
        "nics": [
            {"name": "br0", "is_up": true, "megabits": 10_000},
            {"name": "eno1", "is_up": true, "is_physical": true, "megabits": 10_000, "memory_node": 0},
            {"name": "eno2", "is_up": false, "is_physical": true, "memory_node": 1},
            {"name": "lo", "is_up": true, "is_loopback": true},
        ],
        "rdma_ports": [
            {"device": "mlx5_0", "port": 1, "is_active": true, "link_layer": "InfiniBand",
             "megabits": 400_000, "memory_node": 1},
            {"device": ports[1]["device"], "port": ports[1]["port"], "is_active": false,
             "link_layer": "Ethernet", "memory_node": ports[1]["memory_node"]},
        ],
        "software": {"gpu_direct": true},
        "name": "",
    });
    let found: Machine = serde_json::from_value(found).unwrap();
    assert_eq!(found, serde_json::from_value(expected).unwrap());
}

#[test]
fn an_empty_tree_is_an_empty_record() {
    let folder = tempfile::tempdir().unwrap();
    let mut machine = Machine::default();
    read_sysfs(folder.path(), &mut machine);
    assert_eq!(machine, Machine::default());
    // A file in the place of a folder cannot be listed.
    fs::create_dir(folder.path().join("class")).unwrap();
    fs::write(folder.path().join("class/net"), "").unwrap();
    read_sysfs(folder.path(), &mut machine);
    assert!(machine.notes[0].contains("class/net"), "{:?}", machine.notes);
}

#[cfg(target_os = "linux")]
#[test]
fn this_machine_has_a_loopback_and_its_peers() {
    let peers: Vec<PeerAddress> =
        ["b=unix:/b", "c=127.0.0.1:1", "d=node-d:1"].map(|peer| peer.parse().unwrap()).to_vec();
    let machine = probe("a", FilePath::new("/sys"), &peers);
    let found: Vec<_> =
        machine.peers.iter().map(|peer| (peer.name.as_str(), peer.is_local, peer.is_unix)).collect();
    assert_eq!(found, [("b", true, true), ("c", true, false), ("d", false, false)]);
    if FilePath::new("/sys/class/net/lo").exists() {
        assert!(machine.nics.iter().any(|nic| nic.is_loopback && nic.name == "lo"), "{:?}", machine.nics);
    }
    lead(&machine, &[(UnixSocket, "host > Unix socket > b", "")]);
}

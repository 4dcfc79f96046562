//! Paths on recorded machines, and records from recorded trees of `/sys`.

use std::fs;
use std::path::{Path as FilePath, PathBuf};

use kvpool_node::settings::PeerAddress;
use kvpool_node::topology::{
    Endpoint, LinkLayer, Machine, PathTransport, PciPath, path, paths, probe, read_sysfs,
};

fn machines() -> PathBuf {
    FilePath::new(env!("CARGO_MANIFEST_DIR")).join("tests/machines")
}

fn machine(name: &str) -> Machine {
    let path = machines().join(format!("{name}.json"));
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Checks the path between two ends, by its transport and hops, and that the way back has the same
/// transport. Returns the reason.
fn leads(machine: &Machine, from: &str, to: &str, transport: PathTransport, hops: &[&str]) -> String {
    let [a, b]: [Endpoint; 2] = [from, to].map(|end| end.parse().unwrap());
    let found = path(machine, &a, &b).unwrap();
    assert_eq!(
        (found.transport, found.hops.as_slice()),
        (transport, &*hops.iter().map(ToString::to_string).collect::<Vec<_>>()),
        "{found:?}"
    );
    let back = path(machine, &b, &a).unwrap();
    let reversed: Vec<_> = back.hops.iter().rev().cloned().collect();
    assert_eq!((back.transport, reversed), (found.transport, found.hops));
    found.reason
}

#[test]
fn eight_devices_with_nvlink_and_infiniband() {
    let machine = machine("h100_nvlink_ib");
    for from in 0..8 {
        for to in (0..8).filter(|&to| to != from) {
            let ends = [from, to].map(|ordinal| format!("cuda:{ordinal}"));
            let hops = [ends[0].as_str(), "NVLink", &ends[1]];
            let reason = leads(&machine, &ends[0], &ends[1], PathTransport::NvLink, &hops);
            assert!(reason.contains("native atomics"), "{reason}");
        }
    }
    // Each device has an adapter behind its own switch.
    for at in [0, 3, 4, 7] {
        let (device, adapter) = (format!("cuda:{at}"), format!("mlx5_{at} port 1"));
        let reason = leads(&machine, &device, "b", PathTransport::Rdma, &[&device, &adapter, "b"]);
        assert_eq!(reason, "InfiniBand, 400 Gb/s: behind the device's PCI switch");
    }
    // The port of device 5 is down: another one of its NUMA node.
    let reason = leads(&machine, "cuda:5", "b", PathTransport::Rdma, &["cuda:5", "mlx5_4 port 1", "b"]);
    assert!(reason.ends_with("on the device's NUMA node"), "{reason}");
    leads(&machine, "host", "b", PathTransport::Rdma, &["host", "mlx5_0 port 1", "b"]);
    // A peer with another link layer, and one that offers no RDMA: TCP over the fastest interface.
    let reason = leads(&machine, "cuda:0", "roce", PathTransport::Tcp, &["cuda:0", "host", "ib0", "roce"]);
    assert!(reason.starts_with("no port is active over Ethernet"), "{reason}");
    let reason = leads(&machine, "host", "plain", PathTransport::Tcp, &["host", "ib0", "plain"]);
    assert!(reason.starts_with("the peer offers no RDMA, as far as is known; ib0 (400000 Mb/s)"), "{reason}");
    leads(&machine, "cuda:1", "here", PathTransport::UnixSocket, &["cuda:1", "host", "Unix socket", "here"]);
    leads(&machine, "host", "cuda:1", PathTransport::DeviceBus, &["host", "cuda:1"]);
    leads(&machine, "b", "roce", PathTransport::Relay, &["b", "this node", "roce"]);
    for end in ["host", "cuda:2", "b"] {
        leads(&machine, end, end, PathTransport::Copy, &[end]);
    }
    // Without NIXL, nothing drives the adapters.
    let mut without = machine.clone();
    without.software.nixl = false;
    let reason = leads(&without, "cuda:0", "b", PathTransport::Tcp, &["cuda:0", "host", "ib0", "b"]);
    assert!(reason.contains("NIXL"), "{reason}");
    assert_eq!(paths(&machine).len(), 13 * 12 / 2);
}

#[test]
fn devices_on_pcie() {
    let machine = machine("l40s_pcie_roce");
    let access = PathTransport::PeerAccess;
    let reason = leads(&machine, "cuda:0", "cuda:1", access, &["cuda:0", "PCIe", "cuda:1"]);
    assert!(reason.ends_with("behind one PCI switch"), "{reason}");
    let reason = leads(&machine, "cuda:2", "cuda:3", access, &["cuda:2", "PCIe", "cuda:3"]);
    assert!(reason.ends_with("through the host bridge"), "{reason}");
    let through = PathTransport::ThroughHost;
    let reason = leads(&machine, "cuda:0", "cuda:2", through, &["cuda:0", "host", "cuda:2"]);
    assert!(reason.contains("refuses"), "{reason}");
    let reason = leads(&machine, "cuda:0", "cuda:3", through, &["cuda:0", "host", "cuda:3"]);
    assert!(reason.contains("no link"), "{reason}");
    // Adapters cannot read device memory without a peer memory module.
    let reason = leads(
        &machine,
        "cuda:1",
        "b",
        PathTransport::RdmaThroughHost,
        &["cuda:1", "host", "mlx5_0 port 1", "b"],
    );
    assert!(
        reason.contains("on the device's NUMA node") && reason.contains("peer memory module"),
        "{reason}"
    );
    let reason = leads(
        &machine,
        "cuda:2",
        "b",
        PathTransport::RdmaThroughHost,
        &["cuda:2", "host", "mlx5_0 port 1", "b"],
    );
    assert!(reason.contains("another NUMA node"), "{reason}");
    leads(&machine, "host", "b", PathTransport::Rdma, &["host", "mlx5_0 port 1", "b"]);
    // Hardware before a bridge; speed before nearness.
    leads(&machine, "cuda:3", "ib", PathTransport::Tcp, &["cuda:3", "host", "ens1f0np0", "ib"]);
    let mut down = machine.clone();
    down.rdma_ports[0].is_active = false;
    down.nics[1].is_up = false;
    leads(&down, "host", "b", PathTransport::Tcp, &["host", "eno8303", "b"]);
    down.nics[2].is_up = false;
    leads(&down, "host", "b", PathTransport::Tcp, &["host", "br-7", "b"]);
    down.nics[3].is_up = false;
    let reason = leads(&down, "host", "b", PathTransport::Tcp, &["host", "no interface", "b"]);
    assert!(reason.contains("no network interface is connected"), "{reason}");
}

#[test]
fn a_laptop() {
    let machine = machine("laptop");
    leads(&machine, "cuda:0", "desk", PathTransport::Tcp, &["cuda:0", "host", "wlp3s0", "desk"]);
    leads(&machine, "host", "second", PathTransport::Tcp, &["host", "loopback", "second"]);
    leads(&machine, "host", "cuda:0", PathTransport::DeviceBus, &["host", "cuda:0"]);
    // RDMA of the peer alone is not enough.
    let mut offered = machine.clone();
    offered.peers[0].rdma = Some(LinkLayer::Ethernet);
    let reason = leads(&offered, "host", "desk", PathTransport::Tcp, &["host", "wlp3s0", "desk"]);
    assert!(reason.starts_with("this machine has no RDMA port"), "{reason}");
}

#[test]
fn two_sockets_without_devices() {
    let machine = machine("two_sockets");
    // The fastest active port.
    let reason = leads(&machine, "host", "b", PathTransport::Rdma, &["host", "mlx4_1 port 1", "b"]);
    assert_eq!(reason, "InfiniBand, 56 Gb/s: the fastest active port");
    let error = path(&machine, &Endpoint::Host, &Endpoint::Device(0)).unwrap_err();
    assert_eq!(error.to_string(), "two-sockets has no cuda:0; it has host, b");
    assert!(path(&machine, &Endpoint::Peer("c".into()), &Endpoint::Host).is_err());
}

#[test]
fn records_survive_json() {
    for name in ["h100_nvlink_ib", "l40s_pcie_roce", "laptop", "two_sockets"] {
        let machine = machine(name);
        let text = serde_json::to_string(&machine).unwrap();
        assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), machine);
    }
    assert!(
        serde_json::from_str::<Machine>("{\"name\": \"a\", \"gpus\": []}").is_err(),
        "unknown parts are named"
    );
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
    read_sysfs(folder.path(), &mut machine).unwrap();
    let nodes: Vec<_> =
        machine.memory_nodes.iter().map(|node| (node.id, node.cpus.as_str(), node.memory_bytes)).collect();
    assert_eq!(
        nodes,
        [(0, "0-23,48-71", Some(197_265_625 * 1024)), (1, "24-47,72-95", Some(197_656_250 * 1024))]
    );
    let nics: Vec<_> = (machine.nics.iter())
        .map(|nic| {
            (nic.name.as_str(), nic.is_up, nic.is_physical, nic.is_loopback, nic.megabits, nic.memory_node)
        })
        .collect();
    assert_eq!(
        nics,
        [
            ("br0", true, false, false, Some(10_000), None),
            ("eno1", true, true, false, Some(10_000), Some(0)),
            ("eno2", false, true, false, None, Some(1)),
            ("lo", true, false, true, None, None),
        ]
    );
    let pci = PciPath("pci0000:80/0000:80:03.0/0000:84:00.0".to_owned());
    let [first, second] = machine.rdma_ports.as_slice() else { panic!("{:?}", machine.rdma_ports) };
    assert_eq!((first.device.as_str(), first.port, first.is_active), ("mlx5_0", 1, true));
    assert_eq!(
        (first.link_layer, first.megabits, first.memory_node),
        (LinkLayer::Infiniband, Some(400_000), Some(1))
    );
    assert_eq!(first.pci, Some(pci));
    assert_eq!((second.is_active, second.link_layer, second.megabits), (false, LinkLayer::Ethernet, None));
    assert!(machine.software.gpu_direct);
    // The rate without a number is named; the missing speed of the loopback is normal.
    assert_eq!(machine.notes.len(), 1, "{:?}", machine.notes);
    assert!(machine.notes[0].contains("\"fast\" is no rate"));
}

#[test]
fn an_empty_tree_is_an_empty_record() {
    let folder = tempfile::tempdir().unwrap();
    let mut machine = Machine::default();
    read_sysfs(folder.path(), &mut machine).unwrap();
    assert_eq!(machine, Machine::default());
    // A file in the place of a folder cannot be listed.
    fs::create_dir(folder.path().join("class")).unwrap();
    fs::write(folder.path().join("class/net"), "").unwrap();
    let error = read_sysfs(folder.path(), &mut machine).unwrap_err().to_string();
    assert!(error.contains("cannot list") && error.contains("class/net"), "{error}");
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
    leads(&machine, "host", "b", PathTransport::UnixSocket, &["host", "Unix socket", "b"]);
}

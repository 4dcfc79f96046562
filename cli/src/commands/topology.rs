use std::fs;
use std::path::Path as FilePath;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use indicatif::BinaryBytes;
use kvpool_node::settings::{CONFIG, Key, Sources};
use kvpool_node::topology::{Machine, Path, TopologyReport, path, paths, probe};
use serde_json::json;

use crate::EXIT_OK;
use crate::args::TopologyArgs;
use crate::error::{named, output_failed};
use crate::fit;
use crate::output::{self, printable};

/// Prints a machine and the paths between its parts.
pub fn topology(args: &TopologyArgs) -> anyhow::Result<u8> {
    let machine = match &args.machine {
        Some(file) => record(file)?,
        None => this_machine(args)?,
    };
    let found = match (&args.from, &args.to) {
        (Some(from), Some(to)) => vec![path(&machine, from, to)?],
        _ => paths(&machine),
    };
    let text = if args.json {
        format!("{:#}", json!(TopologyReport::new(machine, found)))
    } else {
        printable(&render(&machine, &found, fit::width()))
    };
    output::print(&text).map_err(output_failed)?;
    Ok(EXIT_OK)
}

/// Reads a recorded machine, alone or as this command prints it.
fn record(file: &FilePath) -> anyhow::Result<Machine> {
    let text = fs::read_to_string(file).map_err(named(file.display()))?;
    let mut value: serde_json::Value = serde_json::from_str(&text).map_err(named(file.display()))?;
    if let Some(machine) = value.get_mut("machine") {
        value = machine.take();
    }
    serde_json::from_value(value).map_err(named(file.display()))
}

fn this_machine(args: &TopologyArgs) -> anyhow::Result<Machine> {
    let mut sources = Sources::new().environment(std::env::vars_os());
    if let Some(config) = &args.config {
        sources = sources.flag(&CONFIG, config.to_string_lossy());
    }
    if let (Some(key), Some(peers)) = (Key::find("peers"), &args.peers) {
        sources = sources.flag(key, peers);
    }
    // Nothing is sent to the peers, so no certificate is needed.
    let (name, peers) = sources.load_peers()?;
    let mut machine = probe(&name, &args.sysfs, &peers);
    note_nixl(&mut machine);
    Ok(machine)
}

#[cfg(feature = "nixl")]
fn note_nixl(machine: &mut Machine) {
    match kvpool_node::transport::nixl::check(None) {
        Ok(()) => machine.software.nixl = true,
        Err(error) => machine.notes.push(format!("NIXL: {error}")),
    }
}

#[cfg(not(feature = "nixl"))]
fn note_nixl(machine: &mut Machine) {
    machine.notes.push(format!("NIXL: {}", output::not_built("nixl")));
}

fn render(machine: &Machine, paths: &[Path], width: Option<usize>) -> String {
    let mut text = format!("{}\n{}", machine.name, fit::table(parts(machine), width));
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table.set_header(["from", "to", "transport", "path", "reason"]);
    for path in paths {
        let (transport, hops) = (path.transport.to_string(), path.hops.join(" > "));
        table.add_row([&path.from, &path.to, &transport, &hops, &path.reason]);
    }
    if paths.is_empty() {
        text += "\nno paths: there is only host memory";
    } else {
        text += &format!("\n{}", fit::table(table, width));
    }
    for note in &machine.notes {
        text += &format!("\nnote: {note}");
    }
    fit::text(&text, width)
}

fn parts(machine: &Machine) -> Table {
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table.set_header(["part", "name", "NUMA node", "details"]);
    let node = |node: Option<u32>| node.map_or("-".to_owned(), |node| node.to_string());
    let megabits = |rate: Option<u64>| rate.map_or("speed unknown".to_owned(), |rate| format!("{rate} Mb/s"));
    for memory in &machine.memory_nodes {
        let bytes = memory.memory_bytes.map_or(String::new(), |bytes| format!(", {}", BinaryBytes(bytes)));
        let (id, details) = (memory.id.to_string(), format!("CPUs {}{bytes}", memory.cpus));
        table.add_row(["memory".to_owned(), format!("node{id}"), id, details]);
    }
    for device in &machine.devices {
        let unusable =
            device.unusable.as_ref().map_or(String::new(), |reason| format!(", unusable: {reason}"));
        let details = format!("{}, {}{unusable}", device.name, BinaryBytes(device.memory_bytes));
        let name = format!("cuda:{}", device.ordinal);
        table.add_row(["device".to_owned(), name, node(device.memory_node), details]);
    }
    for nic in &machine.nics {
        let state = if nic.is_up { "up" } else { "down" };
        let kind = match (nic.is_loopback, nic.is_physical) {
            (true, _) => ", loopback",
            (_, false) => ", virtual",
            _ => "",
        };
        let details = format!("{state}, {}{kind}", megabits(nic.megabits));
        table.add_row(["interface".to_owned(), nic.name.clone(), node(nic.memory_node), details]);
    }
    for port in &machine.rdma_ports {
        let state = if port.is_active { "active" } else { "not active" };
        let details = format!("{}, {state}, {}", port.link_layer, megabits(port.megabits));
        let name = format!("{} port {}", port.device, port.port);
        table.add_row(["RDMA port".to_owned(), name, node(port.memory_node), details]);
    }
    for peer in &machine.peers {
        let rdma = if peer.rdma { "RDMA" } else { "RDMA unknown until linked" };
        let details = format!("{}, {rdma}", peer.address);
        table.add_row(["peer".to_owned(), peer.name.clone(), "-".to_owned(), details]);
    }
    table
}

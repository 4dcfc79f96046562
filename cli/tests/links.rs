//! Links between `kvpool serve` processes: where they listen by default, what they say of peers,
//! and a program of a former release.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use kvpool_node::wire::{HEADER, Header, PROOF, Proof, Role, WIRE_VERSION};
use rustix::process::Signal;
use serde_json::Value;

use super::common::live::{Node, program, run, said, token, wait_until};
use super::common::parse;

/// Returns the program without an address for peers, and with a folder of this user.
fn by_default(runtime: Option<&Path>, temporary: &Path, arguments: &str) -> Command {
    let mut command = program();
    command.env_remove("KVPOOL_LISTEN").env_remove("XDG_RUNTIME_DIR").env("TMPDIR", temporary);
    if let Some(runtime) = runtime {
        command.env("XDG_RUNTIME_DIR", runtime);
    }
    command.args(arguments.split_whitespace());
    command
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o777
}

fn closed(path: &Path) {
    fs::set_permissions(path, fs::Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn without_a_token_only_this_user_reaches_a_node() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = folder.path().join("runtime");
    fs::create_dir(&runtime).unwrap();
    closed(&runtime);
    let b = Node::start_with(&mut by_default(Some(&runtime), folder.path(), "serve --name b --size 1000"));
    let socket = runtime.join("kvpool-b.sock");
    assert_eq!((&*b.listen, mode(&socket)), (&*format!("unix:{}", socket.display()), 0o600));
    // Without the folder of the session: one for temporary files.
    let peers = format!("serve --name a --size 1000 --peers b={}", b.listen);
    let a = Node::start_with(&mut by_default(None, folder.path(), &peers));
    let at = PathBuf::from(a.listen.strip_prefix("unix:").unwrap());
    assert!(at.starts_with(folder.path()), "{}", at.display());
    assert_eq!((mode(at.parent().unwrap()), mode(&at)), (0o700, 0o600));
    wait_until("the nodes are linked", || a.json("stats")["extra"]["peers"]["b"] == "up");
    for node in [a, b] {
        let (code, errors) = node.end(Signal::TERM);
        assert_eq!((code, errors.contains("any user")), (Some(0), false), "{errors}");
    }
    assert!(!socket.exists() && !at.exists(), "the files go with the nodes");
    // What cannot be used is named, with what to set.
    let refused = |runtime: &Path| {
        let output = by_default(Some(runtime), folder.path(), "serve --name b --size 1000").output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", said(&output));
        said(&output)
    };
    let link = folder.path().join("link");
    symlink(&runtime, &link).unwrap();
    let node = Node::start_with(&mut by_default(Some(&link), folder.path(), "serve --name b --size 1000"));
    assert_eq!(node.listen, "off", "it serves, and no peer can link");
    let (code, told) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{told}");
    assert!(
        told.contains("its folder of sockets cannot be used") && told.contains("it is not a folder"),
        "{told}"
    );
    let told = refused(&folder.path().join("x".repeat(100)));
    assert!(told.contains("the path of a socket has at most 107 bytes"), "{told}");
}

#[test]
fn with_a_token_the_default_is_the_loopback_and_a_port_without_one_is_warned_of() {
    let folder = tempfile::tempdir().unwrap();
    let token = token(folder.path(), "one-token-of-the-tests");
    let flags = format!("serve --name b --size 1000 {token}");
    // If this test does not get the port, another process has it.
    let _taken = std::net::TcpListener::bind("127.0.0.1:7411");
    let told = said(&by_default(None, folder.path(), &flags).output().unwrap());
    assert!(told.contains("127.0.0.1:7411 is in use"), "{told}");
    for (flags, is_open) in [(String::new(), true), (token, false)] {
        let node = Node::start(&format!("serve --name b --size 1000 {flags}"));
        let (_, errors) = node.end(Signal::TERM);
        assert_eq!(errors.contains("any user of this host can link to this node"), is_open, "{errors}");
        assert_eq!(errors.contains("token_file") && errors.contains("unix:PATH"), is_open, "{errors}");
    }
}

fn objects(errors: &str, message: &str) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line}: {error}"));
    let lines = errors.lines().map(parse);
    lines.filter(|object: &Value| object["fields"]["message"] == message).collect()
}

#[test]
fn links_that_begin_and_end_and_refusals_have_addresses_and_names() {
    let log = "--log json --log-level info";
    let b = Node::start(&format!("serve --name b --size 1000 {log}"));
    let listen = b.listen.clone();
    let a = Node::start(&format!("serve --name a --size 1000 {log} --peers b={listen}"));
    wait_until("the nodes are linked", || b.json("stats")["extra"]["peers"]["a"] == "up");
    // A process that claims the name of the node itself.
    let twin = Node::start(&format!("serve --name b --size 1000 --peers c={listen}"));
    wait_until("it is refused", || {
        twin.json("stats")["extra"]["peers"]["c"].as_str().unwrap_or_default().contains("own name")
    });
    let (_, of_a) = a.end(Signal::TERM);
    wait_until("the link is lost", || b.json("stats")["extra"]["peers"]["a"] != "up");
    let (_, of_b) = b.end(Signal::TERM);
    for (errors, peer) in [(&of_a, "b"), (&of_b, "a")] {
        let linked = &objects(errors, "linked")[0];
        assert_eq!((&linked["level"], &linked["fields"]["peer"]), (&"INFO".into(), &peer.into()));
        assert!(linked["fields"]["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{linked}");
    }
    let lost = &objects(&of_b, "link lost")[0];
    assert_eq!((&lost["fields"]["peer"], &lost["level"]), (&"a".into(), &"INFO".into()));
    assert!(lost["fields"]["reason"].as_str().unwrap().contains("closed"), "{lost}");
    let refused = &objects(&of_b, "a connection was refused")[0]["fields"];
    assert_eq!((&refused["peer"], &refused["error"]), (&"b".into(), &"b is this node's own name".into()));
    assert!(refused["address"].as_str().unwrap().starts_with("127.0.0.1:"), "{refused}");
}

#[test]
fn a_flood_of_refusals_is_some_lines_and_a_count() {
    let node = Node::start("serve --name n1 --size 1000 --log json");
    let start = Instant::now();
    for name in 0..200 {
        let mut stream = TcpStream::connect(&node.listen).unwrap();
        let header = Header {
            version: WIRE_VERSION,
            role: Role::Control,
            has_token: false,
            incarnation: name,
            nonce: [7; 32],
        };
        let mut bytes = [&header.encode()[..], Proof::NONE.as_bytes()].concat();
        // Each claims another name, and no data streams.
        let hello = [&[4][..], format!("n{name:03}").as_bytes(), &[4], &[0; 16], &[0, 0, 0, 0, 0]].concat();
        bytes.extend([hello.len() as u8, 0, 0, 0, 1, 0, 0, 0]);
        bytes.extend(hello);
        std::io::Write::write_all(&mut stream, &bytes).unwrap();
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert_eq!(answer[HEADER + 1 + PROOF + 8..], [1, 1], "{name}");
    }
    let refused = |errors: &str| objects(errors, "a connection was refused");
    // What is not a line of its own is counted after 10 s.
    wait_until("all are told", || {
        let errors = node.errors();
        let more = objects(&errors, "more connections were refused, or links cut, in the last 10 s");
        let count: u64 = more.iter().map(|object| object["fields"]["connections"].as_u64().unwrap()).sum();
        let told = count + refused(&errors).len() as u64;
        assert!(told <= 200, "{errors}");
        told == 200
    });
    let periods = 1 + start.elapsed().as_secs() as usize / 10;
    let (_, errors) = node.end(Signal::TERM);
    let refused = refused(&errors);
    assert!((1..=8 * periods).contains(&refused.len()), "{} lines in {periods} periods", refused.len());
    // Of two connections, each a task of its own, either may be reported first.
    let peers: HashSet<&str> =
        refused.iter().map(|object| object["fields"]["peer"].as_str().unwrap()).collect();
    assert_eq!(peers.len(), refused.len(), "each line names another peer: {errors}");
    assert!(peers.iter().all(|peer| peer.starts_with('n') && peer.len() == 4), "{errors}");
}

/// Returns the program of a former release, which `.ci/full` builds.
fn former() -> Option<PathBuf> {
    let path = std::env::var_os("KVPOOL_FORMER_PROGRAM").map(PathBuf::from);
    if path.is_none() {
        eprintln!("SKIPPED: KVPOOL_FORMER_PROGRAM does not name the program of a former release");
    }
    path
}

/// Runs a command of a program on a node.
fn json_by(program: &Path, node: &Node, command: &str) -> Value {
    let words = command.split_whitespace().chain(["--json", &node.url]);
    parse(&Command::new(program).args(words).output().unwrap())
}

#[test]
fn a_former_release_and_this_one_exchange_sequences() {
    let Some(former) = former() else { return };
    let today = PathBuf::from(env!("CARGO_BIN_EXE_kvpool"));
    for (source, target) in [(&former, &today), (&today, &former)] {
        let start = |program: &Path, arguments: &str| {
            let mut command = Command::new(program);
            command.args(arguments.split_whitespace()).args(["--admin", "127.0.0.1:0"]);
            Node::start_with(command.args(["--listen", "127.0.0.1:0"]))
        };
        let b = start(target, "serve --name b --size 6000 --load arrivals");
        let peers = format!("--peers b={}", b.listen);
        let a = start(source, &format!("serve --name a --load conversations --load-rest 10ms {peers}"));
        let stats = |program: &Path, node: &Node| json_by(program, node, "stats")["extra"].clone();
        wait_until("the nodes are linked", || stats(source, &a)["peers"]["b"] == "up");
        wait_until("sequences move and are continued", || {
            if let Some(id) = stats(source, &a)["load"]["longest_sequence"].as_u64() {
                let order = format!("migrate --sequence-id {id} --target-node b {}", a.url);
                // It may be complete before the order arrives.
                let _ = Command::new(source).args(order.split_whitespace()).output().unwrap();
            }
            stats(target, &b)["load"]["arrived_completed"].as_u64() > Some(2)
        });
        for (program, node) in [(source, a), (target, b)] {
            assert_eq!(json_by(program, &node, "audit")["sound"], true);
            let load = &stats(program, &node)["load"];
            assert_eq!((&load["blocks_corrupt"], &load["findings"]), (&0.into(), &0.into()), "{load}");
            let (code, errors) = node.end(Signal::TERM);
            assert_eq!(code, Some(0), "{errors}");
            assert!(!errors.contains("refused") && !errors.contains("layout"), "{errors}");
        }
    }
}

#[test]
fn help_states_the_default_address_for_peers() {
    let help = String::from_utf8(run("serve --help").stdout).unwrap();
    let words: Vec<_> = help.split_whitespace().collect();
    assert!(words.join(" ").contains("by default 127.0.0.1:7411 with a token or TLS"), "{help}");
}

//! `kvpool serve` and the commands over a live pool, end to end.

use super::common;
use std::fs;
use std::path::Path;

use common::live::{Node, program, run, said, secret, wait_until};
use common::{keys, parse};
use rustix::process::Signal;
use serde_json::Value;

#[test]
fn a_node_is_watched_compacted_resized_audited_and_ended() {
    let node = Node::start("serve --admin 127.0.0.1:0 --listen off --name n1 --size 3000 --size-max 6000");
    assert!(node.greeting.starts_with("node: n1, 3,000 blocks of 16 tokens and 256 B"), "{}", node.greeting);
    let stats = node.text("stats");
    for part in [
        "total",
        "3,000",
        "used",
        "0.0 %",
        "free",
        "evictable",
        "fragmentation",
        "runs of a sequence",
        "mean run",
        "allocation mean",
        "allocation p99",
    ] {
        assert!(stats.contains(part), "no {part} in {stats}");
    }
    assert!(!stats.contains('\u{1b}'));
    let stats = node.json("stats");
    assert_eq!(
        keys(&stats).join(" "),
        "allocation available_fragmentation block_bytes block_tokens compaction evictable extra fragmentation free layout metrics node sequence_runs \
         sequences total uptime_s used used_percent version"
    );
    assert_eq!(keys(&stats["allocation"]), ["mean_ns", "p99_ns", "samples"]);
    let defrag = node.text("defrag");
    assert!(
        defrag.starts_with("moved 0 blocks in ") && defrag.contains(" before, ") && defrag.contains(" after"),
        "{defrag}"
    );
    let keys_of_defrag =
        ["fragmentation_after", "fragmentation_before", "is_worse", "moved_blocks", "report", "time_ms"];
    assert_eq!(keys(&node.json("defrag")), keys_of_defrag);
    assert!(node.text("resize 5000").starts_with("3,000 blocks before, 5,000 after"));
    assert_eq!(node.json("resize 2000")["to"], 2000);
    let refused = node.run("resize 6001");
    assert_eq!(refused.status.code(), Some(1));
    assert!(said(&refused).contains("(409)") && said(&refused).contains("6000"), "{}", said(&refused));
    assert!(node.text("audit").starts_with("ok: 2,001 frames"));
    assert_eq!(node.json("audit")["sound"], true);
    assert_eq!(node.text("migration-status"), "no migrations\n");
    let unknown = node.run("migrate --sequence-id 3 --target-node n2");
    assert_eq!(unknown.status.code(), Some(1));
    assert!(said(&unknown).contains("there is no sequence 3"), "{}", said(&unknown));
    let url = node.url.clone();
    assert_eq!(node.end(Signal::TERM), (Some(0), String::new()));
    let gone = run(&format!("stats {url}"));
    assert_eq!(gone.status.code(), Some(1));
    assert!(said(&gone).contains("cannot reach") && said(&gone).contains(&url), "{}", said(&gone));
}

#[test]
fn traffic_is_checked_and_nothing_is_lost() {
    let node = Node::start(
        "serve --admin 127.0.0.1:0 --listen off --size 4000 --load conversations --load-threads 3",
    );
    let mut last = Value::Null;
    wait_until("sequences complete and share prefixes", || {
        last = node.json("stats");
        let load = &last["extra"]["load"];
        load["completed"].as_u64() > Some(5) && load["cached_tokens"].as_u64() > Some(0)
    });
    assert!(last["used"].as_u64() > Some(0) && last["allocation"]["samples"].as_u64() > Some(0), "{last}");
    assert_eq!(node.json("audit")["sound"], true);
    assert_eq!(node.json("resize 6000")["to"], 6000);
    node.defragment();
    let tokens = node.json("stats")["extra"]["load"]["tokens"].as_u64();
    wait_until("it goes on", || node.json("stats")["extra"]["load"]["tokens"].as_u64() > tokens);
    let load = &node.json("stats")["extra"]["load"];
    assert_eq!((&load["blocks_corrupt"], &load["findings"]), (&0.into(), &0.into()), "{load}");
    assert!(load["tokens_verified"].as_u64() > Some(0), "{load}");
    assert!(node.text("stats").contains("tokens verified"));
    assert_eq!(node.end(Signal::INT), (Some(0), String::new()));
}

#[test]
fn settings_come_from_flags_variables_and_a_file_that_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvpool.toml");
    fs::write(&file, "name = \"from-file\"\nsize = 100\nblock_tokens = 8\n[peers]\nb = \"localhost:7\"\n")
        .unwrap();
    let mut command = program();
    command.env("KVPOOL_SIZE", "200").env("KVPOOL_CONFIG", &file).args(["serve", "--admin", "127.0.0.1:0"]);
    let node = Node::start_with(&mut command);
    assert!(node.greeting.starts_with("node: from-file, 200 blocks of 8 tokens"), "{}", node.greeting);
    fs::write(&file, "name = \"from-file\"\n[peers]\nc = \"localhost:8\"\n").unwrap();
    node.reload("changes of peers: +c=localhost:8 -b=localhost:7");
    // Settings that are refused change nothing.
    fs::write(&file, "nam = 1\n").unwrap();
    node.reload("kvpool.toml:1: there is no key `nam`");
    assert_eq!(node.json("stats")["total"], 200);
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0));
    assert!(errors.contains("not reloaded"), "{errors}");
}

#[test]
fn bad_settings_end_the_program_before_it_starts() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bad.toml");
    fs::write(&file, "size = 10\nblock_size = 16\n").unwrap();
    for (arguments, message) in [
        ("--size 0", "--size: size = \"0\": below 1; accepted: a number of blocks"),
        (&format!("--config {}", file.display()), "bad.toml:2: there is no key `block_size`"),
        ("--admin 0.0.0.0:0", "--admin: admin needs token_file as well"),
        ("--listen 0.0.0.0:0", "--listen: listen needs tls_cert as well"),
        ("--size 999999999 --layout llama-3.1-405b", "a pool of 999,999,999 blocks of 7.88 MiB"),
        ("--layout Qwen/Qwen2.5-8B", "the closest first: qwen2.5-3b, qwen2.5-7b"),
        ("--layout layers=2,heads=1", "expected a part of layers=32,"),
        #[cfg(not(feature = "otel"))]
        (
            "--otel-endpoint http://localhost:1",
            "--otel-endpoint: this program was built without the feature `otel`: build it with `cargo install",
        ),
        ("--tls-cert c --tls-key k --tls-ca /nowhere/ca.pem", "cannot read c: "),
        ("--bogus", "unexpected argument '--bogus'"),
    ] {
        let admin = if arguments.contains("--admin") { "" } else { "--admin 127.0.0.1:0" };
        let output = run(&format!("serve {admin} {arguments}"));
        assert_eq!(output.status.code(), Some(2), "{arguments}");
        assert!(said(&output).contains(message), "{arguments}: {}", said(&output));
        assert!(output.stdout.is_empty(), "{arguments}");
    }
    let help = run("serve --help");
    let text = String::from_utf8_lossy(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    for part in ["--migrate-below <N>", "--token-file <FILE>", "[default: 127.0.0.1:7410]"] {
        assert!(text.contains(part), "no {part} in {text}");
    }
}

#[test]
fn a_token_is_read_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, token: &str| {
        let path = folder.path().join(name);
        secret(&path, token);
        path.display().to_string()
    };
    let (right, wrong) =
        (write("right", "one-token-of-the-tests\n"), write("wrong", "another-token-of-the-tests\n"));
    let node = Node::start(&format!("serve --admin 0.0.0.0:0 --token-file {right}"));
    let port = node.url.rsplit(':').next().unwrap();
    let stats = |more: &str| run(&format!("stats 127.0.0.1:{port} --json {more}"));
    for refused in ["", &format!("--token-file {wrong}")] {
        let output = stats(refused);
        assert_eq!(output.status.code(), Some(1));
        assert!(said(&output).contains("token missing or wrong (401)"), "{}", said(&output));
    }
    assert_eq!(parse(&stats(&format!("--token-file {right}")))["total"], 20_000);
    let by_variable =
        program().env("KVPOOL_TOKEN_FILE", &right).args(["stats", &format!("127.0.0.1:{port}")]).output();
    assert_eq!(by_variable.unwrap().status.code(), Some(0));
    let missing = stats("--token-file /nowhere/token");
    assert_eq!(missing.status.code(), Some(2));
    assert!(
        said(&missing).contains("--token-file: cannot read the token's file /nowhere/token"),
        "{}",
        said(&missing)
    );
    let (code, errors) = node.end(Signal::TERM);
    assert_eq!(code, Some(0), "{errors}");
    assert!(
        errors.contains("open to other hosts over plain HTTP") && errors.lines().count() == 1,
        "{errors}"
    );
}

#[test]
fn an_admin_command_at_the_port_for_peers_is_told_so() {
    let node = Node::start(
        "serve --admin 127.0.0.1:0 --name n1 --size 100 --listen 127.0.0.1:0 --layout layers=1,latent=8",
    );
    let output = run(&format!("stats http://{}", node.listen));
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("does not speak HTTP: it is perhaps the port for peers"),
        "{}",
        said(&output)
    );
    assert_eq!(node.end(Signal::TERM).0, Some(0));
}

#[test]
fn bad_urls_are_usage_errors() {
    for url in ["ftp://localhost:1", "localhost", "http://localhost:0", "http://unix:/x"] {
        let output = run(&format!("stats {url}"));
        assert_eq!(output.status.code(), Some(2), "{url}");
        assert!(said(&output).contains("[URL]"), "{}", said(&output));
    }
    assert_eq!(run("resize 0").status.code(), Some(2));
    assert_eq!(run("migrate --sequence-id x --target-node b").status.code(), Some(2));
}

#[test]
fn the_topology_names_the_path_and_the_reason() {
    let machines = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/tests/machines");
    let file = machines.join("h100_nvlink_ib.json");
    let all = parse(&run(&format!("topology --json --machine {}", file.display())));
    assert_eq!(keys(&all), ["machine", "paths"]);
    assert_eq!(all["paths"].as_array().unwrap().len(), 13 * 12 / 2);
    let one = run(&format!("topology cuda:0 b --machine {}", file.display()));
    let text = String::from_utf8(one.stdout).unwrap();
    for part in [
        "h100-box",
        "NVIDIA H100",
        "mlx5_0 port 1",
        "InfiniBand",
        "RDMA",
        "cuda:0 > mlx5_0 port 1 > b",
        "PCI switch",
    ] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    // What the command prints is a record that it reads.
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("copy.json");
    fs::write(&copy, all.to_string()).unwrap();
    assert_eq!(parse(&run(&format!("topology --json --machine {}", copy.display()))), all);
    let unknown = run(&format!("topology cuda:0 c --machine {}", file.display()));
    assert_eq!(unknown.status.code(), Some(2));
    assert!(said(&unknown).contains("h100-box has no c; it has host, cuda:0"), "{}", said(&unknown));
    assert!(said(&run("topology --machine /nowhere.json")).contains("/nowhere.json"));
    // This machine, with peers that need no certificate to be drawn.
    let here = parse(&run("topology --json --peers b=gpu-node-2:7411,c=unix:/c"));
    let paths = here["paths"].as_array().unwrap();
    let to_c = paths.iter().find(|path| path["from"] == "host" && path["to"] == "c").unwrap();
    assert_eq!(to_c["transport"], "unix_socket");
}

/// The limit of descriptors is raised to what the settings need, or as far as the system permits.
#[cfg(target_os = "linux")]
#[test]
fn the_limit_of_descriptors_is_raised() {
    let started = |limits: &str| {
        let mut shell = std::process::Command::new("sh");
        shell
            .arg("-c")
            .arg(format!("{limits}; exec \"$0\" serve --admin 127.0.0.1:0 --listen 127.0.0.1:0 --size 100"));
        shell.arg(program().get_program());
        let node = Node::start_with(&mut shell);
        let limits = std::fs::read_to_string(format!("/proc/{}/limits", node.id())).unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let soft: u64 = line.split_whitespace().nth(3).unwrap().parse().unwrap();
        let (code, errors) = node.end(Signal::TERM);
        assert_eq!(code, Some(0), "{errors}");
        // Not the warnings about an open port, or of variables of the tests.
        let of_limits = |line: &&str| line.contains("descriptors");
        (soft, errors.lines().filter(of_limits).collect::<String>())
    };
    // The system of a test may permit fewer than the settings need.
    let permitted = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let (soft, errors) = started("ulimit -Sn 300");
    match permitted {
        Some(permitted) if permitted < 4700 => {
            assert!(soft == permitted && errors.contains("descriptors are permitted"), "{soft}: {errors}")
        }
        _ => assert!(soft > 4000 && errors.is_empty(), "{soft}: {errors}"),
    }
    let (soft, errors) = started("ulimit -n 400");
    assert!(
        soft == 400 && errors.contains("400 descriptors are permitted, and these settings may need 46"),
        "{errors}"
    );
}

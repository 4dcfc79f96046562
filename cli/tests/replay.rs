//! `kvpool replay` as its users meet it: exit codes, the JSON, and what is said about bad input.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use kvpool::prefix::policy::PolicyKind;
use kvpool_cli::trace::{ReadOptions, Request, Trace};
use serde_json::Value;

const KEYS: &[&str] = &[
    "audit",
    "block_bytes",
    "block_tokens",
    "blocks_allocated",
    "blocks_corrupt",
    "blocks_freed",
    "blocks_leaked",
    "blocks_total",
    "completed",
    "defrag",
    "findings",
    "fragmentation",
    "interrupted",
    "latency_ns",
    "layout",
    "preempted",
    "prefix",
    "refused",
    "rejected",
    "requests",
    "resize",
    "run_len_mean",
    "sound",
    "speedup",
    "threads",
    "tokens",
    "tokens_verified",
    "trace",
    "trace_s",
    "utilization",
    "wall_s",
];

fn kvpool(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvpool")).args(arguments).output().expect("the program runs")
}

fn json(output: &Output) -> Value {
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else")
}

fn keys(value: &Value) -> Vec<&str> {
    let mut keys: Vec<_> = value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

#[test]
fn json_has_exactly_its_keys() {
    let report =
        json(&kvpool(&["replay", "--requests", "200", "--threads", "2", "--prefix-cache", "on", "--json"]));
    assert_eq!(keys(&report), KEYS);
    let utilization = ["at_first_refusal", "mean", "owned_at_first_refusal", "peak"];
    assert_eq!(keys(&report["utilization"]), utilization);
    assert_eq!(keys(&report["fragmentation"]), ["final", "max", "mean"]);
    let defrag = [
        "errors",
        "fragmentation_after",
        "fragmentation_before",
        "given_up",
        "moved_blocks",
        "moved_bytes",
        "runs",
        "time_ms",
    ];
    assert_eq!(keys(&report["defrag"]), defrag);
    let prefix = [
        "evicted_blocks",
        "hit_blocks",
        "hit_rate",
        "lookup_blocks",
        "policy",
        "resumed_hit_blocks",
        "resumed_lookup_blocks",
    ];
    assert_eq!(keys(&report["prefix"]), prefix);
    assert_eq!(report["resize"], Value::Array(vec![]));
    assert_eq!(keys(&report["latency_ns"]), ["allocate", "free"]);
    for call in ["allocate", "free"] {
        assert_eq!(keys(&report["latency_ns"][call]), ["max", "p50", "p99", "p999"]);
    }
}

#[test]
fn a_sound_replay_adds_up() {
    let report = json(&kvpool(&["replay", "--requests", "300", "--seed", "5", "--threads", "3", "--json"]));
    assert_eq!(report["audit"], "ok");
    assert_eq!(report["sound"], true);
    assert_eq!(report["requests"], 300);
    assert_eq!(report["completed"], 300);
    assert_eq!(report["threads"], 3);
    assert_eq!(report["blocks_leaked"], 0);
    assert_eq!(report["blocks_corrupt"], 0);
    assert_eq!(report["blocks_allocated"], report["blocks_freed"]);
    assert!(report["tokens_verified"].as_u64() > report["tokens"].as_u64());
}

#[test]
fn a_roomy_pool_refuses_nothing() {
    let report = json(&kvpool(&["replay", "--requests", "50", "--blocks", "200000", "--json"]));
    assert!(report["utilization"]["at_first_refusal"].is_null());
    assert_eq!(report["preempted"], 0);
}

#[test]
fn a_narrow_pool_is_full_and_sound() {
    let report =
        json(&kvpool(&["replay", "--requests", "200", "--blocks", "3000", "--threads", "2", "--json"]));
    assert!(report["preempted"].as_u64() > Some(0), "{report}");
    assert!(report["utilization"]["at_first_refusal"].as_f64() > Some(0.5));
    assert_eq!(report["utilization"]["peak"].as_f64().map(|peak| peak > 0.9), Some(true));
}

#[test]
fn what_can_never_fit_is_rejected_and_no_failure() {
    let report = json(&kvpool(&["replay", "--requests", "200", "--blocks", "100", "--json"]));
    assert!(report["rejected"].as_u64() > Some(0));
    assert_eq!(report["completed"].as_u64().unwrap() + report["rejected"].as_u64().unwrap(), 200);
}

#[test]
fn other_layouts_and_block_sizes_hold_their_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("short.csv");
    let rows: String = (10..50).map(|i| format!("2023-11-16 18:17:{i},{},{}\n", 3 * i, i / 2)).collect();
    std::fs::write(&path, format!("TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")).unwrap();
    for layout in ["tiny", "qwen2.5-0.5b", "deepseek-v2-lite"] {
        let trace = path.to_str().unwrap();
        let arguments =
            ["replay", trace, "--layout", layout, "--block-tokens", "8", "--blocks", "25", "--json"];
        let report = json(&kvpool(&arguments));
        assert_eq!((&report["sound"], &report["block_tokens"]), (&Value::Bool(true), &8.into()), "{layout}");
    }
}

/// Prompts of conversations begin with what was said before: most of it is found, and no byte of it is wrong.
#[test]
fn prefixes_are_reused_by_every_policy() {
    let arguments = ["replay", "--requests", "400", "--threads", "2", "--json", "--blocks", "60000"];
    let off = json(&kvpool(&[&arguments[..], &["--prefix-cache", "off"]].concat()));
    assert_eq!((&off["prefix"], &off["sound"]), (&Value::Null, &Value::Bool(true)));
    for policy in PolicyKind::ALL {
        let options = ["--prefix-cache", "on", "--policy", policy.name()];
        let on = json(&kvpool(&[&arguments[..], &options].concat()));
        let prefix = &on["prefix"];
        assert_eq!((&on["sound"], &prefix["policy"]), (&Value::Bool(true), &policy.name().into()));
        let count = |name: &str| prefix[name].as_u64().unwrap();
        assert!(count("hit_blocks") > count("lookup_blocks") / 4, "{prefix}");
        let rate = count("hit_blocks") as f64 / count("lookup_blocks") as f64;
        assert_eq!(prefix["hit_rate"].as_f64(), Some(rate));
        // What is found is not written.
        let found = 16 * (count("hit_blocks") + count("resumed_hit_blocks"));
        let tokens = |report: &Value| report["tokens"].as_u64().unwrap();
        assert!(on["preempted"] != 0 || tokens(&on) + found == tokens(&off), "{on}");
    }
}

/// Whoever gives way leaves its blocks in the cache, others evict them, and the pool changes its size: nothing is lost.
#[test]
fn a_narrow_pool_evicts_and_finds_again() {
    let arguments = ["replay", "--requests", "300", "--blocks", "6000", "--threads", "3", "--json"];
    let sizes = ["--resize-at", "20%:9000,45%:5000,70%:7000", "--prefix-cache", "on"];
    let report = json(&kvpool(&[&arguments[..], &sizes].concat()));
    assert_eq!(report["sound"], true, "{report}");
    let count = |name: &str| report["prefix"][name].as_u64().unwrap();
    assert!(count("evicted_blocks") > 0 && count("hit_blocks") > 0, "{report}");
}

/// A pool that is too small for comfort is compacted all the time, and every byte is found where it is looked for.
#[test]
fn compaction_moves_blocks_and_no_byte_is_lost() {
    let arguments = ["replay", "--requests", "1000", "--blocks", "6000", "--json"];
    let on = [&arguments[..], &["--defrag-threshold", "0", "--defrag-interval-ms", "1"]].concat();
    let report = json(&kvpool(&on));
    assert_eq!((&report["sound"], &report["blocks_corrupt"]), (&Value::Bool(true), &0.into()));
    let defrag = &report["defrag"];
    assert!(defrag["runs"].as_u64() > Some(0) && defrag["moved_blocks"].as_u64() > Some(0), "{defrag}");
    assert_eq!(
        defrag["moved_bytes"].as_u64(),
        defrag["moved_blocks"].as_u64().map(|blocks| blocks * report["block_bytes"].as_u64().unwrap())
    );
    assert!(defrag["fragmentation_after"].as_f64() < defrag["fragmentation_before"].as_f64(), "{defrag}");
    let off = json(&kvpool(&[&arguments[..], &["--no-defrag"]].concat()));
    assert_eq!((&off["sound"], &off["defrag"]), (&Value::Bool(true), &Value::Null));
}

#[test]
fn a_pool_gets_other_sizes_while_it_is_used() {
    let sizes = "20%:9000,45%:5000,70%:7000";
    for defrag in [&["--defrag-interval-ms", "1"][..], &["--no-defrag"]] {
        let arguments = ["replay", "--requests", "1500", "--blocks", "7000", "--resize-at", sizes, "--json"];
        let report = json(&kvpool(&[&arguments[..], defrag].concat()));
        assert_eq!((&report["sound"], &report["blocks_total"]), (&Value::Bool(true), &7000.into()));
        let steps = report["resize"].as_array().unwrap();
        assert_eq!(steps.len(), 3, "{report}");
        for (step, (from_request, to)) in steps.iter().zip([(300, 9000), (675, 5000), (1050, 7000)]) {
            assert_eq!(keys(step), ["at_request", "attempts", "from", "outcome", "time_ms", "to"]);
            assert_eq!(step["to"], to);
            assert!(step["at_request"].as_u64() >= Some(from_request), "{step}");
            let outcome = step["outcome"].as_str().unwrap();
            // Growing is done at once; what is in use may be in the way of shrinking until the next step is due.
            assert!(outcome == "done" || to == 5000 && outcome.starts_with("blocked: "), "{step}");
        }
    }
}

/// More is in use than the pool is to have until the last request is done: tried again, and no failure.
#[test]
fn what_is_blocked_to_the_end_is_done_then() {
    let arguments = ["replay", "--requests", "300", "--resize-at", "5%:1"];
    let report = json(&kvpool(&[&arguments[..], &["--json"]].concat()));
    let step = &report["resize"][0];
    assert_eq!((&step["outcome"], &step["to"]), (&"done".into(), &1.into()), "{report}");
    assert_eq!(report["sound"], true);
    let table = String::from_utf8(kvpool(&arguments).stdout).unwrap();
    for word in ["defrag", "resize", "done", "given up"] {
        assert!(table.contains(word), "no {word:?} in\n{table}");
    }
}

/// A run that completes no request fails in every form of output, and leaves no picture.
#[test]
fn what_completes_nothing_fails() {
    let arguments = ["replay", "--requests", "100", "--blocks", "5"];
    let reason = "nothing was replayed: every request was rejected (100), the smallest needs 31 blocks";
    for options in [&[][..], &["--no-verify"]] {
        let output = kvpool(&[&arguments[..], options].concat());
        let table = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{table}");
        assert!(table.contains("NOT SOUND") && table.contains(reason), "{table}");
        assert!(!table.contains("nothing lost"), "{table}");
        let output = kvpool(&[&arguments[..], &["--json"], options].concat());
        assert_eq!(output.status.code(), Some(1));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["sound"], &report["completed"]), (&Value::Bool(false), &0.into()));
        assert!(report["findings"][0].as_str().unwrap().starts_with(reason), "{report}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool.svg");
    let output = kvpool(&["map", "--requests", "100", "--blocks", "5", "--output", path.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nothing was drawn: nothing was replayed: every request was rejected"), "{said}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "an empty picture");
}

#[test]
fn columns_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("other.csv");
    std::fs::write(&path, "at,in,out\n0,40,10\n1.5,33,5\n").unwrap();
    let columns = "arrival=at,input=in,output=out";
    let report = json(&kvpool(&["replay", path.to_str().unwrap(), "--columns", columns, "--json"]));
    assert_eq!((&report["tokens"], &report["trace_s"]), (&88.into(), &1.5.into()));
}

#[test]
fn hash_ids_are_of_no_use_without_prefixes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("bare.jsonl");
    std::fs::write(&path, "{\"timestamp\": 0, \"input_length\": 40, \"output_length\": 10}\n").unwrap();
    assert_eq!(json(&kvpool(&["replay", path.to_str().unwrap(), "--json"]))["tokens"], 50);
}

#[test]
fn completions_and_pages_know_every_command() {
    let commands = ["replay", "map", "policy", "info", "completions", "man"];
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = kvpool(&["completions", shell]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(0));
        for word in commands.into_iter().chain(["resize-at"]) {
            assert!(text.contains(word), "{shell}: no {word}");
        }
    }
    let page = String::from_utf8(kvpool(&["man"]).stdout).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let pages = folder.path().join("share/man1");
    assert_eq!(kvpool(&["man", pages.to_str().unwrap()]).status.code(), Some(0));
    assert_eq!(std::fs::read_to_string(pages.join("kvpool.1")).unwrap().trim_end(), page.trim_end());
    for command in commands {
        assert!(page.contains(&format!("kvpool\\-{command}(1)")), "no {command} in {page}");
        let text = std::fs::read_to_string(pages.join(format!("kvpool-{command}.1"))).unwrap();
        assert!(text.contains(".SH NAME"), "{command}: {text}");
    }
    assert_eq!(kvpool(&["man", "/dev/null/pages"]).status.code(), Some(2));
}

#[test]
fn a_map_is_drawn() {
    for cache in ["off", "on"] {
        draws_a_map(cache);
    }
}

fn draws_a_map(cache: &str) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pool.svg");
    let output = kvpool(&[
        "map",
        "--requests",
        "1500",
        "--blocks",
        "6000",
        "--at",
        "50%",
        "--output",
        path.to_str().unwrap(),
        "--prefix-cache",
        cache,
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(output.stderr.is_empty(), "{said}");
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(line.contains("pool.svg: fragmentation") && line.lines().count() == 1, "{line}");
    assert!(line.contains(", mean sequence run ") && line.contains(", moved blocks "), "{line}");
    let svg = std::fs::read_to_string(&path).unwrap();
    for word in [
        "<svg",
        "mean sequence run",
        "Before",
        "After",
        "6,000 blocks of 16 tokens",
        "of 1,500 requests (50 %)",
        "</svg>",
    ] {
        assert!(svg.contains(word), "no {word:?} in {svg}");
    }
}

#[test]
fn unverified_replays_say_so() {
    let report = json(&kvpool(&["replay", "--requests", "50", "--no-verify", "--json"]));
    assert_eq!(report["tokens_verified"], 0);
    let output = kvpool(&["replay", "--requests", "50", "--no-verify"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("not verified"));
}

#[test]
fn the_table_is_for_people_and_the_bar_for_terminals() {
    let output = kvpool(&["replay", "--requests", "100", "--policy", "lru"]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8(output.stdout).unwrap();
    for word in [
        "hit rate",
        "by policy lru",
        "requests",
        "speedup",
        "blocks leaked",
        "blocks corrupt",
        "at first refusal",
        "p99.9",
        "nothing lost",
    ] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    assert!(!text.contains('\u{1b}'), "colours, although this is no terminal");
    assert!(output.stderr.is_empty(), "a bar, although this is no terminal");
}

#[test]
fn traces_are_read_from_files_and_from_the_standard_input() {
    let text =
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04,40,10\n2023-11-16 18:17:03,33,5\n";
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.csv");
    std::fs::write(&path, text).unwrap();
    let output = kvpool(&["replay", path.to_str().unwrap(), "--json"]);
    let report = json(&output);
    assert_eq!((&report["requests"], &report["tokens"]), (&2.into(), &88.into()));
    assert_eq!(report["trace"], "trace.csv");
    assert!(String::from_utf8_lossy(&output.stderr).contains("1 lines stood after a later one"));

    let mut child = Command::new(env!("CARGO_BIN_EXE_kvpool"))
        .args(["replay", "-", "--format", "azure", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert_eq!(json(&child.wait_with_output().unwrap())["requests"], 2);
}

#[test]
fn bad_usage_and_bad_input_are_told_apart_from_failures() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let good = b"{\"timestamp\": 0, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [1]}\n";
    let cut = file("cut.jsonl", &[good.as_slice(), &good[..40]].concat());
    let negative =
        file("negative.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-1,5\n");
    let binary = file("binary.jsonl", b"{\"timestamp\": \xff\xfe}\n");
    let empty = file("empty.csv", b"");
    let header = file("header.csv", b"TIMESTAMP,Tokens\n");
    let gzip = file("trace.jsonl.gz", b"\x1f\x8b\x08\x08\x00\x1b[31m");
    let other = file("other.csv", b"TIMESTAMP,in,GeneratedTokens\n2023-11-16 18:17:03,1,5\n");
    let evil = file("\u{1b}[31m.jsonl", b"");
    let bare = file("bare.jsonl", b"{\"timestamp\": 0, \"input_length\": 9, \"output_length\": 1}\n");
    let place = directory.path().to_str().unwrap().to_owned();
    let missing = directory.path().join("missing").to_str().unwrap().to_owned();
    for (arguments, complaint) in [
        (vec!["replay", &cut], "cut.jsonl:2: EOF while parsing"),
        (vec!["replay", &negative], "negative.csv:2: ContextTokens is -1"),
        (vec!["replay", &binary], "binary.jsonl:1: not UTF-8"),
        (vec!["replay", &empty], "empty.csv: empty"),
        (vec!["replay", &header], "header.csv:1: the header has no column ContextTokens"),
        (vec!["replay", &gzip], "trace.jsonl.gz: compressed with gzip; decompress it first"),
        (
            vec!["replay", &other],
            "other.csv:1: the header has no column ContextTokens; its columns are TIMESTAMP, in",
        ),
        (
            vec!["replay", &other, "--columns", "input=i"],
            "no column i; its columns are TIMESTAMP, in, GeneratedTokens",
        ),
        (vec!["replay", &other, "--columns", "inn=in"], "no field is called \"inn\""),
        (
            vec!["replay", &other, "--columns", "input=in", "--format", "mooncake"],
            "--format mooncake is JSON",
        ),
        (vec!["replay", "--columns", "input=in"], "<TRACE>"),
        (vec!["replay", &evil], "\\u{1b}[31m.jsonl: empty"),
        (vec!["replay", &bare, "--prefix-cache", "on"], "bare.jsonl:1: no hash_ids"),
        (vec!["replay", &place], "is a directory"),
        (vec!["replay", &missing], "cannot open"),
        (vec!["replay", "--layout", "none-such"], "none-such"),
        (vec!["replay", "--blocks", "0"], "'--blocks <N>': not a whole number from 1 to 134217727"),
        (vec!["replay", "--blocks", "-5"], "'--blocks <N>': not a whole number from 1 to 134217727"),
        (vec!["replay", "--blocks", "1e3"], "'--blocks <N>': not a whole number from 1 to 134217727"),
        (vec!["replay", "--blocks", "99999999999999999999"], "not a whole number from 1 to 134217727"),
        (vec!["replay", "--blocks", "--json"], "a value is required for '--blocks <N>'"),
        (vec!["replay", "--block-tokens", "-1"], "'--block-tokens <N>': not a whole number from 1 to 4096"),
        (vec!["replay", "--threads", "70000"], "'--threads <N>': not a whole number from 1 to 1024"),
        (vec!["replay", "--requests", "0"], "'--requests <N>': not a whole number from 1 to 10000000"),
        (vec!["replay", "--seed", "-1"], "'--seed <N>': not a whole number from 0 to 18446744073709551615"),
        (vec!["replay", "--defrag-interval-ms", "-1"], "not a whole number from 1 to 3600000"),
        (vec!["replay", "--defrag-threshold", "-0.1"], "-0.1 is not from 0 to 1"),
        (vec!["replay", "--resize-at", "-3%:5"], "\"-3%:5\": not written as 60%:80000"),
        (vec!["map", "--at", "-3%"], "\"-3%\" is not more than 0%"),
        (vec!["replay", "--layout", "llama-3.1-405b", "--blocks", "100000000"], "does not fit"),
        (vec!["replay", "--nonsense"], "--nonsense"),
        (vec!["replay", "--prefix-cache", "perhaps"], "[possible values: on, off]"),
        (vec!["replay", "--policy", "mru"], "no eviction policy is called \"mru\"; there are lru"),
        (vec!["replay", "--prefix-cache", "off", "--policy", "lru"], "--policy lru says how"),
        (vec!["map", "--prefix-cache", "off", "--policy", "lru"], "--policy lru says how"),
        (vec!["replay", "--resize-at", "30%:5,x"], "item 2, \"x\": not written as 60%:80000"),
        (vec!["replay", "--resize-at", "60%:5,30%:5"], "not after the item before it, at 60 %"),
        (vec!["replay", "--defrag-threshold", "2"], "2 is not from 0 to 1"),
        (
            vec!["map", "--requests", "50", "--output", "/nowhere/at/all.svg"],
            "cannot write /nowhere/at/all.svg",
        ),
        (vec!["map", "--requests", "50", "--at", "0%"], "not more than 0%"),
        (vec!["frobnicate"], "frobnicate"),
        (vec![], "Usage"),
    ] {
        let output = kvpool(&arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(complaint), "{arguments:?} says {said}");
        assert!(!said.contains('\u{1b}'), "{arguments:?} says {said:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

/// With nowhere to complain to, the exit code still tells.
#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_error_is_no_panic() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvpool"));
        command.args(arguments).stdout(Stdio::null()).stderr(full()).status().unwrap().code()
    };
    assert_eq!(run(&["replay", "/no/such/trace"]), Some(2));
    assert_eq!(run(&["replay", "--nonsense"]), Some(2));
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("unsorted.csv");
    let rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04,4,1\n2023-11-16 18:17:03,3,5\n";
    std::fs::write(&path, rows).unwrap();
    assert_eq!(run(&["replay", path.to_str().unwrap()]), Some(0));
}

/// Where the published traces are: `KVPOOL_TRACES`, or beside the repository. They are not part of it.
fn published(name: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let path = std::env::var_os("KVPOOL_TRACES").map_or_else(beside, PathBuf::from).join(name);
    if !path.is_file() {
        eprintln!(
            "SKIPPED: {} is not there; KVPOOL_TRACES names the directory of the traces",
            path.display()
        );
        return None;
    }
    Some(path)
}

#[test]
fn published_traces_are_read_whole() {
    for (name, requests, input, output) in [
        ("mooncake_conversation.jsonl", 12_031, 144_793_823, 4_122_048),
        ("azure2023_code.csv", 8_819, 18_059_974, 245_896),
    ] {
        let Some(path) = published(name) else { continue };
        let trace = Trace::load(&path, &ReadOptions::default()).unwrap();
        let sum = |of: fn(&Request) -> u32| {
            trace.requests.iter().map(|request| u64::from(of(request))).sum::<u64>()
        };
        assert_eq!((trace.requests.len(), trace.out_of_order), (requests, 0), "{name}");
        assert_eq!(
            (sum(|request| request.input_tokens), sum(|request| request.output_tokens)),
            (input, output)
        );
    }
}

#[test]
fn the_beginning_of_published_traces_is_replayed() {
    for name in ["mooncake_conversation.jsonl", "azure2023_code.csv"] {
        let Some(path) = published(name) else { continue };
        let arguments = ["replay", path.to_str().unwrap(), "--requests", "150", "--threads", "2", "--json"];
        let report = json(&kvpool(&arguments));
        assert_eq!((&report["completed"], &report["sound"]), (&150.into(), &Value::Bool(true)), "{name}");
    }
}

//! `kvpool replay --sessions`, end to end: the closed loop, its report, and the errors of bad
//! input.

use super::common;
use std::fs;
use std::path::Path;

use common::{json, keys, kvpool_in, parse, published};
use serde_json::Value;

/// A session of an agent with a subagent; equal texts have local hash ids.
const AGENT: &str = r#"{"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": [
  {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "api_time": 1.0, "think_time": 0.0},
  {"t": 2.5, "type": "subagent", "requests": [{"t": 0.0, "type": "s", "in": 64, "out": 2, "hash_ids": [3]}]},
  {"t": 9.0, "type": "n", "in": 200, "out": 5, "hash_ids": [1, 2, 4], "api_time": 1.0, "think_time": 8.0}
]}"#;

const DYNAMO: &str = r#"{"session_id": "a", "timestamp": 0, "input_length": 600, "output_length": 100, "hash_ids": [0, 1]}
{"session_id": "a", "delay": 500, "input_length": 1100, "output_length": 1, "hash_ids": [0, 2, 3]}
{"session_id": "b", "timestamp": 20, "input_length": 1100, "output_length": 3, "hash_ids": [0, 4, 5]}
"#;

fn write(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join(name), text).unwrap();
}

fn folder_of_agents() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["a.json", "b.json", "c.json"] {
        write(folder.path(), name, AGENT);
    }
    folder
}

/// Runs a replay that must be refused, and returns the error.
fn refused(folder: &Path, options: &str) -> String {
    let output = kvpool_in(folder, &format!("replay {options}"));
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{options}: {error}");
    assert!(output.stdout.is_empty(), "{options}");
    error
}

#[test]
fn sessions_of_a_folder_or_of_files_follow_one_another() {
    let folder = folder_of_agents();
    for traces in [".", "a.json b.json c.json"] {
        let options =
            "--sessions 2 --blocks 100 --threads 1 --answer-token-ms 100 --prefill-rate 1000 --json";
        let report = parse(&kvpool_in(folder.path(), &format!("replay {traces} {options}")));
        let sessions = &report["sessions"];
        assert_eq!(
            keys(sessions).join(" "),
            "at_once completed first_token_ms prompt_tokens recomputed_tokens sessions subagents tells_returns"
        );
        assert_eq!(keys(&sessions["first_token_ms"]).join(" "), "mean p50 p99");
        for (name, value) in [
            ("at_once", 2),
            ("completed", 3),
            ("sessions", 3),
            ("subagents", 3),
            ("prompt_tokens", 3 * (130 + 64 + 200)),
            ("recomputed_tokens", 0),
        ] {
            assert_eq!(sessions[name], value, "{name} of {sessions}");
        }
        // Two of three sessions begin together. The third begins when one has ended: each takes two
        // answers of 0.5 s, a think time of 8 s, and its prompts.
        let time = report["trace_s"].as_f64().unwrap();
        assert!((18.0..20.0).contains(&time), "{time}");
        assert_eq!((&report["requests"], &report["completed"]), (&9.into(), &9.into()));
        // The second prompt begins with the 128 tokens of the first that have ids.
        assert_eq!(
            (&report["prefix"]["policy"], &report["prefix"]["hit_blocks"]),
            (&"lru".into(), &24.into())
        );
        assert_eq!(report["sound"], true);
    }
}

#[test]
fn dynamo_and_generated_requests_have_sessions() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "dynamo.jsonl", DYNAMO);
    let report = parse(&kvpool_in(folder.path(), "replay dynamo.jsonl --sessions 1 --tell-returns --json"));
    assert_eq!(
        (&report["sessions"]["completed"], &report["sessions"]["tells_returns"]),
        (&2.into(), &true.into())
    );

    let report = json("replay --sessions 3 --requests 60 --prefix-cache off --json");
    let sessions = &report["sessions"];
    assert_eq!((&report["completed"], &sessions["completed"]), (&60.into(), &sessions["sessions"]));
    assert!(sessions["sessions"].as_u64() > Some(3), "{sessions}");
    assert!(report["prefix"].is_null(), "{report}");
    assert_eq!((&report["trace"], &report["free_list"]), (&"agents (seed 0)".into(), &Value::Null));

    let report = json("replay --sessions 3 --requests 40 --load conversations --seed 7 --json");
    assert_eq!((&report["trace"], &report["completed"]), (&"conversations (seed 7)".into(), &40.into()));
    let report = json("replay --requests 40 --load agents --json");
    assert_eq!((&report["trace"], &report["sessions"]), (&"agents (seed 0)".into(), &Value::Null));
}

#[test]
fn the_table_has_the_sessions_within_80_columns() {
    let folder = folder_of_agents();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvpool"))
        .current_dir(folder.path())
        .args(["replay", ".", "--sessions", "2", "--policy", "lru"])
        .env("COLUMNS", "80")
        .output()
        .unwrap();
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let words = table.split([' ', '\n', '│', '┆']).filter(|word| !word.is_empty()).collect::<Vec<_>>();
    let words = words.join(" ");
    for text in ["of 3, 2 at a time", "3 subagents", "recomputed tokens", "first token", "by policy lru"] {
        assert!(words.contains(text), "no {text:?} in {table}");
    }
}

#[test]
fn bad_numbers_are_refused() {
    let folder = folder_of_agents();
    for (options, part) in [
        ("--sessions 0", "not a whole number from 1 to 1,000,000"),
        ("--sessions -3", "not a whole number from 1 to 1,000,000"),
        ("--sessions many", "not a whole number from 1 to 1,000,000"),
        ("--sessions 2 --prefill-rate 0", "not a whole number from 1 to 1,000,000,000"),
        ("--sessions 2 --answer-token-ms 0", "0 is not from 0.001 to 60,000"),
        ("--sessions 2 --answer-token-ms -1", "-1 is not from 0.001 to 60,000"),
        ("--sessions 2 --answer-token-ms nan", "NaN is not from 0.001 to 60,000"),
        ("--sessions 2 --answer-token-ms soon", "not a number of milliseconds"),
        ("--prefill-rate 100", "--sessions <N>"),
        ("--answer-token-ms 10", "--sessions <N>"),
        ("--tell-returns", "--sessions <N>"),
        ("--sessions 2 --sweep", "cannot be used with"),
        ("--sessions 2 --load agents", "cannot be used with"),
    ] {
        let error = refused(folder.path(), &format!(". {options}"));
        assert!(error.contains(part), "{options}: {error}");
    }
}

#[test]
fn a_trace_without_sessions_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        "mooncake.jsonl",
        &DYNAMO.lines().take(1).collect::<String>().replace("session_id", "id"),
    );
    write(folder.path(), "azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n");
    for options in ["mooncake.jsonl --sessions 2", "azure.csv --sessions 2"] {
        let error = refused(folder.path(), options);
        assert!(error.contains(": no request has a session, and --sessions needs them"), "{error}");
    }
}

#[test]
fn bad_times_and_files_are_refused_by_name() {
    let folder = folder_of_agents();
    for (from, to, part) in [
        ("\"think_time\": 8.0", "\"think_time\": -8.0", "b.json: requests[2]: think_time \"-8\": outside"),
        (
            "\"think_time\": 8.0",
            "\"think_time\": 1e12",
            "b.json: requests[2]: think_time \"1000000000000\": outside",
        ),
        (
            "\"think_time\": 8.0",
            "\"think_time\": \"8\"",
            "b.json:4: invalid type: string \"8\", expected f64",
        ),
        ("\"api_time\": 1.0", "\"api_time\": -1", "b.json: requests[0]: api_time \"-1\": outside"),
        ("]}", "]", "b.json:3: not valid JSON: expected `,` or `}`"),
        (AGENT, "", "b.json: empty"),
        (AGENT, "{\"block_size\": 64, \"requests\": []}", "b.json: empty: it has no request"),
        ("64, \"hash_id", "32, \"hash_id", "b.json: "),
    ] {
        write(folder.path(), "b.json", &AGENT.replacen(from, to, 1));
        for traces in [".", "a.json b.json"] {
            let error = refused(folder.path(), &format!("{traces} --sessions 2"));
            assert!(error.contains(part), "{to}: {error}");
        }
    }
    write(folder.path(), "dynamo.jsonl", &DYNAMO.replace("500", "-500"));
    let error = refused(folder.path(), "dynamo.jsonl --sessions 2");
    assert!(error.contains("dynamo.jsonl:2: delay \"-500\": outside 0..=3.1536e10 ms"), "{error}");

    let empty = tempfile::tempdir().unwrap();
    let error = refused(empty.path(), ". --sessions 2");
    assert!(error.contains("is a directory; only sessions of agents are read from one"), "{error}");
    let error = refused(folder.path(), "a.json missing.json --sessions 2");
    assert!(error.contains("missing.json: cannot open"), "{error}");
    let error = refused(folder.path(), "a.json c.json --format mooncake --sessions 2");
    assert!(error.contains("2 files: several files are read as sessions of agents only"), "{error}");
}

/// The published sessions, of which all but the first few requests are left out.
#[test]
fn published_sessions_are_replayed() {
    let Some(file) = published("agentic/trace_0014.json") else { return };
    let folder = file.parent().unwrap().display().to_string();
    // Of the fewer, most are the first of their session.
    let (requests, least) = if cfg!(debug_assertions) { (100, 0.05) } else { (1000, 0.3) };
    let report = json(&format!("replay {folder} --sessions 4 --requests {requests} --tell-returns --json"));
    let sessions = &report["sessions"];
    assert_eq!((&report["completed"], &sessions["completed"]), (&requests.into(), &sessions["sessions"]));
    let rate = report["hit_rate"].as_f64().unwrap();
    assert!((least..1.0).contains(&rate), "{report}");
    let first: Vec<_> = ["p50", "p99"].map(|name| sessions["first_token_ms"][name].as_f64().unwrap()).into();
    assert!(first[0] > 10.0 && first[0] < first[1], "{sessions}");
    assert_eq!(report["free_list"], Value::Null);
}

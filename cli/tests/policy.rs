//! `kvpool policy` as its users meet it: exit codes, the JSON, and what is said about bad input.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

const KEYS: &[&str] = &["capacity_blocks", "capacity_share", "hit_rate", "policy", "trace"];

fn kvpool(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvpool"))
        .arg("policy")
        .args(arguments)
        .output()
        .expect("the program runs")
}

/// A trace of 200 requests: 20 conversations that take turns.
fn trace(folder: &tempfile::TempDir) -> PathBuf {
    let lines: String = (0..200)
        .map(|at| {
            let (chat, turn) = (at % 20, at / 20);
            let ids: Vec<u64> = (0..=turn).map(|block| chat * 100 + block).collect();
            let tokens = ids.len() * 512;
            format!(
                "{{\"timestamp\": {at}, \"input_length\": {tokens}, \"output_length\": 1, \"hash_ids\": {ids:?}}}\n"
            )
        })
        .collect();
    let path = folder.path().join("trace.jsonl");
    fs::write(&path, lines).unwrap();
    path
}

fn fails(arguments: &[&str], with: &str) {
    let output = kvpool(arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
    assert!(said.contains(with), "{arguments:?}: {said}");
    assert!(output.stdout.is_empty());
}

#[test]
fn json_is_a_list_of_rates() {
    let folder = tempfile::tempdir().unwrap();
    let output = kvpool(&[trace(&folder).to_str().unwrap(), "--json", "--capacities", "0.1,1"]);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    let rates: Value = serde_json::from_slice(&output.stdout).expect("one list and nothing else");
    let rates = rates.as_array().expect("a list");
    assert_eq!(rates.len(), 10);
    for rate in rates {
        let mut keys: Vec<_> = rate.as_object().unwrap().keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, KEYS);
        let share = rate["capacity_share"].as_f64().unwrap();
        assert_eq!(rate["capacity_blocks"].as_f64().unwrap(), 200.0 * share);
        if share == 1.0 {
            // All but the first sight of each of the 200 blocks, of 20 * 55.
            assert_eq!(rate["hit_rate"].as_f64().unwrap(), 900.0 / 1100.0, "{rate}");
        }
    }
    for name in ["lru", "clairvoyant", "foresight"] {
        assert_eq!(rates.iter().filter(|rate| rate["policy"] == name).count(), 2, "{name}");
    }
}

#[test]
fn a_table_a_chart_and_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let (trace, picture) = (trace(&folder), folder.path().join("rates.svg"));
    let path = trace.to_str().unwrap();
    let output = kvpool(&[path, path, "--policies", "lru,priority", "--plot", picture.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.matches("200 requests, 1,100 blocks, 200 of them distinct").count(), 2, "{text}");
    assert!(text.contains("priority") && !text.contains("sieve"), "{text}");
    assert!(text.contains("capacity share ┆ capacity blocks ┆ lru"), "{text}");
    assert!(fs::read_to_string(picture).unwrap().starts_with("<svg"));
}

#[test]
fn bad_usage_and_bad_input_say_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(&folder);
    let path = path.to_str().unwrap();
    fails(&[], "TRACE");
    fails(&["/nowhere.jsonl"], "cannot open");
    for bad in ["0", "-0.1", "1.01", "nan", "x", ""] {
        fails(&[path, &format!("--capacities={bad}")], "--capacities");
    }
    fails(&[path, "--policies", "lru,mru"], "no policy is called \"mru\"; there are lru, ");
    fails(&[path, "--plot", "/nowhere/rates.svg"], "cannot write");
    let azure = folder.path().join("azure.csv");
    fs::write(&azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,10,1\n").unwrap();
    fails(&[azure.to_str().unwrap()], "azure.csv: no request has hash_ids");
    let line =
        |ids: &str| format!("{{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 1{ids}}}\n");
    let good = line(", \"hash_ids\": [1, 2]");
    for (ids, complaint) in [
        (", \"hash_ids\": [3, 3]", "bad.jsonl:2: hash_ids repeat 3 within one prompt, at places 1 and 2"),
        ("", "bad.jsonl:2: no hash_ids"),
    ] {
        let bad = folder.path().join("bad.jsonl");
        fs::write(&bad, good.clone() + &line(ids) + &good).unwrap();
        fails(&[bad.to_str().unwrap()], complaint);
    }
}

/// A trace in which no block comes twice gives every policy a rate of 0.
#[test]
fn a_trace_without_a_repetition_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let once = folder.path().join("once.jsonl");
    let line = "{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 1, \"hash_ids\": [1, 2]}\n";
    fs::write(&once, line).unwrap();
    for options in [&[][..], &["--json"]] {
        let output =
            kvpool(&[&[trace(&folder).to_str().unwrap(), once.to_str().unwrap()][..], options].concat());
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.matches("no block comes twice").count(), 1, "{said}");
        assert!(said.contains("once.jsonl: ") && !output.stdout.is_empty());
    }
}

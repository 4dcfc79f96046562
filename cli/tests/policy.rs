//! `kvpool policy`, end to end: exit codes, the JSON, and the errors of bad input.

use super::common;
use std::fs;
use std::path::Path;

use common::{json, keys, kvpool, kvpool_in, parse, published};

/// A trace of 200 requests: 20 conversations that take turns.
fn trace(folder: &Path) -> String {
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
    let path = folder.join("trace.jsonl");
    fs::write(&path, lines).unwrap();
    path.to_str().unwrap().to_owned()
}

fn fails(arguments: &str, with: &str) {
    let output = kvpool(&format!("policy {arguments}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments}: {said}");
    assert!(said.contains(with), "{arguments}: {said}");
    assert!(output.stdout.is_empty());
}

#[test]
fn json_is_a_list_of_rates() {
    let folder = tempfile::tempdir().unwrap();
    let rates = parse(&kvpool(&format!("policy {} --json --capacities 0.1,1", trace(folder.path()))));
    let rates = rates.as_array().expect("a list");
    assert_eq!(rates.len(), 8);
    for rate in rates {
        assert_eq!(keys(rate), ["capacity_blocks", "capacity_share", "hit_rate", "policy", "trace"]);
        let share = rate["capacity_share"].as_f64().unwrap();
        assert_eq!(rate["capacity_blocks"].as_f64().unwrap(), 200.0 * share);
        if share == 1.0 {
            // Of 20 * 55 blocks, all but the first use of each of the 200.
            assert_eq!(rate["hit_rate"].as_f64().unwrap(), 900.0 / 1100.0, "{rate}");
        }
    }
    for name in ["lru", "s3-fifo", "sieve", "clairvoyant"] {
        assert_eq!(rates.iter().filter(|rate| rate["policy"] == name).count(), 2, "{name}");
    }
}

#[test]
fn a_table_a_chart_and_a_picture() {
    let folder = tempfile::tempdir().unwrap();
    let (path, picture) = (trace(folder.path()), folder.path().join("rates.svg"));
    let plot = picture.display();
    let output = kvpool(&format!("policy {path} {path} --policies lru,priority --plot {plot}"));
    assert_eq!(output.status.code(), Some(0));
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.matches("200 requests, 1,100 blocks, 200 of them distinct").count(), 2, "{text}");
    assert!(text.contains("priority") && !text.contains("sieve"), "{text}");
    assert!(text.contains("capacity share ┆ capacity blocks ┆ lru"), "{text}");
    assert!(fs::read_to_string(picture).unwrap().starts_with("<svg"));
}

/// Three sessions of two turns, each of which needs more than a third of the capacity.
#[test]
fn sessions_run_in_a_closed_loop() {
    let folder = tempfile::tempdir().unwrap();
    for session in 0..3 {
        let step = |t: u32, think: u32, ids: &str| {
            format!("{{\"t\": {t}, \"think_time\": {think}, \"in\": 256, \"out\": 1, \"hash_ids\": [{ids}]}}")
        };
        let steps = [step(0, 0, "1, 2, 3, 4"), step(90, 10 * session + 5, "1, 2, 3, 4")].join(", ");
        let text = format!("{{\"block_size\": 64, \"requests\": [{steps}]}}");
        fs::write(folder.path().join(format!("{session}.json")), text).unwrap();
    }
    let path = folder.path().display();
    let rates = parse(&kvpool(&format!("policy {path} --sessions 3 --orders 2 --capacities 0.75,1 --json")));
    let rates = rates.as_array().expect("a list");
    assert_eq!(rates.len(), 2 * 5);
    for rate in rates {
        let names = ["capacity_blocks", "capacity_share", "hit_rate", "policy", "recomputed_tokens", "trace"];
        assert_eq!(keys(rate), names);
        let (hit_rate, recomputed) = (&rate["hit_rate"], rate["recomputed_tokens"].as_f64().unwrap());
        let all = 2.0 * 3.0 * 256.0;
        assert!((hit_rate.as_f64().unwrap() * all + recomputed - all / 2.0).abs() < 1.0, "{rate}");
    }
    // The blocks of answers need room too.
    let recomputed = |policy: &str| {
        let of_policy = rates.iter().filter(|rate| rate["policy"] == policy);
        of_policy.map(|rate| rate["recomputed_tokens"].as_f64().unwrap()).sum::<f64>()
    };
    assert!(recomputed("lru") > recomputed("sessions-told") && recomputed("lru") > recomputed("clairvoyant"));
    let table = kvpool(&format!("policy {path} --sessions 1 --running 10 --prefill-rate 1000"));
    let text = String::from_utf8_lossy(&table.stdout);
    assert!(text.contains("3 sessions; recomputed tokens of prompts"), "{text}");
    fails(&format!("{} --sessions 2", trace(folder.path())), "no request belongs to a session");
    fails(&format!("{path} --orders 2"), "--sessions");
}

#[test]
fn bad_usage_and_bad_input_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = trace(folder.path());
    fails("", "TRACE");
    fails("/nowhere.jsonl", "cannot open");
    for bad in ["0", "-0.1", "1.01", "nan", "x", ""] {
        fails(&format!("{path} --capacities={bad}"), "--capacities");
    }
    for bad in ["3600001", "18446744073709551615", "-1", "x"] {
        fails(&format!("{path} --running {bad}"), "'--running <MS>': not a whole number from 0 to 3,600,000");
    }
    fails(&format!("{path} --prefill-rate 10"), "<--running <MS>|--sessions <N>>");
    fails(&format!("{path} --policies lru,mru"), "no policy is called \"mru\"; there are lru, ");
    fails(&format!("{path} --plot /nowhere/rates.svg"), "cannot write");
    let azure = folder.path().join("azure.csv");
    fs::write(&azure, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,10,1\n").unwrap();
    fails(azure.to_str().unwrap(), "azure.csv: no request has hash_ids");
    let line =
        |ids: &str| format!("{{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 1{ids}}}\n");
    let good = line(", \"hash_ids\": [1, 2]");
    for (ids, complaint) in [
        (", \"hash_ids\": [3, 3]", "bad.jsonl:2: hash_ids repeat 3 within one prompt, at places 1 and 2"),
        ("", "bad.jsonl:2: no hash_ids"),
    ] {
        let bad = folder.path().join("bad.jsonl");
        fs::write(&bad, good.clone() + &line(ids) + &good).unwrap();
        fails(bad.to_str().unwrap(), complaint);
    }
}

/// A trace in which no block occurs twice gives every policy a rate of 0.
#[test]
fn a_trace_without_a_repetition_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let once = folder.path().join("once.jsonl");
    let line = "{\"timestamp\": 0, \"input_length\": 1024, \"output_length\": 1, \"hash_ids\": [1, 2]}\n";
    fs::write(&once, line).unwrap();
    trace(folder.path());
    for option in ["", "--json"] {
        let output = kvpool_in(folder.path(), &format!("policy trace.jsonl once.jsonl {option}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.matches("no block occurs twice").count(), 1, "{said}");
        assert!(said.contains("once.jsonl: ") && !output.stdout.is_empty());
    }
}

/// At 5 %: the rates published for the known policies.
#[test]
fn the_conversation_trace_has_the_documented_rates() {
    let Some(path) = published("mooncake_conversation.jsonl") else { return };
    let rates = json(&format!("policy {} --capacities 0.05 --json", path.display()));
    let rate = |name: &str| {
        let is_wanted = |rate: &&serde_json::Value| rate["policy"] == name && rate["capacity_blocks"] == 9140;
        rates.as_array().unwrap().iter().find(is_wanted).unwrap()["hit_rate"].as_f64().unwrap()
    };
    for (name, measured) in [("lru", 0.196), ("s3-fifo", 0.187), ("sieve", 0.128), ("clairvoyant", 0.366)] {
        assert!((rate(name) - measured).abs() < 0.0015, "{name}: {}", rate(name));
    }
    let table = kvpool(&format!("policy {} --capacities 0.05 --policies lru", path.display()));
    let text = String::from_utf8(table.stdout).unwrap();
    assert!(text.contains("12,031 requests, 288,500 blocks, 182,790 of them distinct"), "{text}");
}
